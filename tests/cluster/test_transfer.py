"""Leases: whatever is asked in whatever order, every transfer ends in one state and gives its blocks back once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from twostroke.cluster.transfer import Leases, State

LEASE = 5.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Transfers(RuleBasedStateMachine):
    """Beside the leases, what is known of each transfer: (request, state, end of the lease, deadline)."""

    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.back: Counter[int] = Counter()
        self.leases = Leases(LEASE, lambda lent: self.back.update([lent]), self.clock)
        self.known: dict[bytes, list] = {}

    def open(self, ticket: bytes) -> bool:
        _, state, lease, deadline = self.known[ticket]
        if state in (State.OFFERED, State.FETCHING) and min(lease, deadline) <= self.clock.now:
            self.known[ticket][1] = State.EXPIRED
        return self.known[ticket][1] in (State.OFFERED, State.FETCHING)

    @rule(target=tickets, seconds=st.floats(0.0, 20.0))
    def offer(self, seconds: float) -> bytes:
        ticket = self.leases.offer(len(self.known), seconds)
        assert ticket not in self.known
        now = self.clock.now
        self.known[ticket] = [len(self.known), State.OFFERED, now + LEASE, now + seconds]
        return ticket

    @rule(seconds=st.floats(0.0, 7.0))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(ticket=tickets)
    def renew(self, ticket: bytes) -> None:
        kept = self.open(ticket)
        assert self.leases.renew(ticket) is kept
        if kept:
            self.known[ticket][2] = self.clock.now + LEASE

    @rule(ticket=tickets)
    def begin(self, ticket: bytes) -> None:
        begins = self.open(ticket) and self.known[ticket][1] is State.OFFERED
        assert self.leases.begin(ticket) == (self.known[ticket][0] if begins else None)
        if begins:
            self.known[ticket][1:3] = [State.FETCHING, self.clock.now + LEASE]

    @rule(ticket=tickets, complete=st.booleans())
    def end(self, ticket: bytes, complete: bool) -> None:
        if self.open(ticket):
            self.known[ticket][1] = State.DONE if complete else State.FAILED
        self.leases.end(ticket, complete)

    @rule()
    def lose_the_engine(self) -> None:
        self.leases.expire()
        for ticket in self.known:
            if self.open(ticket):
                self.known[ticket][1] = State.FAILED
        self.leases.fail_all()

    @rule()
    def expire(self) -> None:
        self.leases.expire()

    @invariant()
    def every_transfer_is_in_one_state(self) -> None:
        self.leases.expire()
        alive = [ticket for ticket in self.known if self.open(ticket)]
        assert len(self.leases) == len(alive)
        ended = Counter(one[1] for one in self.known.values() if one[1] not in (State.OFFERED, State.FETCHING))
        assert self.leases.ended == ended
        assert self.back == {one[0]: 1 for ticket, one in self.known.items() if ticket not in alive}
        ends = [min(self.known[ticket][2:4]) for ticket in alive]
        assert self.leases.next_end() == min(ends, default=None)

    def teardown(self) -> None:
        self.clock.now += 100.0
        self.leases.expire()
        assert len(self.leases) == 0 and self.back == {one[0]: 1 for one in self.known.values()}


Transfers.TestCase.settings = settings(max_examples=25, stateful_step_count=30)
TestTransfers = Transfers.TestCase


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_lease_lasts_while_it_is_renewed_and_never_past_the_deadline(clock: Clock) -> None:
    back: list[int] = []
    leases = Leases(LEASE, back.append, clock)
    ticket = leases.offer(7, 12.0)
    for _ in range(3):
        clock.now += 4.0
        kept = leases.renew(ticket)
    assert not kept and back == [7] and leases.ended == {State.EXPIRED: 1}
    assert leases.begin(ticket) is None


def test_blocks_are_fetched_once(clock: Clock) -> None:
    leases = Leases(LEASE, lambda lent: None, clock)
    ticket = leases.offer(7, 12.0)
    assert leases.begin(ticket) == 7 and leases.begin(ticket) is None
    assert leases.begin(b"a guess of 16 by") is None
