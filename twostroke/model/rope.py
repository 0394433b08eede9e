"""Rotary frequencies: every kind of scaling ends here, in a list of radians per position. Torch-free.

A rotated pair i of `dim` dimensions turns by theta^(-2i/dim) radians per position. The scalings stretch that so that a
model trained on short contexts can be run on long ones:
  linear    all frequencies divided by a factor
  llama3    low ones divided, high ones kept, a smooth passage between
  yarn      the same idea with a linear ramp over the pairs, and cos and sin multiplied by a factor
  longrope  each pair has its own divisor; a short list for the trained context and a long one beyond it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from twostroke.model.arch import Rope
from twostroke.model.fields import MAX_POSITIONS, Fields


def plain_frequencies(theta: float, dim: int) -> list[float]:
    return [theta ** (-2 * i / dim) for i in range(dim // 2)]


def divided(frequencies: Sequence[float], divisors: Sequence[float], factor: float = 1.0) -> Rope:
    return Rope(tuple(f / d for f, d in zip(frequencies, divisors, strict=True)), factor)


def make_rope(kind: str, settings: Fields, theta: float, dim: int, max_positions: int) -> Rope:
    """settings: the keys of transformers' rope_scaling / rope_parameters. dim: rotated dimensions of a head."""
    maker = _KINDS.get(kind)
    if maker is None:
        raise settings.error("rope_type", f"is {kind!r:.80}, which is not supported; known: {', '.join(_KINDS)}")
    if dim < 2 or dim % 2:
        raise settings.error("rope", f"rotates {dim} dimensions of a head; that must be an even number above 0")
    return maker(settings, theta, dim, max_positions)


def _default(settings: Fields, theta: float, dim: int, max_positions: int) -> Rope:
    return Rope(tuple(plain_frequencies(theta, dim)))


def _linear(settings: Fields, theta: float, dim: int, max_positions: int) -> Rope:
    return divided(plain_frequencies(theta, dim), [settings.number("factor")] * (dim // 2))


def _llama3(settings: Fields, theta: float, dim: int, max_positions: int) -> Rope:
    factor = settings.number("factor")
    low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
    original = settings.integer("original_max_position_embeddings", max_positions, most=MAX_POSITIONS)
    if high <= low:
        raise settings.error("high_freq_factor", f"must be above low_freq_factor, {low:g}, not {high:g}")
    frequencies = []
    for f in plain_frequencies(theta, dim):
        turns = original * f / (2 * math.pi)  # full turns within the original context
        kept = min(1.0, max(0.0, (turns - low) / (high - low)))
        frequencies.append(f * (kept + (1 - kept) / factor))
    return Rope(tuple(frequencies))


def _yarn(settings: Fields, theta: float, dim: int, max_positions: int) -> Rope:
    original = settings.integer("original_max_position_embeddings", max_positions, most=MAX_POSITIONS)
    factor = settings.number("factor", max_positions / original)
    if theta <= 1:
        raise settings.error("rope_theta", f"must be above 1, not {theta:g}")

    def pair_turning(turns: float) -> float:  # the pair that makes so many full turns within the original context
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_turning(settings.number("beta_fast", 32.0)), pair_turning(settings.number("beta_slow", 1.0))
    if settings.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low or 0.001
    frequencies = []
    for i, f in enumerate(plain_frequencies(theta, dim)):
        stretched = min(1.0, max(0.0, (i - low) / span))
        frequencies.append(f / factor * stretched + f * (1 - stretched))
    return Rope(tuple(frequencies), _yarn_factor(settings, factor))


def _yarn_factor(settings: Fields, factor: float) -> float:
    if settings.has("mscale") and settings.has("mscale_all_dim"):
        above, below = (_magnitude(factor, settings.number(key)) for key in ("mscale", "mscale_all_dim"))
        default = above / below
    else:
        default = _magnitude(factor, 1.0)
    return settings.number("attention_factor", default)


def latent_scale(kind: str, settings: Fields, dim: int) -> float:
    """What q · k is multiplied with in DeepSeek's attention, whose query heads have `dim` dimensions. A scaled rotation
    with `mscale_all_dim` makes scores larger as well."""
    scale = float(dim) ** -0.5
    if kind == "default" or not settings.has("mscale_all_dim"):
        return scale
    return scale * _magnitude(settings.number("factor"), settings.number("mscale_all_dim")) ** 2


def _magnitude(factor: float, weight: float) -> float:
    """How much YaRN enlarges queries and keys when it stretches the context by `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(settings: Fields, theta: float, dim: int, max_positions: int) -> Rope:
    """One list of divisors for the life of a request, chosen by the context the checkpoint declares.

    Others switch lists when a sequence outgrows the original context; K already in the cache was then rotated by the
    wrong list, and a token's bits would depend on when it was computed. A checkpoint declared long uses the long list.
    """
    original = settings.integer("original_max_position_embeddings", max_positions, most=MAX_POSITIONS)
    ratio = settings.number("factor", max_positions / original)
    default = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 and original > 1 else 1.0
    divisors = settings.numbers("long_factor" if max_positions > original else "short_factor", dim // 2)
    return divided(plain_frequencies(theta, dim), divisors, settings.number("attention_factor", default))


_KINDS: dict[str, Callable[[Fields, float, int, int], Rope]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # longrope's first name
}
