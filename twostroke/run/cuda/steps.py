"""A step's numbers as a GPU takes them: how large its arrays are, and what is in them. Plain numpy, no device.

Steps of the same `Shape` run the same kernels on arrays of the same sizes, so one captured graph can serve them all. A
shape with room to spare is padded: tokens without a slot, and a last request of no context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from twostroke.kv.layout import KVGroup
from twostroke.ops.cuda.cuts import FEW_QUERIES, AttentionKind, HostCut, cut_drafts, cut_step
from twostroke.ops.cuda.kernels.decode import longer, split_count
from twostroke.ops.cuda.kernels.prefill import draft_splits
from twostroke.ops.interface import BLOCK
from twostroke.run.cuda.buckets import CAPTURED_TOKENS, draft_rows, mixed_rows, stream_rows
from twostroke.run.cuda.shared_prefix import Sharing, find_sharing
from twostroke.run.cuda.staging import StagedArrays
from twostroke.run.sample import MASK, has_tiny_temperature, needs_adjusting, noise_key
from twostroke.run.step import StepRows
from twostroke.types import Choice, WorkKind

MIXED_REQUESTS = (1, 4, 16, 32, 40, 64, 80, 128, 160, 256, 512)
DRAFT_REQUESTS = (1, 4, 16, 32)  # fewer, because drafts of all lengths make many shapes
COLUMNS = 16  # fewest block columns of a padded step
FEW_CHUNKS = 4


class Shape(NamedTuple):
    tokens: int
    requests: int
    columns: int  # of the block tables
    samplers: int
    singles: int  # requests with one new token
    splits: int  # of their contexts
    tiles: tuple[int, ...] = ()  # of queries of the other requests, for each kind of attention
    tile_splits: tuple[int, ...] = ()
    streams: bool = False  # each request has one new token, and reads no block that another fills
    filtered: bool = False  # some row wants top-k, top-p or min-p
    cascade: int = 0  # tiles of streams that share a prefix
    members: int = 0  # of such a tile
    scale: int = 1  # times that splits are longer than usual
    queries: int = 0  # the most of a request that verifies a draft, where they are few
    drafts: bool = False  # some are verified, and no prompt is read
    later: bool = False  # the step ends with its rows in front of the head; tokens are chosen after it

    @property
    def fused(self) -> bool:
        """Whether attention itself rotates, and writes to the cache."""
        return self.streams and not self.cascade

    def arrays(self, groups: int, prompt_rows: int = 0) -> StagedArrays:
        shapes: dict[str, tuple[int, ...]] = {
            "tokens": (self.tokens,), "positions": (self.tokens,), "starts": (self.requests + 2,),
            "contexts": (self.requests + 1,), "slots": (0 if self.fused else groups, self.tokens),
            "logit_rows": (0 if self.streams else self.samplers + prompt_rows,), "rows": (self.samplers,),
            "temperatures": (self.samplers,), "keys": (self.samplers, 2),
            "top_k": (self.samplers if self.filtered else 0,), "top_p": (self.samplers if self.filtered else 0, 4),
            "members": (self.cascade, self.members), "shared": (self.requests + 1 if self.cascade else 0,),
            "singles": (0 if self.streams else self.singles,), "tables": (groups, self.requests + 1, self.columns),
        }  # fmt: skip
        for index, count in enumerate(self.tiles):
            shapes[f"tiles{index}"] = (count, 2)
        return StagedArrays.lay(shapes)

    def choosing(self, rows: StepRows) -> Shape:
        """The same for the choices of these rows. What chooses after the step filters all of them."""
        later = not all(chosen_within(choice, rows.reports) for choice in rows.choices)
        return self._replace(later=later, filtered=later or is_filtered(rows.choices))

    def fill_padding(self, host: dict[str, np.ndarray]) -> None:
        """A step without a request, into arrays of zeros: its kernels run, and neither read nor write the cache."""
        host["slots"][:] = host["rows"][:] = -1
        host["singles"][:] = self.requests
        for index in range(len(self.tiles)):
            host[f"tiles{index}"][:] = (self.requests, 0)


class Known(NamedTuple):
    """What the host knows of a step whose shape no other step shares."""

    counts: np.ndarray  # (R,) new tokens of each request
    lengths: np.ndarray  # (R,) its tokens once they are written
    long: tuple[tuple[int, ...], ...]  # for each kind of attention, as `Cut` has them
    rows: tuple[tuple[tuple[int, int, int], ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """A plan in which every request advances by one."""

    rows: StepRows
    tables: np.ndarray  # (groups, streams, columns)
    columns: int
    sharing: Sharing | None

    @classmethod
    def of(cls, rows: StepRows, tables: np.ndarray, members: int) -> Streams:
        """members: requests of a tile where they share a prefix; 0: nothing is to be shared."""
        columns = column_bucket(rows.columns, tables.shape[2])
        mine = tables[:, rows.table_rows, :columns]
        most = cascade_tiles(rows.total, members)
        sharing = find_sharing(mine[0], rows.contexts, members, most) if members else None
        return cls(rows, mine, columns, sharing)

    def shape(self, members: int, kv_heads: int) -> Shape:
        """kv_heads: of a stream; 0: splits are never longer than usual."""
        rows = stream_rows(self.rows.total)
        scale = 1 if self.sharing else longer(rows * kv_heads)
        return Shape(
            rows, rows, self.columns, rows, rows, split_count(-(-self.columns * BLOCK // scale)), streams=True,
            scale=scale, cascade=cascade_tiles(rows, members) if self.sharing else 0,
            members=members if self.sharing else 0,
        ).choosing(self.rows)  # fmt: skip

    def fill(self, host: dict[str, np.ndarray], groups: Sequence[KVGroup]) -> None:
        rows, count = self.rows, self.rows.total
        host["tokens"][:count] = rows.tokens
        host["positions"][:count] = rows.positions
        host["contexts"][:count] = rows.contexts  # the rest stays 0: padding attends to nothing
        host["starts"][:] = np.arange(len(host["starts"]))
        host["rows"][:count] = rows.table_rows if rows.kept_at is None else rows.kept_at
        host["rows"][count:] = -1
        host["tables"][:, :count] = self.tables
        fill_sampling(host, rows.choices)
        if self.sharing is not None:
            fill_slots(host["slots"], rows, self.tables, groups)
            tiles = self.sharing.tiles
            host["members"][: len(tiles)] = tiles
            host["members"][len(tiles) :] = -1
            host["shared"][:count] = self.sharing.splits


def cascade_tiles(streams: int, members: int) -> int:
    """Tiles kept for streams that share prefixes: full ones, and a few that are not."""
    return streams // members + 4 if members else 0


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """A plan of prompts, chunks, streams and drafts."""

    rows: StepRows
    cuts: tuple[HostCut, ...]  # for each kind of attention
    drafts: bool = False  # some are verified, and no prompt is read
    few: bool = False  # each request has few rows

    @classmethod
    def of(cls, rows: StepRows, kinds: tuple[AttentionKind, ...]) -> Mixture:
        kinds_of_work = {work.kind for work in rows.works}
        drafts = WorkKind.VERIFY in kinds_of_work and WorkKind.READ not in kinds_of_work
        cut = cut_drafts if drafts else cut_step
        few = drafts and int(rows.counts.max()) <= FEW_QUERIES <= min(kind.queries for kind in kinds)
        return cls(rows, tuple(cut(rows.counts, rows.contexts, kind) for kind in kinds), drafts, few)

    def known(self) -> Known:
        long, rows = (cut.long for cut in self.cuts), (cut.rows for cut in self.cuts)
        return Known(self.rows.counts, self.rows.contexts, tuple(long), tuple(rows))

    def exact_shape(self) -> Shape:
        rows, first = self.rows, self.cuts[0]
        return Shape(
            rows.total, len(rows.works), -(-rows.columns // BLOCK), len(rows.choices), len(first.singles), first.splits,
            tuple(len(cut.tiles) for cut in self.cuts), tuple(cut.tile_splits for cut in self.cuts),
            queries=FEW_QUERIES if self.few else 0,
        ).choosing(rows)  # fmt: skip

    def padded_shape(self, kinds: tuple[AttentionKind, ...], most_columns: int) -> Shape | None:
        """A shape that similar steps share; None: this step is not captured."""
        rows, count = self.rows, len(self.rows.works)
        if rows.total > CAPTURED_TOKENS or rows.prompts or any(cut.long for cut in self.cuts):
            return None
        tokens = mixed_rows(rows.total)
        requests = next((size for size in MIXED_REQUESTS if size >= count), count)
        if self.drafts:
            requests = next((size for size in DRAFT_REQUESTS if size >= count), count)
            return self._draft_shape(kinds, draft_rows(rows.total), requests, column_bucket(rows.columns, most_columns))
        choosing = next((size for size in MIXED_REQUESTS if size >= len(rows.choices)), len(rows.choices))
        singles = self.cuts[0].singles
        reach = column_bucket(int(rows.contexts[singles].max()), most_columns) if len(singles) else 0
        chunks = FEW_CHUNKS if count - len(singles) <= FEW_CHUNKS else requests
        return Shape(
            tokens, requests, column_bucket(rows.columns, most_columns),
            max(requests, choosing) if rows.choices else 0, requests if len(singles) else 0, split_count(reach * BLOCK),
            tuple(most_tiles(kind, tokens, chunks) for kind in kinds),
            tuple(1 << (cut.tile_splits.bit_length() - 1) for cut in self.cuts),
        ).choosing(rows)  # fmt: skip

    def _draft_shape(self, kinds: tuple[AttentionKind, ...], tokens: int, requests: int, columns: int) -> Shape:
        """Depends on nothing but these numbers, so that few graphs serve drafts of all lengths."""
        return Shape(
            tokens, requests, columns, tokens, 0, 1, tuple(most_tiles(kind, tokens, requests) for kind in kinds),
            tuple(draft_splits(requests, kind.kv_heads, columns * BLOCK) if kind.queries else 1 for kind in kinds),
            queries=FEW_QUERIES if self.few else 0, drafts=True,
        ).choosing(self.rows)  # fmt: skip

    def fill(self, host: dict[str, np.ndarray], tables: np.ndarray, groups: Sequence[KVGroup]) -> None:
        rows, count, padding = self.rows, len(self.rows.works), len(host["contexts"]) - 1
        host["starts"][: count + 1] = rows.starts
        host["starts"][count:] = rows.total
        host["contexts"][:count] = rows.contexts
        host["positions"][: rows.total] = rows.positions
        host["tokens"][: rows.total] = rows.tokens
        table = host["tables"]
        table[:, :count] = tables[:, rows.table_rows, : table.shape[2]]
        fill_slots(host["slots"], rows, table, groups)
        host["logit_rows"][: len(rows.logit_rows)] = rows.logit_rows
        chosen = len(rows.choices)
        host["rows"][:chosen] = rows.table_rows[rows.chooser] if rows.kept_at is None else rows.kept_at
        host["rows"][chosen:] = -1
        fill_sampling(host, rows.choices)
        singles = self.cuts[0].singles
        host["singles"][: len(singles)] = singles
        host["singles"][len(singles) :] = padding
        for index, cut in enumerate(self.cuts):
            tiles = host[f"tiles{index}"]
            tiles[: len(cut.tiles)] = cut.tiles
            tiles[len(cut.tiles) :] = (padding, 0)


def most_tiles(kind: AttentionKind, tokens: int, chunks: int) -> int:
    return tokens // kind.queries + chunks if kind.queries else 0


def fill_slots(slots: np.ndarray, rows: StepRows, tables: np.ndarray, groups: Sequence[KVGroup]) -> None:
    """slots (groups, tokens), tables (groups, requests, columns): padding has no slot."""
    for mine, table, group in zip(slots, tables, groups, strict=True):
        mine[: rows.total] = rows.slots(table, group)
    slots[:, rows.total :] = -1


def column_bucket(context: int, most: int) -> int:
    return min(most, max(COLUMNS, 1 << (-(-context // BLOCK) - 1).bit_length()))


def chosen_within(choice: Choice, reports: bool) -> bool:
    """Whether a captured step chooses the token itself: nothing but its logits, temperature and filters count.
    reports: log probabilities, where they are wanted."""
    params = choice.request.params
    if params.grammar is not None or (reports and params.logprobs is not None):
        return False
    return not has_tiny_temperature(params) and not needs_adjusting(choice)


def is_filtered(choices: Sequence[Choice]) -> bool:
    """Whether one of them wants top-k, top-p or min-p."""
    found = (choice.request.params for choice in choices)
    return any(params.temperature > 0 and (params.top_k or params.top_p < 1.0 or params.min_p) for params in found)


def fill_sampling(host: dict[str, np.ndarray], choices: Sequence[Choice]) -> None:
    """Temperatures, noise keys and filters of the rows that choose. Zeros, as the arrays come, mean greedy."""
    if not any(choice.request.params.temperature for choice in choices):
        return
    temperatures, keys = host["temperatures"].view(np.float32), host["keys"].view(np.uint32)
    top_k, top_p = host["top_k"], host["top_p"].view(np.float64)
    for n, (request, position, _) in enumerate(choices):
        params = request.params
        if not params.temperature:
            continue
        key = noise_key(request.seed, request.sample, position) & MASK
        temperatures[n] = 1.0 if has_tiny_temperature(params) else params.temperature  # `choosing` divides by those
        keys[n] = (key & 0xFFFFFFFF, key >> 32)
        if len(top_k):
            top_k[n], top_p[n] = params.top_k, (params.top_p, params.min_p)
