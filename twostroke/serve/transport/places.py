"""Places for connections. When all are taken, idle connections are closed for new ones, and probes find a reserve.

An orchestrator ends a server whose `/health/live` does not answer. So connections that only wait must not take all
places: those that never sent a request with a valid key are closed first, then those that have been idle longest.
Connections that are busy keep their places. So that one key cannot be busy on all of them, a key has a share of the
places that other keys leave free, as of everything else (schedule/keys.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Protocol, TypeVar

from twostroke.schedule.keys import most_of

MAX_CONNECTIONS = 1024
RESERVE = 64  # further connections, on which only /health/live and /health/ready are answered


class Placed(Protocol):
    """A connection, as far as its place goes."""

    accepted: bool  # it has sent a request with a valid key
    reserved: bool
    key: int  # number of the API key of its last request; 0: none, or there is no other key
    since: float  # the end of its last answer, or its beginning

    @property
    def busy(self) -> bool:
        """A request is being answered."""


C = TypeVar("C", bound=Placed)


def idle_one(connections: Iterable[C], reserved: bool = False) -> C | None:
    """The connection to close for a new one; None if all of them are being answered."""
    idle = [one for one in connections if one.reserved == reserved and not one.busy]
    return min(idle, key=lambda one: (one.accepted, one.since), default=None)


def over_share(connections: Collection[Placed], key: int, share: float) -> bool:
    """Whether the key is busy on more places than its share."""
    if not key or len(connections) <= share * MAX_CONNECTIONS:
        return False
    busy = Counter(one.key for one in connections if one.busy)
    return busy[key] > most_of(share, MAX_CONNECTIONS, busy.total() - busy[key])
