"""Places for connections. When all are taken, idle connections are closed for new ones, and probes find a reserve.

An orchestrator ends a server whose `/health/live` does not answer. So connections that only wait must not take all
places: those that never sent a request with a valid key are closed first, then those that have been idle longest.
Connections that are busy keep their places. So that one key cannot be busy on all of them, a key has a share of the
places that other keys leave free, as of everything else (schedule/keys.py).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Protocol, TypeVar

from twostroke.schedule.keys import most_of

log = logging.getLogger(__name__)
MAX_CONNECTIONS = 1024
RESERVE = 64  # further connections, on which only /health/live and /health/ready are answered
MAX_REFUSED = 256  # connections beyond these that get time to read the refusal
BACKLOG = 256  # connections that the event loop accepts at one go
BURSTS = 3  # of them that may be open before the first connection is closed for a new one
OTHER_FILES = 192  # descriptors that this process may need for anything else


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


def fit_to_descriptors() -> None:
    """Raises the limit of open files as far as the connections need it. Where the system allows fewer, there are fewer
    places: a server without a free descriptor accepts no connection, so it could not even answer a probe."""
    global MAX_CONNECTIONS, RESERVE, MAX_REFUSED, BACKLOG
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    needed = MAX_CONNECTIONS + RESERVE + MAX_REFUSED + BURSTS * BACKLOG + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        room = max(48, allowed - OTHER_FILES)
        MAX_CONNECTIONS, RESERVE, MAX_REFUSED, BACKLOG = room * 3 // 8, room // 16, room // 16, room // (2 * BURSTS)
        log.warning("%d connections at most: `ulimit -n` allows %d open files", MAX_CONNECTIONS, allowed)
