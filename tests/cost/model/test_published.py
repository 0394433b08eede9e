"""Models by name are costed in the formats of their published weights, and a config.json in the format it names."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

from tests.hostile.tiny_gguf import write
from twostroke.cli.deployment import deployment_for, describe
from twostroke.cli.main import app
from twostroke.cli.plan_tables import context_text, show_drafts
from twostroke.cost.answers.workers import candidates
from twostroke.cost.model import drafts
from twostroke.cost.model.calibration import Calibration
from twostroke.cost.model.devices import find_device
from twostroke.cost.model.known_models import CONFIGS
from twostroke.cost.model.rates import Rates
from twostroke.cost.model.roofline import model_cost
from twostroke.cost.model.weight_formats import PUBLISHED
from twostroke.errors import ConfigError, ModelError
from twostroke.record import replace

SIZES = {  # bytes of the published weights, without layers that predict further tokens
    "gpt-oss-20b": 13.76e9,
    "gpt-oss-120b": 65.2e9,
    "deepseek-v3": 673e9,
    "kimi-k2": 1_029e9,
    "deepseek-v4-flash": 155.6e9,
    "deepseek-v2-lite": 31.4e9,
    "qwen3-30b-a3b": 61.1e9,
    "qwen3-235b-a22b": 470e9,
    "mixtral-8x7b": 93.4e9,
    "olmoe-1b-7b": 13.84e9,
}


@pytest.mark.parametrize("name", SIZES)
def test_bytes_are_the_published_ones(name: str) -> None:
    found, _ = deployment_for(name, "h200", None, 1, {})
    assert found.model.bytes == pytest.approx(SIZES[name], rel=0.005)


def test_what_is_asked_for_comes_first() -> None:
    """--precision, dtype and quantize, in this order before the published format."""
    wide = 2 * 20_914_757_184
    for precision, settings in (("bfloat16", {}), (None, {"dtype": "bfloat16"})):
        assert deployment_for("gpt-oss-20b", "h200", precision, 1, settings)[0].model.bytes == wide
    small = deployment_for("gpt-oss-20b", "h200", None, 1, {"quantize": "int8"})[0]
    assert small.model.bytes == pytest.approx(wide / 2, rel=0.01)
    with pytest.raises(ConfigError, match="--precision mxfp4: it must be one of float32"):
        deployment_for("gpt-oss-20b", "h200", "mxfp4", 1, {})


def test_a_dtype_decodes_the_codes_of_a_file(tmp_path: Path) -> None:
    path = str(write(tmp_path / "model.gguf", "Q4_0"))
    stored, decoded = (deployment_for(path, "h200", None, 1, more)[0] for more in ({}, {"dtype": "bfloat16"}))
    assert stored.stored_bytes is not None and decoded.stored_bytes is None
    assert decoded.model.bytes == pytest.approx(2 * decoded.arch.parameters)


def test_a_dtype_decodes_the_codes_of_a_file_on_this_machine_too(tmp_path: Path) -> None:
    path = str(write(tmp_path / "model.gguf", "Q4_0"))
    rates = Rates(1e10, 1e11, 1e10, 5e10, 1e-3, 1e-5, source="measured")
    measured = Calibration("cpu", path, rates, 10**9, 2)
    with mock.patch("twostroke.cli.deployment.calibrated", return_value=measured):
        stored, decoded = (deployment_for(path, "this", None, 1, more)[0] for more in ({}, {"dtype": "float32"}))
    assert stored.stored_bytes is not None and decoded.stored_bytes is None
    assert decoded.model.bytes == pytest.approx(4 * decoded.arch.parameters)


def test_a_dtype_that_is_asked_for_is_the_only_one() -> None:
    load = ("--prompt", "400", "--output", "20", "--ttft", "0.0001")
    asked = ["plan", "llama-3.2-1b", "-s", "dtype=bfloat16", *load]
    shown = CliRunner().invoke(app, asked, env={"COLUMNS": "200"}).output
    assert "h200, bfloat16" in shown and not [name for name in ("int8", "int4", "fp8") if f"h200, {name}" in shown]


def test_a_draft_has_a_format_of_its_own() -> None:
    """Not that of the model which it drafts for."""
    target, wide = (deployment_for("deepseek-v3", "h200", precision, 8, {})[0] for precision in (None, "bfloat16"))
    line = replace(wide, arch=describe("llama-3.2-3b").arch).roofline()
    with mock.patch.object(drafts, "best_length", wraps=drafts.best_length) as chosen:
        show_drafts(target, "llama-3.2-3b", 0.7, 400)
    helper = chosen.call_args.args[1].draft
    assert helper is not None and helper.model.bytes == line.model.bytes


def test_a_stream_reads_narrow_experts() -> None:
    """A row reads 4 of 32 experts in four bits, and the attention's matrices in 16."""
    arch = describe("gpt-oss-20b").arch
    cost, each = model_cost(arch, "mxfp4", kind="cuda"), 17 / 32
    used = arch.expert_weights / 8
    assert cost.read_bytes(1) == pytest.approx(used * each + 2 * (arch.layer_weights - arch.expert_weights))
    assert cost.read_bytes(1) > 1.3 * cost.layer_bytes * arch.read_share(1), "not the mean width"
    stored = model_cost(arch, "mxfp4", cost.bytes // 2, "cuda")
    assert stored.bytes == cost.bytes // 2 and stored.read_bytes(1) == pytest.approx(cost.read_bytes(1) / 2)


@pytest.mark.parametrize(
    ("name", "more", "published"),
    [
        ("gpt-oss-20b", {}, "mxfp4"),
        ("deepseek-v3", {}, "fp8-squares"),
        ("deepseek-v4-flash", {}, "fp8-mxfp4"),
        ("deepseek-v4-flash", {"expert_dtype": "fp8"}, "fp8-squares"),
        ("llama-3.1-8b", {}, None),
        ("llama-3.1-8b", {"quantization_config": {"quant_method": "fbgemm_fp8"}}, "fp8-squares"),
        ("deepseek-v3", {"quantization_config": None}, None),
    ],
)
def test_a_config_names_its_format(name: str, more: dict, published: str | None, tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIGS[name], **more}))
    assert describe(str(path)).published == published


def test_a_format_that_is_not_read_is_refused(tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIGS["llama-3.1-8b"], "quantization_config": {"quant_method": "bitsandbytes"}}))
    with pytest.raises(ModelError, match="'bitsandbytes', which is not read"):
        describe(str(path))


def test_windows_alone_do_not_make_contexts_cheap(tmp_path: Path) -> None:
    """Of a config in which no layer has entries for several tokens."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["deepseek-v4-flash"] | {"layer_types": ["sliding_attention"] * 43}))
    found, whole = (deployment_for(name, "h200", None, 2, {})[0] for name in (str(path), "deepseek-v4-flash"))
    assert context_text(found) is None and context_text(whole) is not None


def test_a_search_tries_the_published_format_too() -> None:
    found, _ = deployment_for("gpt-oss-120b", "h200", None, 1, {})
    options = candidates(found.arch, [find_device("h100")], found.config, (1, 4), [found.precision])
    assert {(one.gpus, one.precision) for one in options} >= {(1, "mxfp4"), (4, "bfloat16"), (4, "mxfp4")}


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ({}, {("h100", "bfloat16"), ("h100", "fp8"), ("a100", "bfloat16"), ("a100", "int8")}),
        ({"dtype": "float16"}, {("h100", "float16"), ("a100", "float16")}),
        ({"quantize": "fp8"}, {("h100", "fp8")}),
    ],
)
def test_a_search_tries_what_is_asked_for_alone(settings: dict[str, str], kinds: set[tuple[str, str]]) -> None:
    found, _ = deployment_for("llama-3.1-8b", "h200", None, 1, settings)
    devices = [find_device("h100"), find_device("a100")]
    options = [(one.device.name, one.precision) for one in candidates(found.arch, devices, found.config, (1,))]
    assert kinds <= set(options) and len(options) == len(kinds if settings else set(options))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gpt-oss-20b",), ["weights 13,761,264,768 bytes", PUBLISHED["mxfp4"], "h200, as published"]),
        (
            ("deepseek-v3", "--gpus", "8"),
            [
                PUBLISHED["fp8-squares"], "would hold 1,342,052,838,400 bytes; -s quantize=fp8", "KV 70,272 bytes",
                "caches 576 numbers of a token in a layer for all 128 heads", "would take 4,997,120 bytes a token",
            ],
        ),
        (
            ("deepseek-v4-flash", "--gpus", "2"),
            [PUBLISHED["fp8-mxfp4"], "an entry stands for 4 or 128 tokens", "would take 44,032 bytes a token"],
        ),
        (("mixtral-8x7b",), ["weights bfloat16: one worker"]),
    ],
)  # fmt: skip
def test_plan_names_the_format_and_why_contexts_are_cheap(arguments: tuple[str, ...], words: list[str]) -> None:
    """A target that no worker meets: nothing is simulated at length."""
    load = ("--prompt", "400", "--output", "20", "--ttft", "0.0001")
    result = CliRunner().invoke(app, ["plan", *arguments, *load], env={"COLUMNS": "200"})
    shown = " ".join(result.output.split())
    assert result.exit_code == 1 and [word for word in words if word not in shown] == []
