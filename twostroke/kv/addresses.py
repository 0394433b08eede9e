"""Names of KV blocks: a keyed hash, chained from block to block. Torch-free.

A name is an address: it is made of a key, of what determines the bytes of a block (the weights' fingerprint, the KV
format, the backend), of the tenant's salt and of all tokens up to the block's end. Engines that share the key and the
model give the same name to the same block. Without a shared key one is drawn at start. The key keeps others from
searching for prompts that collide; the salt keeps one tenant from learning by timing what another has asked.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from twostroke.ops.interface import BLOCK

DIGEST_BYTES = 16
BLOCK_BYTES = 8 * BLOCK  # of tokens as they are hashed


class Name(NamedTuple):
    """The content address of a block: the KV group it belongs to and the chained hash of its tokens."""

    group: int
    digest: bytes


class BlockHasher:
    def __init__(self, identity: str, key: bytes | None = None):
        """identity: what determines the bytes of a block beside its tokens. key: shared by a deployment's engines."""
        self.key = key if key is not None else secrets.token_bytes(32)
        self.identity = identity.encode()

    def root(self, salt: bytes) -> bytes:
        """Parent of every first block: what must be equal before tokens are even looked at."""
        data = len(self.identity).to_bytes(8, "little") + self.identity + salt
        return blake2b(data, key=self.key, digest_size=DIGEST_BYTES).digest()

    def extend(self, chain: list[bytes], tokens: Sequence[int], salt: bytes, blocks: int) -> None:
        """Grow `chain` to the names of the first `blocks` full blocks of `tokens`."""
        if len(chain) >= blocks:
            return
        parent, first = chain[-1] if chain else self.root(salt), len(chain)
        content = array("q", tokens[first * BLOCK : blocks * BLOCK]).tobytes()
        for start in range(0, len(content), BLOCK_BYTES):
            data = parent + content[start : start + BLOCK_BYTES]
            parent = blake2b(data, key=self.key, digest_size=DIGEST_BYTES).digest()
            chain.append(parent)

    def cut(self, chain: Sequence[bytes], tokens: Sequence[int], salt: bytes) -> bytes:
        """The name of the block that holds the last of `tokens` and is not full; `chain` names the full ones. A name
        between a sender and its receiver: no cache has it."""
        full = len(tokens) // BLOCK
        parent = chain[full - 1] if full else self.root(salt)
        content = array("q", tokens[full * BLOCK :]).tobytes()
        return blake2b(parent + content, key=self.key, digest_size=DIGEST_BYTES).digest()


class QuickNames(BlockHasher):
    """Names of 64 bits for one process that only guesses by them, as a router does, or compares tokens beside them."""

    def extend(self, chain: list[bytes], tokens: Sequence[int], salt: bytes, blocks: int) -> None:
        parent = chain[-1] if chain else self.root(salt)
        for start in range(len(chain) * BLOCK, blocks * BLOCK, BLOCK):
            parent = hash((parent, *tokens[start : start + BLOCK])).to_bytes(8, "little", signed=True)
            chain.append(parent)

    def number(self, chain: array[int], tokens: Sequence[int], salt: bytes, blocks: int) -> None:
        """As `extend`, with numbers for names: an array of "q", that a router takes as it is."""
        parent: bytes | int = chain[-1] if chain else self.root(salt)
        for start in range(len(chain) * BLOCK, blocks * BLOCK, BLOCK):
            parent = hash((parent, *tokens[start : start + BLOCK]))
            chain.append(parent)
