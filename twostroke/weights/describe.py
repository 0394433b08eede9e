"""What a checkpoint's description says, before any weight is read. Torch-free: servers and planners use it."""

from __future__ import annotations

from twostroke.model.arch import Arch
from twostroke.model.families import arch_from_config
from twostroke.model.families_gguf import arch_from_gguf
from twostroke.ops.formats import Stored, dequantize, kept_format, stored_bytes
from twostroke.weights.checkpoint import Checkpoint
from twostroke.weights.published import Coded, assembled


def load_arch(checkpoint: Checkpoint) -> Arch:
    """The checkpoint's architecture; reads its description and at most a few small tensors."""
    where = checkpoint.path.name
    if checkpoint.kind == "safetensors":
        return arch_from_config(checkpoint.config, f"{where}/config.json")
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    return arch_from_gguf(
        checkpoint.config, shapes, lambda name: dequantize(checkpoint.tensors[name]).tolist(), f"{where} metadata"
    )


def whole_tensors(checkpoint: Checkpoint) -> dict[str, Stored | Coded]:
    """The checkpoint's tensors, those that make up one matrix in a published format put together."""
    return assembled(checkpoint.tensors, checkpoint.scheme, checkpoint.path.name)


def checkpoint_bytes(checkpoint: Checkpoint, device: str = "cpu") -> int:
    """Of the weights as a device of this kind keeps them: where it cannot in the file's bits, in 16."""
    return sum(kept_bytes(tensor, device) for tensor in whole_tensors(checkpoint).values())


def kept_bytes(tensor: Stored | Coded, device: str) -> int:
    name = kept_format(tensor.format, device)
    return tensor.nbytes if name == tensor.format and isinstance(tensor, Stored) else stored_bytes(name, tensor.shape)
