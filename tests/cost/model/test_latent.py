"""What latent attention costs: few bytes for each token of context, and all heads' FLOPs on each."""

from __future__ import annotations

import pytest

from twostroke.config import make_config, resolve
from twostroke.cost.model.devices import find_device
from twostroke.cost.model.known_models import known_arch
from twostroke.cost.model.rates import datasheet_rates
from twostroke.cost.model.roofline import Roofline, kv_bytes_per_token, model_cost
from twostroke.errors import ConfigError
from twostroke.hardware import Hardware
from twostroke.kv.layout import make_layout
from twostroke.model.arch import Arch, GroupedArch
from twostroke.model.document import arch_document, read_arch
from twostroke.model.families import arch_from_config
from twostroke.record import replace


def deepseek(layers: int, hidden: int, heads: int, rank: int | None, context: int = 163_840) -> Arch:
    """The attention of a DeepSeek model, in layers with dense feeds."""
    return arch_from_config(
        {
            "model_type": "deepseek_v3",
            "num_hidden_layers": layers,
            "first_k_dense_replace": layers,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "q_lora_rank": rank,
            "vocab_size": 129_280,
            "max_position_embeddings": context,
        }
    )


V3 = deepseek(61, 7168, 128, 1536)
LITE = deepseek(27, 2048, 16, None)


def line(arch: Arch, device: str = "h200") -> Roofline:
    rates = datasheet_rates(find_device(device), "bfloat16")
    return Roofline(model_cost(arch), make_layout(arch, "bfloat16"), rates)


def test_bytes_of_a_token() -> None:
    assert kv_bytes_per_token(make_layout(V3, "bfloat16")) == 70_272
    assert kv_bytes_per_token(make_layout(LITE, "bfloat16")) == 27 * 576 * 2
    assert kv_bytes_per_token(make_layout(V3, "int8")) == 61 * (576 + 9 * 4), "a scale for each 64 numbers"


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("deepseek-v3", 671_026_419_200),
        ("deepseek-v2-lite", 15_706_484_224),
        ("kimi-k2", 1_026_408_232_448),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
    ],
)
def test_known_models(name: str, count: int) -> None:
    """Parameters as published, those of layers that predict further tokens left out."""
    arch = known_arch(name)
    assert arch is not None and arch.parameters == count


@pytest.mark.parametrize(("name", "size"), [("deepseek-v3", 70_272), ("kimi-k2", 70_272), ("deepseek-v2-lite", 31_104)])
def test_bytes_of_a_token_of_known_models(name: str, size: int) -> None:
    arch = known_arch(name)
    assert arch is not None and kv_bytes_per_token(make_layout(arch, "bfloat16")) == size


def test_full_layers_of_gpt_oss() -> None:
    """Half of the layers keep the whole context; the others keep 128 tokens."""
    arch = known_arch("gpt-oss-20b")
    assert arch is not None
    layout = make_layout(arch, "bfloat16")
    assert (layout.read_bytes(2000) - layout.read_bytes(1000)) / 1000 == 24_576


def test_weights_of_the_mixer() -> None:
    """DeepSeek-V3's attention has 187 million weights in each layer."""
    products = V3.layers[0].mixer.products(7168)
    q = 7168 * 1536 + 1536 * 128 * 192
    kv = 7168 * 576 + 512 * 128 * 256
    assert sum(product.weights for product in products) == q + kv + 128 * 128 * 7168
    assert [product.name for product in LITE.layers[0].mixer.products(2048)] == [
        "latents", "key_up", "value_up", "output",
    ]  # fmt: skip
    assert V3.parameters - V3.weights == 61 * (2 * 7168 + 512 + 1536) + 7168


def test_flops_count_every_head_on_every_entry() -> None:
    assert V3.attention_flops(999, 1) == 61 * 1000 * 128 * 2 * (576 + 512)
    assert V3.attention_flops(0, 10) == 61 * 55 * 128 * 2 * (576 + 512)


def test_long_contexts_are_cheap() -> None:
    """Against the same layers with 16 KV heads of 128, at 32,768 tokens: a seventh of the bytes, a faster step."""
    grouped = replace(
        V3, layers=tuple(replace(one, mixer=GroupedArch(128, 16, 128)) for one in V3.layers), family="grouped"
    )
    latent, other = line(V3), line(grouped)
    assert other.stream_bytes([32_768]) / latent.stream_bytes([32_768]) == pytest.approx(4096 / 576, rel=0.01)
    context = [32_768] * 32
    assert latent.step([], context, 32) < other.step([], context, 32)


def test_flops_of_decode_count_where_they_are_longer() -> None:
    """128 heads do 242 FLOPs for each byte: on an H200 that is longer than reading; with 16 heads it does not."""
    rates = datasheet_rates(find_device("h200"), "bfloat16")
    assert line(LITE).attended([1000]) == line(LITE).stream_bytes([1000])
    assert line(V3).attended([1000]) == pytest.approx(
        (V3.attention_flops(1000, 1) - V3.attention_flops(0, 1)) / rates.attention_compute * rates.kv_bandwidth
    )


def test_a_prompt_on_a_gpu_has_a_time() -> None:
    short, long = line(V3).prefill_seconds(512), line(V3).prefill_seconds(8192)
    assert 0 < short < long


def test_the_document_of_a_server() -> None:
    back = read_arch(arch_document(V3))
    assert back.weights == V3.weights and make_layout(back, "float16") == make_layout(V3, "float16")


def test_settings_keep_floats() -> None:
    machine = Hardware("cpu", 2, 1 << 34)
    found = resolve(make_config(seed=1), LITE, machine, 0)
    assert found.kv_dtype == "float16" and "latent" in found.reasons["kv_dtype"]
    assert resolve(make_config(seed=1, dtype="float32"), LITE, machine, 0).kv_dtype == "float32"
    with pytest.raises(ConfigError, match=r"kv_dtype='int4'.*latent.*int8, float16"):
        resolve(make_config(kv_dtype="int4"), LITE, machine, 0)


def test_settings_with_bytes() -> None:
    """A request of the same length takes 53 % of the memory. A GPU takes latents of whole groups."""
    machine = Hardware("cpu", 2, 1 << 34)
    halves, codes = (
        resolve(make_config(seed=1, kv_dtype=kv), LITE, machine, 0).layout.block_bytes for kv in ("float16", "int8")
    )
    assert codes / halves == pytest.approx((576 + 36) / 1152)
    card = Hardware("cuda", 2, 1 << 34)
    assert resolve(make_config(kv_dtype="int8"), LITE, card, 0).kv_dtype == "int8"
    for change in ({"latent": 520}, {"rope_dim": 128}):
        layers = tuple(replace(layer, mixer=replace(layer.mixer, **change)) for layer in LITE.layers)
        with pytest.raises(ConfigError, match=r"kv_dtype='int8'.*whole groups of 64 numbers.*use bfloat16"):
            resolve(make_config(kv_dtype="int8"), replace(LITE, layers=layers), card, 0)
