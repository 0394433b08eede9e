"""A step's numbers, once they are on the device, as the batch that a model computes."""

from __future__ import annotations

from torch import Tensor

from twostroke.model.compressed import Compressed
from twostroke.model.latent import Latent
from twostroke.model.layers import Grouped
from twostroke.model.transformer import Transformer
from twostroke.ops.cuda.backend import AnyAttention, CudaOps
from twostroke.ops.cuda.cuts import AttentionKind, Cascade, Cut, DeviceBatch
from twostroke.ops.interface import Attention, GroupBlocks
from twostroke.run.cuda.steps import Known, Shape


def make_batch(
    shape: Shape, there: dict[str, Tensor], tokens: Tensor, kinds: tuple[AttentionKind, ...], known: Known | None,
    shares_steps: bool = True,
) -> DeviceBatch:  # fmt: skip
    """known: of a step whose shape no other step shares. shares_steps: as the backend says."""
    slots = there["positions"].expand(len(there["tables"]), -1) if shape.fused else there["slots"]
    requests = shape.requests + (known is None and not shape.streams)  # with the one that stands for padding
    return DeviceBatch(
        tokens=tokens, positions=there["positions"],
        starts=there["starts"][: requests + 1], contexts=there["contexts"][:requests],
        groups=tuple(GroupBlocks(*places) for places in zip(slots, there["tables"], strict=True)),
        logit_rows=slice(None) if shape.streams else there["logit_rows"],
        counts=known.counts if known is not None else None,
        lengths=known.lengths if known is not None else None,
        streams=shape.streams, splits=shape.splits, cuts=cuts_of(shape, there, kinds, known) if shares_steps else None,
    )  # fmt: skip


def cuts_of(
    shape: Shape, there: dict[str, Tensor], kinds: tuple[AttentionKind, ...], known: Known | None
) -> dict[AttentionKind, Cut]:
    cuts = {}
    for index, kind in enumerate(kinds):
        if shape.streams:
            cascade = Cascade(there["members"], there["shared"]) if shape.cascade else None
            cuts[kind] = Cut(None, shape.singles, shape.splits, None, 1, cascade=cascade, scale=shape.scale)
            continue
        tiles = there[f"tiles{index}"] if shape.tiles[index] else None
        long, rows = ((), ()) if known is None else (known.long[index], known.rows[index])
        cuts[kind] = Cut(
            there["singles"], shape.singles, shape.splits, tiles, shape.tile_splits[index], long, rows,
            queries=shape.queries,
        )  # fmt: skip
    return cuts


def attention_kinds(model: Transformer, ops: CudaOps) -> tuple[AttentionKind, ...]:
    """The kinds of attention, in the order in which a step's arrays have them."""
    return tuple(dict.fromkeys(ops.kind(attention) for attention in attentions(model)))


def grouped_attentions(model: Transformer) -> list[Attention]:
    """The attentions of the layers that cache K and V of heads."""
    return [layer.mixer.attention for layer in model.layers if isinstance(layer.mixer, Grouped)]


def attentions(model: Transformer) -> list[AnyAttention]:
    return [layer.mixer.attention for layer in model.layers if isinstance(layer.mixer, Grouped | Latent | Compressed)]
