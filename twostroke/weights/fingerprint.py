"""A fingerprint of a checkpoint's weights, made in a fraction of a second: every tensor's name, format and shape, and a
sample of its bytes. Two copies of a file in different places have the same fingerprint."""

from __future__ import annotations

from hashlib import blake2b

from twostroke.weights.checkpoint import Checkpoint

SAMPLES = 8  # places of a tensor that are looked at
SAMPLE_BYTES = 512


def fingerprint(checkpoint: Checkpoint) -> str:
    digest = blake2b(digest_size=16)
    for name, tensor in sorted(checkpoint.tensors.items()):
        digest.update(f"{name} {tensor.format} {tensor.shape} ".encode())
        data, step = tensor.data.reshape(-1).view("u1"), max(1, tensor.nbytes // SAMPLES)
        for start in range(0, tensor.nbytes, step):
            digest.update(data[start : start + SAMPLE_BYTES].tobytes())
    return digest.hexdigest()
