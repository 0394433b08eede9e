"""Experts whose tensors do not fit: a sentence that names the tensor, says why and what to do."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.model.gpt_oss_files import random_peer, write_gpt_oss
from tests.model.test_gguf_parity import write_gguf
from tests.model.test_parity import load, make_peer, rewrite
from tests.published import code_experts
from twostroke.errors import ModelError
from twostroke.ops.reference.backend import ReferenceOps
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.load import load_model

DOWN = "model.layers.1.mlp.experts.down_proj"
BOTH = "Weights and description do not fit: fetch both again"


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_mxfp4_of_inputs_that_its_groups_do_not_divide(tmp_path: Path) -> None:
    """The experts of a model of 48 numbers, in groups of 32."""
    random_peer(hidden_size=48, num_hidden_layers=2).save_pretrained(tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"

    def code(tensors: dict[str, torch.Tensor]) -> None:
        experts, _, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.zeros(experts, outputs, 2, 16, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.zeros(experts, outputs, 2, dtype=torch.uint8)

    rewrite(tmp_path, code)
    with pytest.raises(ModelError, match=f"{name}_blocks: .* groups of 32, which do not divide 48 inputs. {BOTH}"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop(f"{DOWN}_scales"), rf"{DOWN}_scales is missing; .* fetch it again"),
        (lambda t: t.pop(f"{DOWN}_blocks"), rf"{DOWN} is missing; .* fetch it again|{DOWN}_scales is left over"),
        (
            lambda t: t.update({f"{DOWN}_scales": t[f"{DOWN}_scales"][:, :, 1:].contiguous()}),
            rf"_scales has .*\. {BOTH}",
        ),
        (
            lambda t: t.update({f"{DOWN}_blocks": t[f"{DOWN}_blocks"][:, :, :2].contiguous()}),
            rf"_blocks has .*\. {BOTH}",
        ),
        (lambda t: t.update({f"{DOWN}_scales": t[f"{DOWN}_scales"].float()}), rf"it must hold bytes\. {BOTH}"),
        (lambda t: t.pop("model.layers.1.mlp.router.bias"), r"mlp\.router\.bias is missing; .* fetch it again"),
    ],
)
def test_parts_of_mxfp4(change: object, named: str, tmp_path: Path) -> None:
    random_peer(num_hidden_layers=2).save_pretrained(tmp_path)
    code_experts(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(ModelError, match=named):
        load(tmp_path)


@pytest.mark.parametrize("missing", ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"])
def test_an_expert_tensor_that_a_gguf_file_lacks(missing: str, tmp_path: Path) -> None:
    peer = make_peer("olmoe", tmp_path / "folder")
    write_gguf(tmp_path / "model.gguf", "olmoe", peer, {})
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    del checkpoint.tensors[f"blk.1.{missing}.weight"]
    with pytest.raises(ModelError, match=rf"blk\.1\.{missing}\.weight is missing; .* fetch it again"):
        load_model(checkpoint, ReferenceOps(), 64)


def test_mxfp4_in_gguf_whose_rows_are_not_whole_groups(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gpt_oss(path, random_peer(num_hidden_layers=2), coded=True)
    data, name = bytearray(path.read_bytes()), b"blk.1.ffn_down_exps.weight"
    at = data.index(name) + len(name) + 4  # behind the number of dimensions
    assert struct.unpack_from("<Q", data, at) == (96,)
    struct.pack_into("<Q", data, at, 80)
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"ffn_down_exps.* not a multiple of MXFP4's block of 32\. .*fetch or convert"):
        open_checkpoint(path)
