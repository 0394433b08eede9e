"""Rows of a plan for drafts: the guesses that a step verifies, and what the draft model reads. Torch-free.

Guesses are chosen once every running stream has its row, so that prompts know how many rows are left. They get their
blocks last, of those that streams and prompts have left free: so they evict and preempt nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.types import UNWRITTEN, DraftWork, RequestState, Work, WorkKind

if TYPE_CHECKING:
    from twostroke.schedule.planner import Planner


def choose_guesses(planner: Planner, index: int) -> None:
    """Rows for what may follow the newest token of the stream at this place of the plan."""
    request = planner.works[index].request
    draft = guesses_of(planner, request)
    if draft:
        planner.guesses.append((index, draft))
        planner.tokens_left -= len(draft)
        planner.draft_rows_left -= rows_to_write(request, draft)
    elif planner.tables.drafting:
        catch_up(planner, request)


def guesses_of(planner: Planner, request: RequestState) -> tuple[int, ...]:
    """Tokens to verify after the newest one, within the rows that are left."""
    drafter = planner.scheduler.drafter
    most = min(request.limit - len(request.tokens) - 1, planner.tokens_left)
    if drafter is None or most < 1 or not request.params.speculate:
        return ()
    draft = tuple(drafter.propose(request, most))[:most]
    return draft if rows_to_write(request, draft) <= planner.draft_rows_left else ()


def rows_to_write(request: RequestState, draft: tuple[int, ...]) -> int:
    """What the draft model must read before it writes this draft; 0: it does not write it."""
    return len(request.tokens) - request.drafted if draft and draft[0] == UNWRITTEN else 0


def add_guesses(planner: Planner) -> bool:
    """The guesses that were chosen join their streams' rows, as far as free blocks hold them. Whether any did."""
    verified = 0
    for index, draft in planner.guesses:
        work = planner.works[index]
        request, known = work.request, len(work.request.tokens)
        planner.draft_rows_left += rows_to_write(request, draft)
        while draft and planner.tables.missing(request, known + len(draft)) > len(planner.tables.pool.free):
            draft = draft[: len(draft) // 2]
        if not draft:
            continue
        planner.tables.grow(request, known + len(draft))
        planner.works[index] = Work(request, work.start, 1 + len(draft), WorkKind.VERIFY, draft)
        request.in_flight += len(draft)
        verified += len(draft)
        if draft[0] == UNWRITTEN:
            read_for_draft(planner, request, known, len(draft))
    planner.scheduler.counters.computed_tokens += verified
    return verified > 0


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
