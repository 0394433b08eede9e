"""A step's numbers as a GPU takes them: how large its arrays are, and what is in them. Plain numpy, no device.

Steps of the same `Shape` run the same kernels on arrays of the same sizes, so one captured graph can serve them all. A
shape with room to spare is padded with rows that nobody owns: tokens without a slot, and a last request of no context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from twostroke.ops.cuda.backend import Kind, Shares, share_out
from twostroke.ops.cuda.kernels.decode import longer, split_count
from twostroke.ops.interface import BLOCK
from twostroke.run.cuda.buckets import CAPTURED_TOKENS, mixed_rows, stream_rows
from twostroke.run.cuda.shared_prefix import Sharing, find_sharing
from twostroke.run.cuda.staging import Fields
from twostroke.run.sample import MASK, needs_adjusting, noise_key
from twostroke.types import Plan, RequestState, Work

MIXED_REQUESTS = (1, 4, 16, 32, 40, 64, 80, 128, 160, 256, 512)
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
    streams: bool = False  # all requests have one new token and no part in each other's blocks
    filtered: bool = False  # some row wants top-k, top-p or min-p
    cascade: int = 0  # tiles of streams that share a prefix
    members: int = 0  # of such a tile
    scale: int = 1  # times that splits are longer than usual

    @property
    def fused(self) -> bool:
        """Whether attention itself rotates, and writes to the cache."""
        return self.streams and not self.cascade

    def fields(self, groups: int, prompt_rows: int = 0) -> Fields:
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
        return Fields.lay(shapes)


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """A plan in which every request advances by one, in numbers."""

    works: tuple[Work, ...]
    positions: np.ndarray
    tables: np.ndarray  # (groups, streams, columns)
    columns: int
    sharing: Sharing | None

    @classmethod
    def of(cls, plan: Plan, tables: np.ndarray, members: int) -> Streams:
        """members: requests of a tile where they share a prefix; 0: nothing is to be shared."""
        works = plan.works
        positions = np.fromiter((work.start for work in works), np.int32, len(works))
        columns = column_bucket(int(positions.max()) + 1, tables.shape[2])
        mine = tables[:, [work.request.row for work in works], :columns]
        sharing = find_sharing(mine[0], positions + 1, members, cascade_tiles(len(works), members)) if members else None
        return cls(works, positions, mine, columns, sharing)

    def shape(self, members: int, kv_heads: int) -> Shape:
        """kv_heads: of a stream; 0: splits are never longer than usual."""
        count = len(self.works)
        rows = stream_rows(count)
        scale = 1 if self.sharing else longer(rows * kv_heads)
        return Shape(
            rows, rows, self.columns, rows, rows, split_count(-(-self.columns * BLOCK // scale)), streams=True,
            scale=scale,
            filtered=any(is_filtered(work.request) for work in self.works),
            cascade=cascade_tiles(rows, members) if self.sharing else 0, members=members if self.sharing else 0,
        )  # fmt: skip

    def fill(self, host: dict[str, np.ndarray]) -> None:
        works, count, positions = self.works, len(self.works), self.positions
        host["tokens"][:count] = [
            work.request.tokens[work.start] if work.start < len(work.request.tokens) else -1 - work.request.row
            for work in works
        ]
        host["positions"][:count] = positions
        host["contexts"][:count] = positions + 1  # the rest stays 0: padding attends to nothing
        host["starts"][:] = np.arange(len(host["starts"]))
        host["rows"][:count] = [work.request.row for work in works]
        host["rows"][count:] = -1
        host["tables"][:, :count] = self.tables
        fill_sampling(host, works)
        if self.sharing is not None:
            host["slots"][:, :count] = self.tables[:, np.arange(count), positions // BLOCK] * BLOCK + positions % BLOCK
            host["slots"][:, count:] = -1
            tiles = self.sharing.tiles
            host["members"][: len(tiles)] = tiles
            host["members"][len(tiles) :] = -1
            host["shared"][:count] = self.sharing.splits


def cascade_tiles(streams: int, members: int) -> int:
    """Tiles kept for streams that share prefixes: full ones, and a few that are not."""
    return streams // members + 4 if members else 0


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """A plan of prompts, chunks and streams in numbers."""

    works: tuple[Work, ...]
    counts: np.ndarray
    contexts: np.ndarray
    samplers: tuple[int, ...]
    prompts: tuple[tuple[int, int], ...]  # works whose first so many rows tell how likely the prompt was
    shares: tuple[Shares, ...]  # for each kind of attention

    @classmethod
    def of(cls, plan: Plan, kinds: tuple[Kind, ...]) -> Mixture:
        works = plan.works
        counts = np.fromiter((work.count for work in works), np.int64, len(works))
        contexts = np.fromiter((work.start + work.count for work in works), np.int64, len(works))
        return cls(
            works, counts, contexts,
            samplers=tuple(index for index, work in enumerate(works) if work.samples),
            prompts=tuple((index, known) for index, work in enumerate(works) if (known := prompt_rows(work))),
            shares=tuple(share_out(counts, contexts, kind) for kind in kinds),
        )  # fmt: skip

    @property
    def filtered(self) -> bool:
        return any(is_filtered(self.works[index].request) for index in self.samplers)

    def exact_shape(self) -> Shape:
        first = self.shares[0]
        return Shape(
            int(self.counts.sum()), len(self.works), -(-int(self.contexts.max()) // BLOCK), len(self.samplers),
            len(first.singles), first.splits, tuple(len(share.tiles) for share in self.shares),
            tuple(share.tile_splits for share in self.shares), filtered=self.filtered,
        )  # fmt: skip

    def padded_shape(self, kinds: tuple[Kind, ...], most_columns: int) -> Shape | None:
        """A shape that similar steps share; None where this step is no match for a graph."""
        total, count = int(self.counts.sum()), len(self.works)
        if total > CAPTURED_TOKENS or self.prompts or any(share.long for share in self.shares):
            return None
        tokens = mixed_rows(total)
        requests = next((size for size in MIXED_REQUESTS if size >= count), count)
        singles = self.shares[0].singles
        reach = column_bucket(int(self.contexts[singles].max()), most_columns) if len(singles) else 0
        chunks = FEW_CHUNKS if count - len(singles) <= FEW_CHUNKS else requests
        return Shape(
            tokens, requests, column_bucket(int(self.contexts.max()), most_columns),
            requests if self.samplers else 0, requests if len(singles) else 0, split_count(reach * BLOCK),
            tuple(tokens // kind.queries + chunks for kind in kinds),
            tuple(1 << (share.tile_splits.bit_length() - 1) for share in self.shares), filtered=self.filtered,
        )  # fmt: skip

    def fill(self, host: dict[str, np.ndarray], tables: np.ndarray) -> None:
        works, counts, contexts = self.works, self.counts, self.contexts
        count, nobody = len(works), len(host["contexts"]) - 1
        ends = np.cumsum(counts)
        total, starts = int(ends[-1]), ends - counts
        host["starts"][:count] = starts
        host["starts"][count:] = total
        host["contexts"][:count] = contexts
        owner = np.repeat(np.arange(count), counts)
        positions = np.arange(total) - starts[owner] + (contexts - counts)[owner]
        host["positions"][:total] = positions
        for (request, start, wanted), at in zip(works, starts.tolist(), strict=True):
            known = request.tokens[start : start + wanted]
            host["tokens"][at : at + len(known)] = known
            host["tokens"][at + len(known) : at + wanted] = -1 - request.row
        table = host["tables"]
        table[:, :count] = tables[:, [work.request.row for work in works], : table.shape[2]]
        host["slots"][:, :total] = table[:, owner, positions // BLOCK] * BLOCK + positions % BLOCK
        host["slots"][:, total:] = -1
        sampled = len(self.samplers)
        host["logit_rows"][:sampled] = ends[list(self.samplers)] - 1
        if self.prompts:
            asked = [np.arange(starts[index], starts[index] + known) for index, known in self.prompts]
            host["logit_rows"][sampled:] = np.concatenate(asked)
        chosen = tuple(works[index] for index in self.samplers)
        host["rows"][:sampled] = [work.request.row for work in chosen]
        host["rows"][sampled:] = -1
        fill_sampling(host, chosen)
        singles = self.shares[0].singles
        host["singles"][: len(singles)] = singles
        host["singles"][len(singles) :] = nobody
        for index, share in enumerate(self.shares):
            tiles = host[f"tiles{index}"]
            tiles[: len(share.tiles)] = share.tiles
            tiles[len(share.tiles) :] = (nobody, 0)


def column_bucket(context: int, most: int) -> int:
    return min(most, max(COLUMNS, 1 << (-(-context // BLOCK) - 1).bit_length()))


def on_device(request: RequestState) -> bool:
    """Whether the device can choose the request's next token by itself."""
    params = request.params
    return params.logprobs is None and params.grammar is None and not needs_adjusting(request)


def is_filtered(request: RequestState) -> bool:
    params = request.params
    return params.temperature > 0 and bool(params.top_k or params.top_p < 1.0 or params.min_p)


def prompt_rows(work: Work) -> int:
    """How many of the work's first rows tell how likely the prompt itself was, for a request that asked."""
    request, start, count = work
    if request.params.prompt_logprobs is None or request.output_length or request.sample:
        return 0
    return max(0, min(count, request.prompt_length - 1 - start))  # the newest token predicts no prompt token


def fill_sampling(host: dict[str, np.ndarray], works: tuple[Work, ...]) -> None:
    """Temperatures, noise keys and filters of the rows that sample. Zeros, as the arrays come, mean greedy."""
    if not any(work.request.params.temperature for work in works):
        return
    temperatures, keys = host["temperatures"].view(np.float32), host["keys"].view(np.uint32)
    top_k, top_p = host["top_k"], host["top_p"].view(np.float64)
    for n, (request, start, count) in enumerate(works):
        params = request.params
        if not params.temperature:
            continue
        key = noise_key(request.seed, request.sample, start + count) & MASK
        temperatures[n] = params.temperature
        keys[n] = (key & 0xFFFFFFFF, key >> 32)
        if len(top_k):
            top_k[n], top_p[n] = params.top_k, (params.top_p, params.min_p)
