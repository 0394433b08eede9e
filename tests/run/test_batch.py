"""A plan as arrays: what each row is, for streams alone and for streams beside a prompt."""

import numpy as np

from twostroke.ops.interface import BLOCK
from twostroke.run.batch import build_step
from twostroke.sampling import SamplingParams
from twostroke.types import Plan, Request, RequestState, Work

TABLES = np.arange(1, 2 * 4 * 8 + 1, dtype=np.int32).reshape(2, 4, 8)  # (groups, rows, columns): every block another


def request(number: int, prompt: int, written: int, row: int, **params: int) -> RequestState:
    tokens = tuple(range(100 * number, 100 * number + prompt))
    made = RequestState(Request(number, tokens, SamplingParams(**params)))
    made.tokens += range(900, 900 + written)
    made.row = row
    return made


def newest(one: RequestState) -> Work:
    return Work(one, len(one.tokens) - 1, 1)


def rows_of(works: list[Work], logit_rows: list[int]) -> dict[str, object]:
    """By hand, a row at a time."""
    cells = [(work.request, position) for work in works for position in range(work.start, work.start + work.count)]
    columns = 1 + max(position for _, position in cells) // BLOCK
    return {
        "tokens": [one.tokens[position] for one, position in cells],
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
    step = build_step(Plan(1, tuple(works)), TABLES)
    batch = step.batch
    found = {
        name: getattr(batch, name).tolist() for name in ("tokens", "positions", "starts", "contexts", "logit_rows")
    }
    found["slots"] = [group.slots.tolist() for group in batch.groups]
    found["tables"] = [group.tables.tolist() for group in batch.groups]
    assert not step.prompts
    return found, step.samplers


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
