"""A transfer of KV blocks is one of five states with a lease. Nothing here touches bytes, sockets or engines.

    offered ──begin──▶ fetching ──all bytes were taken, or none were lacking──▶ done
       │                  ├───────an error, or a side is gone─────────────────▶ failed
       └──────────────────┴───────the lease or the deadline is over───────────▶ expired

The holder keeps the blocks while the lease is renewed: by the side that wants them until it fetches them, by progress
after that. The deadline is not renewed. With its last state a transfer gives its blocks back, exactly once, whatever
happens later. Time is that of the holder's clock; only durations cross between machines.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

TICKET_BYTES = 16


class State(StrEnum):
    OFFERED = "offered"
    FETCHING = "fetching"
    DONE = "done"
    FAILED = "failed"
    EXPIRED = "expired"


@dataclass(slots=True)
class Transfer:
    ticket: bytes  # names the transfer between the two sides; it cannot be guessed
    lent: int  # the request whose blocks they are
    lease_end: float
    deadline: float
    state: State = State.OFFERED

    @property
    def ends(self) -> float:
        """When it expires, unless it is renewed or ends before."""
        return min(self.lease_end, self.deadline)


class Leases:
    """The transfers of one holder that have not ended. Every method first ends what has expired."""

    def __init__(self, seconds: float, give_back: Callable[[int], None], clock: Callable[[], float]):
        """seconds: how long a lease lasts without renewal. give_back: called once for each transfer that ends, with the
        request whose blocks they are."""
        self.seconds = seconds
        self.clock = clock
        self.ended: Counter[State] = Counter()  # since the start
        self._give_back = give_back
        self._open: dict[bytes, Transfer] = {}

    def __len__(self) -> int:
        return len(self._open)

    def offer(self, lent: int, seconds: float) -> bytes:
        """Blocks that a peer may fetch within so many seconds. Returns the ticket to fetch them with."""
        now, ticket = self.clock(), secrets.token_bytes(TICKET_BYTES)
        self.expire()
        self._open[ticket] = Transfer(ticket, lent, now + self.seconds, now + seconds)
        return ticket

    def renew(self, ticket: bytes) -> bool:
        """False: the transfer has ended."""
        transfer = self._find(ticket)
        if transfer is None:
            return False
        transfer.lease_end = self.clock() + self.seconds
        return True

    def begin(self, ticket: bytes) -> int | None:
        """The peer fetches: the request whose blocks it wants. None: the transfer has ended or was begun before."""
        transfer = self._find(ticket)
        if transfer is None or transfer.state is not State.OFFERED:
            return None
        transfer.state = State.FETCHING
        self.renew(ticket)
        return transfer.lent

    def end(self, ticket: bytes, complete: bool) -> None:
        """The peer has everything that it lacked, or gives up. It does nothing to a transfer that has ended."""
        transfer = self._find(ticket)
        if transfer is not None:
            self._end(transfer, State.DONE if complete else State.FAILED)

    def fail_all(self) -> None:
        """The engine that has the blocks is gone, or stops."""
        for transfer in list(self._open.values()):
            self._end(transfer, State.FAILED)

    def expire(self) -> None:
        now = self.clock()
        for transfer in [one for one in self._open.values() if one.ends <= now]:
            self._end(transfer, State.EXPIRED)

    def next_end(self) -> float | None:
        """When the first transfer expires, should nothing happen before."""
        return min((transfer.ends for transfer in self._open.values()), default=None)

    def _find(self, ticket: bytes) -> Transfer | None:
        self.expire()
        return self._open.get(ticket)

    def _end(self, transfer: Transfer, state: State) -> None:
        del self._open[transfer.ticket]
        transfer.state = state
        self.ended[state] += 1
        self._give_back(transfer.lent)
