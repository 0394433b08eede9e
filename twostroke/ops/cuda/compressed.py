"""Compressed attention on the GPU: the steps of ops/compressed.py as kernels, all of fixed sizes for a step's shape.

The host does not learn which rows complete an entry, nor which entries a row reads: a kernel has a program for every
row, and those with nothing to do end at once. So steps are captured as graphs like any others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twostroke.ops.compressed_interface import CompressedAttention, CompressedRows, Compressor
from twostroke.ops.cuda.kernels.entries import (
    EntryPlaces,
    Owners,
    turned_heads,
    write_entries,
    write_keys,
    write_states,
)
from twostroke.ops.cuda.kernels.listed import chosen_entries, listed_attention
from twostroke.ops.interface import Batch, KVLayer


class CompressedKernels:
    """Runs layers of compressed attention, and keeps what they share."""

    def __init__(self) -> None:
        self._owners: tuple[Batch | None, Owners | None] = (None, None)
        self._biases: dict[CompressedAttention, Tensor] = {}

    def attend(
        self, parts: CompressedRows, attention: CompressedAttention, caches: tuple[tuple[KVLayer, int], ...],
        batch: Batch,
    ) -> Tensor:  # fmt: skip
        """caches: as in ops/compressed.py."""
        owners, rope = self._owners_of(batch), attention.rope
        raw = places_of(caches[-1][0].keys, caches[-1][1], batch)
        q = turned_heads(parts.q, attention.heads, rope, owners.positions, attention.query_norm)
        write_keys(parts.key, raw, attention.key_norm, rope, owners)
        entries, chosen = None, None
        if attention.compressor is not None:
            entries = places_of(caches[0][0].keys, caches[0][1], batch)
            self._compress(parts, attention, caches, batch, owners)
            chosen = chosen_of(parts, attention, caches[0], raw, batch, owners)
        out = listed_attention(q, attention, raw, entries, chosen, owners)
        return turned_heads(out, attention.heads, rope, owners.positions, back=True)

    def _compress(
        self, parts: CompressedRows, attention: CompressedAttention, caches: tuple[tuple[KVLayer, int], ...],
        batch: Batch, owners: Owners,
    ) -> None:  # fmt: skip
        """What the rows leave, then every entry that a row completes."""
        (made, group), (state, state_group), _ = caches
        assert attention.compressor is not None and parts.state is not None
        states, offset = places_of(state.keys, state_group, batch), 0
        write_states(parts.state, self._biases_of(attention), states, owners)
        for compressor, data in zip(compressors_of(attention), (made.keys, made.values), strict=False):
            write_entries(states, offset, places_of(data, group, batch), compressor, attention.rope, owners)
            offset += 2 * compressor.width

    def _owners_of(self, batch: Batch) -> Owners:
        """The same for every layer, so made once a step."""
        known, found = self._owners
        if known is not batch or found is None:
            rows = torch.arange(len(batch.positions), dtype=torch.int32, device=batch.starts.device)
            requests = torch.searchsorted(batch.starts[1:], rows, right=True, out_int32=True)
            found = Owners(batch.positions, requests.clamp_(max=len(batch.contexts) - 1), batch.contexts)
            self._owners = batch, found
        return found

    def _biases_of(self, attention: CompressedAttention) -> Tensor:
        """(ratio, numbers of a state): zeros for values, the biases of the places for their logits."""
        found = self._biases.get(attention)
        if found is None:
            biases = [one.bias for one in compressors_of(attention)]
            both = [part for bias in biases for part in (torch.zeros_like(bias), bias)]
            found = self._biases[attention] = torch.cat(both, dim=1)
        return found


def compressors_of(attention: CompressedAttention) -> list[Compressor]:
    """The compressor of the entries, and that of the indexer's keys."""
    entries = [attention.compressor] if attention.compressor is not None else []
    return entries if attention.indexer is None else [*entries, attention.indexer.compressor]


def places_of(data: Tensor, group: int, batch: Batch) -> EntryPlaces:
    return EntryPlaces(data[:, 0], batch.groups[group].tables)


def chosen_of(
    parts: CompressedRows, attention: CompressedAttention, cache: tuple[KVLayer, int], raw: EntryPlaces, batch: Batch,
    owners: Owners,
) -> Tensor | None:  # fmt: skip
    """The entries that each row reads; None: all, also where no request can have more of them than are chosen."""
    indexer = attention.indexer
    if indexer is None:
        return None
    assert parts.index_q is not None and parts.index_weights is not None and cache[0].values is not None
    keys = places_of(cache[0].values, cache[1], batch)
    tokens = raw.tables.shape[1] * raw.data.shape[1]  # of the longest context that the tables hold
    most = min(tokens // indexer.compressor.ratio, keys.tables.shape[1] * keys.data.shape[1])
    if most <= indexer.chosen:
        return None
    q = turned_heads(parts.index_q, indexer.heads, attention.rope, owners.positions)
    return chosen_entries(q, parts.index_weights, indexer, keys, most, owners)
