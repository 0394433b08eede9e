"""What the GPU writes to a narrow cache has the specification's bits: under Triton's interpreter, or on the card."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

ON_CARD = torch.cuda.is_available()
if not ON_CARD:
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of Triton
pytest.importorskip("triton")

from tests.ops.test_triton import DEVICE, copied, moved, turned  # noqa: E402
from twostroke.ops.cuda.kernels.rope import rotate_and_store  # noqa: E402
from twostroke.ops.interface import BLOCK, Attention, Batch, GroupBlocks, KVLayer  # noqa: E402
from twostroke.ops.reference.kv_codec import write_kv  # noqa: E402

TOKENS, HEADS, DIM = 24, 2, 64
ELEMENTS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def empty_cache(kv_format: str) -> KVLayer:
    data = torch.zeros(2, 2, HEADS, BLOCK, DIM).to(ELEMENTS[kv_format])
    scales = torch.zeros(2, 2, HEADS, BLOCK)
    return KVLayer(kv_format, data[0], data[1], scales[0], scales[1])  # type: ignore[arg-type]


# The interpreter loses a carry where a number rounds up to the next power of two in fp8.
@pytest.mark.parametrize("kv_format", ELEMENTS if ON_CARD else ["int8"])
@pytest.mark.gpu if ON_CARD else lambda test: test
def test_codes_and_scales_are_the_specifications(kv_format):
    """Numbers of eight bits, as projections are: many lie between two codes, where a last bit decides."""
    qkv = torch.randn(TOKENS, 4 * HEADS * DIM, generator=torch.Generator().manual_seed(1)).bfloat16()
    places = torch.arange(TOKENS)
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    batch = Batch(
        places, places, torch.tensor([0, TOKENS], dtype=torch.int32), torch.tensor([TOKENS], dtype=torch.int32),
        (GroupBlocks(places, table),), places,
    )  # fmt: skip
    attention = Attention(2 * HEADS, HEADS, DIM, DIM**-0.5)
    found = copied(empty_cache(kv_format), DEVICE)
    rotate_and_store(qkv.to(DEVICE), attention, found, moved(batch, streams=False), 0, keep_k=False)
    expected = empty_cache(kv_format)
    k, v = (x.reshape(TOKENS, HEADS, DIM).float() for x in qkv[:, 2 * HEADS * DIM :].split(HEADS * DIM, dim=1))
    write_kv(expected, places, k, v)
    if kv_format == "fp8":  # the best of several scales: their errors are sums, which a device adds in another order
        same = found.key_scales.cpu() == expected.key_scales
        assert same.float().mean() > 0.98
        assert torch.equal(found.keys.view(torch.uint8).cpu()[same], expected.keys.view(torch.uint8)[same])
        assert (found.value_scales.cpu() == expected.value_scales).float().mean() > 0.98
        return
    for ours, theirs in (
        (found.key_scales, expected.key_scales),
        (found.value_scales, expected.value_scales),
        (found.keys.view(torch.uint8), expected.keys.view(torch.uint8)),
        (found.values.view(torch.uint8), turned(expected.values).view(torch.uint8)),
    ):
        assert torch.equal(ours.cpu(), theirs)


def test_compiled_divisions_are_rounded_as_ieee_asks_for():
    """The interpreter always rounds so; what `/` becomes on a GPU (div.full) does not."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.compile_store"], capture_output=True, text=True, check=True, env=plain
    )
    assert done.stdout.count("div.rn.f32") >= 2 * 2
    assert "div.full" not in done.stdout and "div.approx" not in done.stdout
