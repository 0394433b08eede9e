"""Evidence that all servers of a deployment share: each adds what it learns to the store and reads what others added.

A record is authenticated with the deployment's key and counts once, however often it is found in the store.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict

import msgspec

from twostroke.answers.bound import ErrorBound, JudgedPair
from twostroke.answers.entry import sealed, unseal
from twostroke.answers.store import MAX_EVIDENCE, AnswerStore

READ_AGAIN = 5.0  # seconds
TOGETHER = 1000  # records of one call


class EvidenceRecord(msgspec.Struct, frozen=True, array_like=True):
    number: bytes  # a random one
    evidence: JudgedPair


class SharedEvidence:
    """Used on the cache's thread."""

    def __init__(self, bound: ErrorBound, store: AnswerStore, secret: bytes):
        self.bound, self.store, self.secret = bound, store, secret
        self._mark = ""
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._read_at = 0.0

    def add(self, one: JudgedPair) -> None:
        """StoreError: it counts on this server, and the others do not learn it."""
        record = EvidenceRecord(secrets.token_bytes(8), one)
        self._count(record)
        self.store.add_evidence(sealed(msgspec.msgpack.encode(record), self.secret))

    @property
    def due(self) -> bool:
        return time.monotonic() - self._read_at > READ_AGAIN

    def read(self) -> None:
        """What was added since the last call."""
        self._read_at = time.monotonic()
        while found := self.store.evidence(self._mark, TOGETHER):
            for mark, data in found:
                self._mark = mark
                record = self._open(data)
                if record is not None:
                    self._count(record)

    def _open(self, data: bytes) -> EvidenceRecord | None:
        inner = unseal(data, self.secret)
        try:
            return None if inner is None else msgspec.msgpack.decode(inner, type=EvidenceRecord)
        except msgspec.DecodeError:
            return None

    def _count(self, record: EvidenceRecord) -> None:
        if record.number in self._seen:
            return
        self._seen[record.number] = None
        while len(self._seen) > 2 * MAX_EVIDENCE:
            self._seen.popitem(last=False)
        self.bound.learn(record.evidence)
