"""A start brings in no more than it needs, and the garbage collector rests meanwhile."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from twostroke.config import Config
from twostroke.engine import device
from twostroke.errors import ConfigError
from twostroke.ops.cpu.library import available
from twostroke.startup import collector_paused

WATCHED = """
import gc
import twostroke
passes = []
gc.callbacks.append(lambda phase, info: passes.append(phase))
twostroke.LLM
assert gc.isenabled()
assert len(passes) < 10, f"{len(passes) // 2} collections while the engine was imported"
"""
USED = """
import sys
import twostroke.remote.child_main
from twostroke import LLM, Grammar, SamplingParams

folder = sys.argv[1]
llm = LLM(folder, device="cpu", threads=2, kv_dtype="bfloat16", kv_blocks=12, max_model_len=128, kv_offload=1 << 24)
asked = [
    SamplingParams(max_tokens=4, temperature=0.0, logprobs=2, prompt_logprobs=1),
    SamplingParams(max_tokens=4, top_p=0.9, top_k=20, min_p=0.01, frequency_penalty=0.5),
    SamplingParams(max_tokens=4, grammar=Grammar("regex", "[ab]+")),
]
for turn in range(2):
    outputs = llm.generate([[7 * i % 300 + 3 + n for i in range(60)] for n in range(3)], asked)
    assert all(output.samples[0].token_ids for output in outputs), outputs
assert llm.stats()["blocks_offloaded"]
for settings in ({"quantize": "int4"}, {"dtype": "bfloat16", "kv_dtype": "int8"}, {"dtype": "float16"}):
    LLM(folder, device="cpu", threads=1, max_model_len=64, **settings).generate("a", asked[0])
brought = sorted({name.split(".")[0] for name in sys.modules} & {"torch", "triton", "transformers", "safetensors"})
assert not brought, f"{brought} imported"
"""


def test_off_inside_and_on_again_after_an_error():
    def fail():
        with collector_paused(), collector_paused():
            assert not gc.isenabled()
            raise KeyError

    assert gc.isenabled()
    with pytest.raises(KeyError):
        fail()
    assert gc.isenabled()


def test_a_collector_that_the_caller_turned_off_stays_off():
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_no_collections_while_the_engine_is_imported():
    subprocess.run([sys.executable, "-c", WATCHED], check=True)


@pytest.mark.skipif(not available(), reason="the native library is not built")
def test_nothing_on_the_native_cpu_path_imports_torch(llama_folder):
    subprocess.run([sys.executable, "-c", USED, str(llama_folder)], check=True)


@pytest.mark.parametrize(("triton", "devices"), [(True, 0), (False, 1)])
def test_torch_is_not_asked_where_there_is_no_device_or_no_triton(triton, devices, monkeypatch):
    monkeypatch.setattr(device, "find_spec", lambda name: object() if triton else None)
    monkeypatch.setattr(device, "cuda_devices", lambda: devices)
    monkeypatch.setattr(device, "cuda_available", lambda: pytest.fail("torch was asked"))
    assert device.choose_device(Config()) == "cpu"
    assert device.choose_device(Config(device="cpu")) == "cpu"


@pytest.mark.parametrize("seen", [True, False])
def test_torch_has_the_last_word_on_a_device(seen, monkeypatch):
    monkeypatch.setattr(device, "find_spec", lambda name: object())
    monkeypatch.setattr(device, "cuda_devices", lambda: 1)
    monkeypatch.setattr(device, "cuda_available", lambda: seen)
    assert device.choose_device(Config()) == ("cuda" if seen else "cpu")
    if seen:
        assert device.choose_device(Config(device="cuda")) == "cuda"
    else:
        with pytest.raises(ConfigError, match="sees no CUDA device"):
            device.choose_device(Config(device="cuda"))
