"""A plan as arrays: what each row is, for streams alone and for streams beside a prompt."""

import numpy as np

from twostroke.kv.layout import KVGroup
from twostroke.model.entry import KVEntry
from twostroke.ops.interface import BLOCK
from twostroke.run.step import StepRows
from twostroke.sampling import SamplingParams
from twostroke.types import Request, RequestState, Work, WorkKind

GROUPS = [KVGroup(KVEntry(()), ()), KVGroup(KVEntry((), window=64), ())]
TABLES = np.arange(1, 2 * 4 * 8 + 1, dtype=np.int32).reshape(2, 4, 8)  # (groups, rows, columns): every block another


def request(number: int, prompt: int, written: int, row: int, **params: int) -> RequestState:
    tokens = tuple(range(100 * number, 100 * number + prompt))
    made = RequestState(Request(number, tokens, SamplingParams(**params)))
    made.tokens += range(900, 900 + written)
    made.row = row
    return made


def newest(one: RequestState) -> Work:
    return Work(one, len(one.tokens) - 1, 1, WorkKind.WRITE)


def rows_of(works: list[Work], logit_rows: list[int]) -> dict[str, object]:
    """By hand, a row at a time."""
    cells = [(work.request, position) for work in works for position in range(work.start, work.start + work.count)]
    columns = 1 + max(position for _, position in cells) // BLOCK
    return {
        "tokens": [t for work in works for t in [*work.request.tokens, *work.draft][work.start :][: work.count]],
        "positions": [position for _, position in cells],
        "starts": [0, *np.cumsum([work.count for work in works]).tolist()],
        "contexts": [work.start + work.count for work in works],
        "slots": [
            [int(table[one.row, position // BLOCK]) * BLOCK + position % BLOCK for one, position in cells]
            for table in TABLES
        ],
        "tables": [[table[work.request.row, :columns].tolist() for work in works] for table in TABLES],
        "logit_rows": logit_rows,
    }


def built(works: list[Work]) -> tuple[dict[str, object], tuple[int, ...]]:
    step = StepRows(tuple(works))
    batch = step.batch(TABLES, GROUPS)
    found = {
        name: getattr(batch, name).tolist() for name in ("tokens", "positions", "starts", "contexts", "logit_rows")
    }
    found["slots"] = [group.slots.tolist() for group in batch.groups]
    found["tables"] = [group.tables.tolist() for group in batch.groups]
    assert not step.prompts
    return found, tuple(step.chooser)


def test_streams_have_a_row_each_and_all_of_them_sample():
    works = [newest(request(1, 20, 3, row=2)), newest(request(2, 5, 60, row=0)), newest(request(3, 16, 1, row=3))]
    assert built(works) == (rows_of(works, [0, 1, 2]), (0, 1, 2))
    assert built(works[:1]) == (rows_of(works[:1], [0]), (0,))


def test_a_chunk_beside_streams_samples_only_where_it_reaches_the_newest_token():
    prompt, other = request(2, 70, 0, row=1), request(4, 33, 0, row=0)
    works = [newest(request(1, 20, 3, row=2)), Work(prompt, 30, 17), Work(other, 32, 1)]
    assert built(works) == (rows_of(works, [0, 18]), (0, 2))


def test_a_single_token_inside_what_is_known_does_not_sample():
    """A preempted stream that is computed again, its last but one token alone in a step."""
    again = request(1, 20, 5, row=1)
    works = [newest(request(3, 4, 2, row=0)), Work(again, 23, 1)]
    assert built(works) == (rows_of(works, [0]), (0,))


def test_a_draft_has_a_row_for_each_of_its_tokens_and_a_choice_after_each():
    stream, other = request(1, 20, 3, row=2), request(3, 4, 2, row=0)
    works = [Work(stream, 22, 4, WorkKind.VERIFY, (71, 72, 73)), newest(other)]
    assert built(works) == (rows_of(works, [0, 1, 2, 3, 4]), (0, 0, 0, 0, 1))
    choices = StepRows(tuple(works)).choices
    assert [choice.position for choice in choices] == [23, 24, 25, 26, 6]
    assert choices[2].tokens is stream.tokens  # they decide nothing
    stream = request(1, 20, 3, row=2, presence_penalty=1)
    choices = Work(stream, 22, 4, WorkKind.VERIFY, (71, 72, 73)).choices()
    assert list(choices[2].tokens) == [*stream.tokens, 71, 72]


def test_drafts_are_kept_as_far_as_the_model_would_have_chosen_them():
    works = (Work(request(1, 20, 3, row=2), 22, 3, WorkKind.VERIFY, (71, 72)), newest(request(3, 4, 2, row=0)))
    step = StepRows(works)
    assert step.accepted([71, 72, 5, 9]) == [(71, 72, 5), (9,)]
    assert step.accepted([71, 8, 5, 9]) == [(71, 8), (9,)]
    assert step.accepted([8, 72, 5, 9]) == [(8,), (9,)]
    assert step.accepted([71, None, 5, None]) == [(71,), ()]


def test_a_token_in_flight_is_named_by_its_row():
    one = request(1, 20, 3, row=2)
    step = StepRows((Work(one, 23, 1, WorkKind.WRITE),))
    assert step.tokens.tolist() == [-3] and step.choices[0].position == 24


def test_an_entry_for_several_tokens_has_one_slot():
    group = KVGroup(KVEntry((), tokens=4), ())
    step = StepRows((Work(request(1, 70, 0, row=1), 14, 8),))
    (blocks,) = step.blocks(TABLES[:1], [group])
    table = TABLES[0, 1]
    assert blocks.slots.tolist() == [4 * int(table[p // 16]) + p % 16 // 4 for p in range(14, 22)]
