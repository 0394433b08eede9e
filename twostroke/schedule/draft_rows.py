"""Rows of a plan for drafts: the guesses that a step verifies, and what the draft model reads. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.types import UNWRITTEN, DraftWork, RequestState

if TYPE_CHECKING:
    from twostroke.schedule.planner import Planner


def guesses_of(planner: Planner, request: RequestState, rows: int) -> tuple[int, ...]:
    """Tokens to verify after the newest one. They take rows and blocks that are free: none evicts or preempts."""
    drafter = planner.scheduler.drafter
    known = len(request.tokens)
    most = min(request.limit - known - 1, rows)
    if drafter is None or most < 1 or not request.params.speculate:
        return ()
    draft = tuple(drafter.propose(request, most))[:most]
    if draft and draft[0] == UNWRITTEN and known - request.drafted > planner.draft_rows_left:
        return ()
    while draft and planner.tables.missing(request, known + len(draft)) > len(planner.tables.pool.free):
        draft = draft[: len(draft) // 2]
    if draft:
        planner.tables.grow(request, known + len(draft))
    return draft


def catch_up(planner: Planner, request: RequestState) -> None:
    """The draft model reads a part of what it has missed, as much as the pause of a stream allows."""
    scheduler = planner.scheduler
    if scheduler.drafter is None or not scheduler.drafter.catches_up(request):
        return
    pace, known = scheduler.pace, len(request.tokens)
    allowance = pace.allowance(scheduler.policy.gentle, len(planner.streams)) - planner.seconds_read
    if allowance <= 0 and planner.seconds_read:
        return  # another stream's turn; the first one always advances
    count = pace.affordable(request.drafted, known - request.drafted, allowance)
    if read_for_draft(planner, request, min(known, request.drafted + count)):
        planner.seconds_read += pace.seconds(request.drafted, count)


def read_for_draft(planner: Planner, request: RequestState, end: int, writes: int = 0) -> bool:
    """The draft model computes what it lacks before `end`, then writes. What it reads can be found by others from
    this plan on."""
    start, count = request.drafted, end - request.drafted
    if count < 1 or count > planner.draft_rows_left:
        return False
    planner.drafts.append(DraftWork(request, start, count, writes))
    planner.draft_rows_left -= count
    planner.filled += planner.tables.fill(request, start, end)
    return True
