"""A model as data and the model with its weights name the same products: what is costed is what a step multiplies."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests import tiny
from twostroke.ops.reference.backend import ReferenceOps
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.load import load_arch, load_model

OTHERS = ("llama", "gemma", "deepseek", "mixture", "gpt_oss", "deepseek_v4")
Sizes = dict[str, tuple[int, int]]  # of each name: outputs, inputs


def joined(products: Iterable[tuple[str, int, int]]) -> Sizes:
    """Matrices of one name, such as those of groups of heads, one below the other."""
    found: Sizes = {}
    for name, outputs, inputs in products:
        found[name] = found.get(name, (0, 0))[0] + outputs, inputs
    return found


@pytest.mark.parametrize("name", [*tiny.FAMILIES, *OTHERS])
def test_the_same_products(name: str, tmp_path: Path) -> None:
    folder = getattr(tiny, f"tiny_{name}")(tmp_path) if name in OTHERS else tiny.tiny_family(tmp_path, name)
    checkpoint = open_checkpoint(folder)
    arch = load_arch(checkpoint)
    model = load_model(checkpoint, ReferenceOps(), 128)
    for described, loaded in zip(arch.layers, model.layers, strict=True):
        one = [product for product in described.products(arch.hidden) if product.matrices == 1]  # not those of experts
        packed = [(product.name, *product.weight.weight.shape) for product in loaded.products()]  # type: ignore[attr-defined]
        assert joined(packed) == joined((product.name, product.outputs, product.inputs) for product in one)
