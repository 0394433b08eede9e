"""The specification of latent attention in the absorbed form, one row at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from twostroke.ops.interface import BLOCK, LATENT_GROUP, Batch, KVLayer, LatentAttention, Ops
from twostroke.ops.reference.cached import rotated, seen, stored_keys
from twostroke.ops.reference.kv_codec import encode_kv, write_kv


def attend_latents(
    ops: Ops, q: Tensor, kv: Tensor, attention: LatentAttention, cache: KVLayer, batch: Batch, group: int
) -> Tensor:
    heads, latent, rope = attention.heads, attention.latent, attention.rope
    plain, turned = q.reshape(len(q), heads, -1).split([attention.plain_dim, attention.rope_dim], dim=2)
    turned = rotated(turned, rope, batch.positions)
    shared_part = rotated(kv[:, None, latent:], rope, batch.positions)
    keys = torch.cat((ops.norm(kv[:, None, :latent], attention.norm), shared_part), dim=2)
    blocks = batch.groups[group]
    write_entries(cache, blocks.slots, keys)
    out = torch.empty(len(q), heads, attention.value_dim)
    for request in range(len(batch.contexts)):
        for row in range(int(batch.starts[request]), int(batch.starts[request + 1])):
            places = seen(int(batch.positions[row]), 0)
            entries = stored_entries(cache, blocks.tables[request], places)  # (n, latent + rope_dim)
            out[row] = attended(plain[row], turned[row], entries.double(), attention)
    return out.flatten(1)  # (T, heads · value_dim)


def write_entries(cache: KVLayer, slots: Tensor, entries: Tensor) -> None:
    """entries (T, 1, latent + rope_dim). Formats with scales have one for each LATENT_GROUP numbers."""
    if cache.key_scales is None:
        return write_kv(cache, slots, entries)
    block, offset = slots // BLOCK, slots % BLOCK
    coded = [encode_kv(part, cache.format) for part in entries.split(LATENT_GROUP, dim=2)]
    cache.keys[block, :, offset] = torch.cat([codes for codes, _ in coded], dim=2)
    cache.key_scales[block, :, offset] = torch.cat([scales for _, scales in coded if scales is not None], dim=1)


def stored_entries(cache: KVLayer, table: Tensor, places: Tensor) -> Tensor:
    """Entries at these positions, as stored: (n, latent + rope_dim)."""
    if cache.key_scales is None:
        return stored_keys(cache, table, places)[:, 0]
    block, offset = table[places // BLOCK].long(), places % BLOCK
    codes = cache.keys[block, 0, offset]
    scales = cache.key_scales[block, :, offset].repeat_interleave(LATENT_GROUP, dim=1)
    return codes.float() * scales[:, : codes.shape[1]]


def attended(plain: Tensor, turned: Tensor, entries: Tensor, attention: LatentAttention) -> Tensor:
    """One query: its plain (heads, plain_dim) and rotated part -> (heads, value_dim)."""
    heads, latent = attention.heads, attention.latent
    absorbed = torch.einsum("hp,hlp->hl", plain.double(), attention.key_up.weight.view(heads, latent, -1))
    query = torch.cat((absorbed.float(), turned), dim=1).double()
    weights = torch.softmax(query @ entries.T * attention.scale, dim=1)
    sums = (weights @ entries[:, :latent]).float().double()  # (heads, latent)
    return torch.einsum("hl,hvl->hv", sums, attention.value_up.weight.view(heads, -1, latent)).float()
