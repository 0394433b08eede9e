"""Checkpoints in published formats of few bits load as they are: logits beside transformers' with their values."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from tests import published, tiny
from tests.helpers import run_tokens
from twostroke.config import Config
from twostroke.engine.build import count_weights
from twostroke.errors import ModelError
from twostroke.ops.cpu.backend import NativeCpuOps
from twostroke.ops.formats import dequantize
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.describe import checkpoint_bytes, kept_weights, whole_tensors
from twostroke.weights.load import load_model
from twostroke.weights.published import Coded

TOKENS = [(7 * i + 3) % 300 + 3 for i in range(24)]
SHAPE = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1, "head_dim": 64, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_llama(tmp_path_factory.mktemp("plain") / "model", **SHAPE)


def copied(folder: Path, target: Path) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def expected_logits(plain: Path, meant: dict[str, torch.Tensor]) -> torch.Tensor:
    peer = transformers.AutoModelForCausalLM.from_pretrained(plain).eval()
    peer.load_state_dict(meant, strict=False)
    with torch.no_grad():
        return peer(torch.tensor([TOKENS])).logits[0]


@pytest.mark.parametrize("kind", published.FORMATS)
def test_logits(plain: Path, tmp_path: Path, kind: str) -> None:
    folder = copied(plain, tmp_path / "model")
    expected = expected_logits(plain, published.rewrite(folder, kind))
    exact = load_model(open_checkpoint(folder), NativeCpuOps(2, weights="float32"), 64)
    rounding = 0.03 if kind == "compressed int8, zero points" else 2e-4  # those become float16
    torch.testing.assert_close(run_tokens(exact, TOKENS), expected, atol=rounding, rtol=0)
    kept = load_model(open_checkpoint(folder), NativeCpuOps(2), 64)
    found = run_tokens(kept, TOKENS)
    error = (found - expected).norm() / expected.norm()
    assert error < 0.06, error  # activations are 8-bit codes there


def load(folder: Path) -> None:
    load_model(open_checkpoint(folder), NativeCpuOps(1), 64)


Q = "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(
    ("kind", "name", "change", "named"),
    [
        ("fp8, one scale, static", "weight_scale", None, r"q_proj\.weight_scale_inv is missing"),
        ("compressed fp8 by output", "weight_scale", lambda x: x[:-1], "has shape .*one scale, one for each output"),
        ("compressed fp8 by output", "weight_scale", lambda x: x.int(), "dtype I32"),
        ("compressed int8", "weight_scale", None, r"q_proj\.weight_scale is missing"),
        ("compressed int8, zero points", "weight_zero_point", lambda x: x[:-1], "zero_point has shape"),
        ("compressed 4 bits", "weight_scale", lambda x: x[:, :1].repeat(1, 3), "3 groups, which do not divide 256"),
        ("compressed 4 bits", "weight_shape", lambda x: x * 2, "not 4 or 8 bits for"),
        ("compressed 4 bits", "weight_shape", lambda x: -x, "no size of a matrix"),
        ("compressed 4 bits", "weight_shape", None, r"weight_shape is missing"),
        ("compressed 4 bits, act-order", "weight_g_idx", lambda x: x + 1, "names groups outside 0 to 3"),
        ("gptq", "qzeros", None, r"q_proj\.qzeros is missing"),
        ("gptq", "scales", lambda x: x[:, :-1], r"scales has shape \(2, 255\), expected \(2, 256\)"),
        ("gptq", "qweight", lambda x: x[:-1], "has 248 inputs, which groups of 128 do not divide"),
        ("gptq", "qweight", lambda x: x[:16], r"q_proj\.scales has shape \(2, 256\), expected \(1, 256\)"),
        ("gptq", "qweight", lambda x: x.view(-1), "it must have two dimensions"),
        ("gptq", "qweight", lambda x: x.float(), "has dtype F32, not I32"),
        ("gptq", "g_idx", lambda x: x[:-1], r"g_idx has shape \(255,\), expected \(256,\)"),
        ("gptq", "bias", lambda x: x + 1, r"q_proj\.bias is left over"),
        ("awq", "qzeros", lambda x: x[:, :-1], "qzeros has shape"),
    ],
)
def test_malformed(plain: Path, tmp_path: Path, kind: str, name: str, change: object, named: str) -> None:
    folder = copied(plain, tmp_path / "model")
    published.rewrite(folder, kind)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensor = tensors.pop(Q + name)
    if callable(change):
        tensors[Q + name] = change(tensor).contiguous()
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=named):
        load(folder)


def test_what_a_matrix_becomes(plain: Path, tmp_path: Path) -> None:
    kept = {
        "gptq": "Q4_0", "gptq, act-order": "Q4_0", "awq": "Q4_Z", "gptq, 8 bits": "Q8_0", "compressed int8": "Q8_0",
        "compressed int8, zero points": "F16", "fp8 in squares": "F8_32", "fp8, one scale, static": "F8_32",
    }  # fmt: skip
    for number, (kind, name) in enumerate(kept.items()):
        folder = copied(plain, tmp_path / str(number))
        meant = published.rewrite(folder, kind)[f"{Q}weight"]
        coded = whole_tensors(open_checkpoint(folder))[f"{Q}weight"]
        assert isinstance(coded, Coded)
        stored = coded.decode()
        assert (stored.format, stored.order is not None) == (name, "act-order" in kind)
        if name != "F16":
            np.testing.assert_array_equal(dequantize(stored), meant.numpy())


def test_bitsandbytes_is_refused_before_its_tensors_are_read(plain: Path, tmp_path: Path) -> None:
    folder = copied(plain, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {f"{Q}weight": torch.zeros(64, 1, dtype=torch.uint8)}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"quantization_config has quant_method 'bitsandbytes'.*bfloat16 version"):
        open_checkpoint(folder)


def test_matrices_of_one_product_in_several_orders(plain: Path, tmp_path: Path) -> None:
    """Then the inputs of each are put back into their own order."""
    folder = copied(plain, tmp_path / "model")
    meant = published.rewrite(folder, "gptq, act-order")
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    for name in ("qweight", "g_idx"):
        words = tensors[Q + name]
        tensors[Q + name] = words.reshape(2, -1, *words.shape[1:]).flip(0).reshape(words.shape).contiguous()
    meant[f"{Q}weight"] = torch.cat(meant[f"{Q}weight"].chunk(2, dim=1)[::-1], dim=1)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    model = load_model(open_checkpoint(folder), NativeCpuOps(2, weights="float32"), 64)
    torch.testing.assert_close(run_tokens(model, TOKENS), expected_logits(plain, meant), atol=2e-4, rtol=0)
    narrow = run_tokens(load_model(open_checkpoint(folder), NativeCpuOps(2), 64), TOKENS)
    assert (narrow - expected_logits(plain, meant)).norm() / narrow.norm() < 0.06


def test_experts_with_act_order(tmp_path: Path) -> None:
    folder = tiny.tiny_mixture(tmp_path / "model", hidden_size=64, moe_intermediate_size=64, num_attention_heads=4)
    published.rewrite(folder, "gptq, act-order, zero points")
    exact = run_tokens(load_model(open_checkpoint(folder), NativeCpuOps(2, weights="float32"), 64), TOKENS)
    model = load_model(open_checkpoint(folder), NativeCpuOps(2), 64)
    found = run_tokens(model, TOKENS)
    assert (found - exact).norm() / exact.norm() < 0.06
    torch.testing.assert_close(run_tokens(model, TOKENS, chunks=[1] * 24), found, atol=0, rtol=0)


def test_memory_and_what_the_log_says(plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A plan counts what a device keeps, not what the file has."""
    caplog.set_level("INFO", logger="twostroke")
    floats = checkpoint_bytes(open_checkpoint(plain))
    weights = 2 * 256 * 256 + 2 * 128 * 256 + 3 * 384 * 256  # in the layers
    rest = floats - 4 * weights
    expected = {  # bytes in 32 weights on a CPU and on a GPU
        "fp8 in squares": (64, 64), "fp8, one scale, static": (64, 32), "awq": (20, 20), "compressed int8": (34, 32),
        "compressed int8 in groups": (34, 64),
    }  # fmt: skip
    for kind, sizes in expected.items():
        folder = copied(plain, tmp_path / kind)
        published.rewrite(folder, kind)
        checkpoint = open_checkpoint(folder)
        assert checkpoint_bytes(checkpoint) == rest + weights * sizes[0] // 32
        assert checkpoint_bytes(checkpoint, "cuda") == rest // 2 + weights * sizes[1] // 32
    assert kept_weights(open_checkpoint(tmp_path / "awq"), "cpu", "float32").bytes == floats
    assert kept_weights(open_checkpoint(tmp_path / "awq"), "cuda", "bfloat16") == (floats // 2, 7)
    size = count_weights(open_checkpoint(tmp_path / "fp8 in squares"), "cpu", Config())
    assert f"7 matrices of few bits are kept in 16 bits on a cpu; the weights take {size:,} bytes" in caplog.text


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "empty": lambda x: torch.atleast_1d(x)[:0],
    "no columns": lambda x: torch.atleast_1d(x)[..., :0],
    "flat": lambda x: x.reshape(-1),
    "turned": lambda x: torch.atleast_2d(x).T,
    "a stack": lambda x: x.unsqueeze(0),
    "one number": lambda x: x.reshape(-1)[0],
    "twice": lambda x: torch.cat([torch.atleast_1d(x)] * 2),
    "floats": lambda x: x.float(),
    "int32": lambda x: x.float().int(),
    "int64": lambda x: x.float().long(),
    "int8": lambda x: x.float().to(torch.int8),
    "ones": lambda x: torch.full_like(x, -1) if x.dtype != torch.float8_e4m3fn else x,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", published.FORMATS)
def test_any_change_is_our_error_or_none(plain: Path, tmp_path: Path, kind: str) -> None:
    folder = copied(plain, tmp_path / "model")
    published.rewrite(folder, kind)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.startswith(Q)]:
        for change in CHANGES.values():
            changed = {**tensors, name: change(tensors[name]).contiguous()}
            safetensors.torch.save_file(changed, folder / "model.safetensors")
            with suppress(ModelError):
                load(folder)
