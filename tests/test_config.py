from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from twostroke.cli.options import parse_settings
from twostroke.config import SETTINGS, longest_that_fits, make_config, resolve
from twostroke.engine.settings import LIVE
from twostroke.errors import ConfigError
from twostroke.hardware import Hardware
from twostroke.kv.layout import make_layout
from twostroke.model.arch import Arch, DenseArch, GroupedArch, LayerArch, seen_pairs

LLAMA_8B = Arch(
    family="llama",
    vocab=128256,
    hidden=4096,
    layers=(LayerArch(GroupedArch(32, 8, 128), DenseArch(14336)),) * 32,
    max_positions=8192,
    norm_eps=1e-5,
)
MACHINE = Hardware("cpu", cores=4, free_memory=32 * 10**9)


def test_everything_is_derived_with_a_reason():
    settings = resolve(make_config(), LLAMA_8B, MACHINE, weight_bytes=16 * 10**9)
    assert settings.threads == 4
    assert settings.kv_blocks * settings.layout.block_bytes <= 0.25 * 16e9
    for name in ("threads", "kv_dtype", "max_model_len", "max_batch_tokens", "max_requests", "kv_blocks", "max_gap"):
        assert settings.reasons[name]


def test_what_was_given_is_kept_and_needs_no_reason():
    settings = resolve(make_config(threads=1, max_requests=3, kv_blocks=99), LLAMA_8B, MACHINE, 0)
    assert (settings.threads, settings.max_requests, settings.kv_blocks) == (1, 3, 99)
    assert "threads" not in settings.reasons
    assert settings.max_model_len == 99 * 16  # what the blocks hold, and it says so
    assert "99 KV blocks" in settings.reasons["max_model_len"]


def test_the_cache_is_never_larger_than_can_be_used():
    settings = resolve(make_config(max_requests=2, max_model_len=160), LLAMA_8B, MACHINE, 0)
    assert settings.kv_blocks == 2 * 10


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"kv_dtyp": "int8"}, "kv_dtype"),
        ({"colour": 1}, "Known settings"),
        ({"policy": "lifo"}, "fcfs"),
        ({"threads": 0}, "threads"),
        ({"kv_blocks": 2, "kv_memory": 5}, "give one"),
        ({"max_gap": 0}, "max_gap"),
        ({"max_gap": 1, "chunked_prefill": False}, "chunked_prefill"),
        ({"prefix_cache": 1}, "prefix_cache"),
        ({"kv_offload": -1}, "kv_offload"),
        ({"kv_offload": 1 << 30, "prefix_cache": False}, "needs prefix_cache"),
        ({"max_gap": 1, "policy": "prefill-first"}, "prefill-first"),
        ({"dtype": "int8"}, "float32"),
        ({"seed": -1}, "seed"),
        ({"dtype": "float32", "quantize": "int8"}, "give one"),
        ({"batching": "dynamic"}, "static"),
        ({"exact": 1}, "exact"),
    ],
)
def test_wrong_settings_are_refused_with_a_fix(settings, word):
    with pytest.raises(ConfigError, match=word):
        make_config(**settings)


@pytest.mark.parametrize("asked", [None, True, False])
def test_a_cpu_is_exact_whatever_was_asked_for(asked):
    settings = resolve(make_config(exact=asked), LLAMA_8B, MACHINE, 0)
    assert settings.exact
    assert "CPU" in settings.reasons["exact"]


def test_exactness_on_a_gpu_is_a_choice():
    card = Hardware("cuda", cores=4, free_memory=64 * 10**9)
    settings = resolve(make_config(), LLAMA_8B, card, 0)
    assert not settings.exact
    assert "exact=True" in settings.reasons["exact"]
    assert resolve(make_config(exact=True), LLAMA_8B, card, 0).exact
    for bits in ("fp8", "int8", "int4"):
        assert resolve(make_config(exact=True, quantize=bits), LLAMA_8B, card, 0).exact
        assert "not measured" in resolve(make_config(quantize=bits), LLAMA_8B, card, 0).reasons["exact"]


def test_a_narrow_cache_and_float32_do_not_go_together_on_a_gpu():
    card = Hardware("cuda", 16, 100 << 30)
    with pytest.raises(ConfigError, match="kv_dtype='int8' on a GPU goes with dtype='bfloat16' only"):
        resolve(make_config(dtype="float32", kv_dtype="int8"), LLAMA_8B, card, 0)
    assert resolve(make_config(kv_dtype="int8"), LLAMA_8B, card, 0).kv_dtype == "int8"


def test_four_bits_of_k_and_v_lose_too_much_on_a_gpu():
    card = Hardware("cuda", cores=4, free_memory=80 * 10**9)
    with pytest.raises(ConfigError, match=r"kv_dtype='int4' is not served on a GPU.*int8 or fp8"):
        resolve(make_config(kv_dtype="int4"), LLAMA_8B, card, 0)
    assert resolve(make_config(kv_dtype="int4"), LLAMA_8B, MACHINE, 0).kv_dtype == "int4"


def test_a_context_the_model_was_not_made_for():
    with pytest.raises(ConfigError, match="8192"):
        resolve(make_config(max_model_len=9000), LLAMA_8B, MACHINE, 0)


def test_no_room_for_anything():
    with pytest.raises(ConfigError, match="kv_memory"):
        resolve(make_config(kv_memory=1000), LLAMA_8B, MACHINE, 0)


def test_known_cost_of_a_cached_token():
    assert make_layout(LLAMA_8B, "float16").block_bytes == 16 * 131_072  # Llama-3-8B: 131,072 bytes a token
    assert LLAMA_8B.weights == 8_029_995_008  # 8.03 B matrix weights, embedding and head apart


def test_windows_need_fewer_blocks():
    full, narrow = (LayerArch(GroupedArch(2, 2, 32, window), DenseArch(64)) for window in (None, 64))
    windowed = make_layout(Arch("m", 100, 64, (narrow,) * 4, 4096, 1e-5), "float16")
    assert windowed.blocks_for(4096, step=16) == 6
    assert longest_that_fits(windowed, 6, 4096, 16, chunked=True) == 4096
    mixed = make_layout(Arch("m", 100, 64, (narrow, narrow, full), 4096, 1e-5), "float16")
    assert [(group.window, group.layers) for group in mixed.groups] == [(None, (2,)), (64, (0,)), (64, (1,))]


@pytest.mark.parametrize("window", [None, 1, 5, 30])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 12), (7, 9), (29, 3), (100, 20)])
def test_pairs_seen(window, start, count):
    want = sum(min(p + 1, window or 10**9) for p in range(start, start + count))
    assert seen_pairs(start, count, window) == want


def test_kv_dtype_follows_dtype_and_is_int8_on_a_cpu():
    assert resolve(make_config(), LLAMA_8B, MACHINE, 0).kv_dtype == "int8"
    for dtype in ("float32", "float16", "bfloat16"):
        assert resolve(make_config(dtype=dtype), LLAMA_8B, MACHINE, 0).kv_dtype == dtype
    assert resolve(make_config(dtype="float32", kv_dtype="int8"), LLAMA_8B, MACHINE, 0).kv_dtype == "int8"


def test_offload_is_whole_blocks_of_what_was_given():
    block = make_layout(LLAMA_8B, "int8").block_bytes
    settings = resolve(make_config(kv_offload=3 * block + 5), LLAMA_8B, MACHINE, 0)
    assert (settings.kv_offload, settings.host_slots) == (3 * block, 3)
    assert "kv_memory" in settings.reasons["kv_offload"]  # on a CPU that is the better use of it
    assert resolve(make_config(), LLAMA_8B, MACHINE, 0).host_slots == 0
    with pytest.raises(ConfigError, match="no block"):
        resolve(make_config(kv_offload=block - 1), LLAMA_8B, MACHINE, 0)


def test_what_the_host_keeps_is_not_given_away_twice():
    """On a CPU evicted blocks lie in the memory that the cache is sized from; on a GPU they do not."""
    weights, offload = 8 * 10**9, 20 * 10**9
    settings = resolve(make_config(kv_offload=offload), LLAMA_8B, MACHINE, weights)
    pool = settings.kv_blocks * settings.layout.block_bytes
    assert 0 < pool <= MACHINE.free_memory - weights - settings.kv_offload
    card = Hardware("cuda", cores=4, free_memory=MACHINE.free_memory)
    both = [resolve(make_config(kv_offload=n), LLAMA_8B, card, weights).kv_blocks for n in (0, offload)]
    assert both[0] == both[1]
    with pytest.raises(ConfigError, match="lower kv_offload"):
        resolve(make_config(kv_offload=30 * 10**9), LLAMA_8B, MACHINE, weights)


def test_a_typed_setting_that_is_no_whole_number_is_told_what_it_must_be():
    for typed in ("kv_memory=4G", "kv_offload=1e9"):
        with pytest.raises(ConfigError, match="must be a whole number, as digits"):
            parse_settings([typed])
    assert parse_settings(["kv-offload=1_000", "max_gap=0.5"]) == {"kv_offload": 1000, "max_gap": 0.5}


# ---- the table of settings and the places made from it ---------------------------------------------------------------

DOCS = Path(__file__).parent.parent / "docs" / "settings.md"
README = Path(__file__).parent.parent / "README.md"


def settings_table() -> str:
    rows = ["| setting | values | default | live | stroke | what it does |", "|---|---|---|---|---|---|"]
    for one in SETTINGS.values():
        default = one.derived if one.default is None else f"`{one.default}`"
        live = "yes" if one.live else ""
        rows.append(f"| `{one.name}` | {one.values} | {default} | {live} | {one.stroke} | {one.help} |")
    return "\n".join(rows) + "\n"


def test_the_documented_table_is_the_table():
    assert settings_table() in DOCS.read_text(), f"docs/settings.md must contain:\n{settings_table()}"


def test_the_readme_names_the_settings_of_each_stroke():
    rows = [line.split("|") for line in README.read_text().splitlines() if line.startswith("|")]
    levers = [row for row in rows if len(row) == 6 and row[2].strip() in ("prefill", "decode", "both")]
    named = {name for row in levers for name in re.findall(r"`(\w+)`", row[3])}
    assert named == {name for name, one in SETTINGS.items() if one.stroke}


def test_every_setting_says_what_it_does_and_how_it_is_derived():
    for name, one in SETTINGS.items():
        assert one.help and (one.derived or one.default is not None), name
        assert one.allows(one.default), name
        assert one.stroke in ("", "prefill", "decode", "both"), name


def test_help_lists_the_settings(capsys):
    with pytest.raises(typer.Exit):
        parse_settings(["help"])
    shown = capsys.readouterr().out
    assert all(name[:12] in shown for name in SETTINGS)


def test_a_setting_is_checked_as_the_table_says():
    wrongs = {"seed": 2**64, "threads": 1025, "max_gap": float("inf"), "kv_blocks": True, "device": "tpu"}
    for name, wrong in wrongs.items():
        with pytest.raises(ConfigError, match=f"^{name} must be {SETTINGS[name].values}, got {wrong!r}"):
            make_config(**{name: wrong})
    assert tuple(name for name in SETTINGS if SETTINGS[name].live) == LIVE and "policy" in LIVE
