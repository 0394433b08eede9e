"""The specification of latent attention in the absorbed form, one row at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from twostroke.ops.interface import Batch, KVLayer, LatentAttention, Ops
from twostroke.ops.reference.cached import rotated, seen, stored_keys
from twostroke.ops.reference.kv_codec import write_kv


def attend_latents(
    ops: Ops, q: Tensor, kv: Tensor, attention: LatentAttention, cache: KVLayer, batch: Batch, group: int
) -> Tensor:
    heads, latent, rope = attention.heads, attention.latent, attention.rope
    plain, turned = q.reshape(len(q), heads, -1).split([attention.plain_dim, attention.rope_dim], dim=2)
    turned = rotated(turned, rope, batch.positions)
    shared_part = rotated(kv[:, None, latent:], rope, batch.positions)
    keys = torch.cat((ops.norm(kv[:, None, :latent], attention.norm), shared_part), dim=2)
    blocks = batch.groups[group]
    write_kv(cache, blocks.slots, keys)
    out = torch.empty(len(q), heads, attention.value_dim)
    for request in range(len(batch.contexts)):
        for row in range(int(batch.starts[request]), int(batch.starts[request + 1])):
            places = seen(int(batch.positions[row]), 0)
            entries = stored_keys(cache, blocks.tables[request], places)[:, 0]  # (n, latent + rope_dim)
            out[row] = attended(plain[row], turned[row], entries.double(), attention)
    return out.flatten(1)  # (T, heads · value_dim)


def attended(plain: Tensor, turned: Tensor, entries: Tensor, attention: LatentAttention) -> Tensor:
    """One query: its plain (heads, plain_dim) and rotated part -> (heads, value_dim)."""
    heads, latent = attention.heads, attention.latent
    absorbed = torch.einsum("hp,hlp->hl", plain.double(), attention.key_up.weight.view(heads, latent, -1))
    query = torch.cat((absorbed.float(), turned), dim=1).double()
    weights = torch.softmax(query @ entries.T * attention.scale, dim=1)
    sums = (weights @ entries[:, :latent]).float().double()  # (heads, latent)
    return torch.einsum("hl,hvl->hv", sums, attention.value_up.weight.view(heads, -1, latent)).float()
