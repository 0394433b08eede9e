"""What the device changes in logits, chooses and scores is what the host's chain of run/sample.py does."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

ON_CARD = torch.cuda.is_available()
if not ON_CARD:
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of Triton
pytest.importorskip("triton")

from tests.choices import next_choice  # noqa: E402
from twostroke.grammar.masks import RowMasks  # noqa: E402
from twostroke.ops.cuda.kernels.scores import best_scores  # noqa: E402
from twostroke.run.cuda.choosing import Choosing  # noqa: E402
from twostroke.run.cuda.edits import EditedRows  # noqa: E402
from twostroke.run.cuda.scores import Scores, to_host  # noqa: E402
from twostroke.run.cuda.steps import Shape, fill_sampling  # noqa: E402
from twostroke.run.sample import choose_one, logprobs, of_width  # noqa: E402
from twostroke.sampling import Grammar, SamplingParams  # noqa: E402
from twostroke.types import Choice, Request, RequestState, Status  # noqa: E402

pytestmark = [pytest.mark.gpu] if ON_CARD else []
DEVICE = torch.device("cuda" if ON_CARD else "cpu")
VOCAB = 5000 if ON_CARD else 500
ASKED = (
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.7},
    {"temperature": 0.0, "presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"temperature": 0.9, "repetition_penalty": 0.6, "frequency_penalty": -1.1, "top_k": 30},
    {"temperature": 0.8, "logit_bias": {3: 90.0, 7: -100.0, 11: 89.5}, "top_p": 0.9},
    {"temperature": 0.0, "logit_bias": {5: 100.0, 6: 99.0}, "min_tokens": 9, "max_tokens": 20},
    {"temperature": 1.2, "repetition_penalty": 1.3, "logit_bias": {2: 5.0}, "min_tokens": 9, "max_tokens": 20},
    {"temperature": 1e-5, "presence_penalty": 1.5},
    {"temperature": 5e-324, "top_k": 3},
    {"temperature": 9e-5, "top_p": 0.9},
    {"temperature": 0.0, "logprobs": 7, "frequency_penalty": 0.5},
    {"temperature": 0.7, "logprobs": 0},
    {"temperature": 0.0, "logprobs": 12},
)


class NoGrammars:
    """Masks as grammars would make them, and what was asked for them."""

    def __init__(self, masks: RowMasks):
        self.made, self.asked = masks, []

    def masks(self, choices: list[Choice]) -> RowMasks:
        self.asked = [list(choice.tokens) for choice in choices]
        return self.made


def running(number: int, params: SamplingParams, vocab: int = VOCAB) -> RequestState:
    random = np.random.default_rng(number)
    state = RequestState(Request(number, tuple(random.integers(0, vocab, 30).tolist()), params, 17 * number))
    state.tokens.extend(random.integers(0, 12, 5).tolist())
    state.row = number
    return state


def request_of(number: int, asked: dict) -> RequestState:
    state = running(number, SamplingParams(**asked))
    state.stop_ids = frozenset({5, 400})
    return state


def in_flight(choice: Choice) -> Choice:
    """The same with one more token before it, which the device alone knows."""
    return choice._replace(position=choice.position + 1)


def on_device(choosing: Choosing, logits: torch.Tensor, choices: list[Choice], newest: torch.Tensor):
    count = len(choices)
    shape = Shape(count, count, 1, count, count, 1, later=True, filtered=True)
    arrays = shape.arrays(1)
    host = choosing.staging.begin(arrays)
    fill_sampling(host, choices)
    host["rows"][:] = [choice.request.row for choice in choices]
    there = {name: array.clone() for name, array in arrays.views(choosing.staging.send(arrays)).items()}
    known = choosing.newest(choices, newest)
    return choosing.choose(logits, choices, there, newest, known)


def waits(event: torch.cuda.Event) -> None:
    event.synchronize()


@pytest.mark.parametrize("flying", [False, True], ids=["all known", "one in flight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_device_chooses_and_scores_as_the_host(flying: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    requests = [request_of(number, asked) for number, asked in enumerate(ASKED)]
    choosing = Choosing(DEVICE, None, None, waits)
    newest = torch.arange(3, 3 + len(ASKED), dtype=torch.int32)
    for _ in range(3):
        logits = (torch.randn(len(ASKED), VOCAB, generator=generator) * 4).to(dtype)
        choices = [next_choice(request) for request in requests]
        complete = choices
        if flying:
            complete = [choice._replace(tokens=[*choice.tokens, int(newest[n])]) for n, choice in enumerate(choices)]
            choices = [in_flight(choice) for n, choice in enumerate(choices)]
            complete = [choice._replace(position=choice.position + 1) for choice in complete]
        rows = logits.float().numpy()
        wanted = [choose_one(row, choice) for row, choice in zip(rows, complete, strict=True)]
        mine = newest.clone().to(DEVICE)
        chosen = on_device(choosing, logits.to(DEVICE), choices, mine)
        assert chosen.tokens.tolist() == wanted == mine.tolist()
        for n, request in enumerate(requests):
            if (best := request.params.logprobs) is not None:
                found, host = chosen.scores.of(n, wanted[n], best), logprobs(rows[n], wanted[n], best)
                assert found.token_id == host.token_id
                assert [token for token, _ in found.top] == [token for token, _ in host.top]
                values = [found.logprob, *(score for _, score in found.top)]
                assert values == pytest.approx([host.logprob, *(score for _, score in host.top)], abs=1e-9)
        for n, request in enumerate(requests):  # the answers go on
            request.tokens.extend([int(newest[n]), wanted[n]] if flying else [wanted[n]])


@pytest.mark.parametrize("chunk", [64, 4096])
def test_masks_are_kept_and_know_the_token_in_flight(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.ops.cuda.kernels.edits.CHUNK", chunk)
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(2))
    requests = [running(n, SamplingParams(temperature=0.0)) for n in range(3)]
    requests += [running(3, SamplingParams(temperature=0.9, repetition_penalty=1.5))]
    requests += [running(4, SamplingParams(temperature=1e-5, grammar=Grammar("regex", "[a-z]*")))]
    allowed = {n: np.zeros(VOCAB, np.bool_) for n in (0, 3, 4)}
    for n, mask in allowed.items():
        mask[[31, 32, 33 + n, VOCAB - 1]] = True
    grammars = NoGrammars(RowMasks(allowed, {2: "it cannot go on"}, frozenset({2})))
    choosing = Choosing(DEVICE, grammars, None, waits)
    choices = [next_choice(request) for request in requests]
    choices[4] = in_flight(choices[4])
    newest = torch.full((5,), 9, dtype=torch.int32, device=DEVICE)
    chosen = on_device(choosing, logits.to(DEVICE), choices, newest)
    complete = [*choices[:4], choices[4]._replace(tokens=[*choices[4].tokens, 9])]
    wanted = [choose_one(logits[n].numpy(), complete[n], allowed.get(n)) for n in range(5)]
    assert chosen.tokens.tolist() == [*wanted[:2], -1, *wanted[3:]]
    assert chosen.errors == {2: "it cannot go on"}
    assert grammars.asked[4][-1] == 9 and wanted[0] in (31, 32, 33, VOCAB - 1)


@pytest.mark.parametrize(
    "more", [{"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}], ids=str
)
def test_a_mask_leaves_nothing_of_most_parts_of_a_row(more: dict) -> None:
    """A program of the filters reads 4,096 tokens."""
    vocab = 9000
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(6))
    temperatures = (0.8, 1e-40, 0.8)  # 1e-40: all but one are minus infinity
    requests = [running(n, SamplingParams(temperature=t, **more)) for n, t in enumerate(temperatures)]
    allowed = {0: np.zeros(vocab, np.bool_), 2: np.zeros(vocab, np.bool_)}
    allowed[0][[31, 32, 33, 40]] = True
    allowed[2][[8999, 5000]] = True
    choosing = Choosing(DEVICE, NoGrammars(RowMasks(allowed, {})), None, waits)
    choices, newest = [next_choice(request) for request in requests], torch.zeros(3, dtype=torch.int32, device=DEVICE)
    chosen = on_device(choosing, logits.to(DEVICE), choices, newest)
    wanted = [choose_one(logits[n].numpy(), choices[n], allowed.get(n)) for n in range(3)]
    assert chosen.tokens.tolist() == wanted


def test_logits_that_are_no_numbers_choose_nothing() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, 7], logits[1, 7] = float("nan"), float("inf")
    requests = [running(n, SamplingParams(temperature=0.0, logprobs=2, presence_penalty=0.1)) for n in range(3)]
    mask = np.zeros(VOCAB, np.bool_)
    mask[3] = True  # what is no number is found behind a mask too
    choosing = Choosing(DEVICE, NoGrammars(RowMasks({0: mask, 1: mask}, {})), None, waits)
    newest = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    chosen = on_device(choosing, logits.to(DEVICE), [next_choice(request) for request in requests], newest)
    assert chosen.tokens.tolist()[:2] == [-1, -1] and chosen.tokens.tolist()[2] >= 0
    assert all(np.isnan(chosen.scores.of(n, 0, 0).logprob) for n in (0, 1))


@pytest.mark.parametrize("vocab", [VOCAB - 100, VOCAB + 100])
def test_a_draft_model_of_another_vocabulary(vocab: int) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(4))
    logits[:, VOCAB - 1] = 50.0  # cut off, or not
    requests = [running(n, SamplingParams(temperature=t, frequency_penalty=0.4), 300) for n, t in enumerate((0.0, 0.9))]
    choices = [next_choice(request) for request in requests]
    newest = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    chosen = on_device(Choosing(DEVICE, None, vocab, waits), logits.to(DEVICE), choices, newest)
    wanted = [choose_one(row, choice) for row, choice in zip(of_width(logits.numpy(), vocab), choices, strict=True)]
    assert chosen.tokens.tolist() == wanted


@pytest.mark.parametrize("chunk", [64, 4096])
def test_the_best_of_equal_tokens_have_the_lowest_ids(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.ops.cuda.kernels.scores.CHUNK", chunk)
    logits = torch.zeros(3, VOCAB)
    logits[1, ::7] = 2.5
    logits[2] = torch.arange(VOCAB) % 50
    rows = torch.tensor([2, 0, 1], dtype=torch.int32, device=DEVICE)
    tokens = torch.tensor([9, 499, 7], dtype=torch.int32, device=DEVICE)
    for best in (0, 1, 20, 128):
        scores = Scores([2, 0, 1], to_host(best_scores(logits.to(DEVICE), rows, tokens, best)))
        if ON_CARD:
            torch.cuda.synchronize()
        for row, token in ((2, 9), (0, 499), (1, 7)):
            found, host = scores.of(row, token, best), logprobs(logits[row].numpy(), token, best)
            assert [token for token, _ in found.top] == [token for token, _ in host.top]
            assert found.logprob == pytest.approx(host.logprob, abs=1e-9)


def test_drafts_are_counted_for_their_own_row_only() -> None:
    edited, state = EditedRows(), running(1, SamplingParams(temperature=0.0, presence_penalty=0.5))
    certain = next_choice(state)
    drafted = certain._replace(tokens=[*certain.tokens, 90, 90], position=certain.position + 2)
    both = edited.edits([(0, certain), (1, drafted), (2, certain)])
    first, second, third = (
        dict(zip(both.ids[a:b].tolist(), both.values[a:b].tolist(), strict=True))
        for a, b in ((place[2], place[3]) for place in both.places)
    )
    assert 90 not in first and second[90] == 2 and third == first
    assert sum(first.values()) == 5 and len(first) + 1 == len(second)


def test_a_request_that_ended_is_forgotten() -> None:
    edited, state = EditedRows(), running(1, SamplingParams(repetition_penalty=1.2))
    assert len(edited.edits([(0, next_choice(state))]).ids) == len(set(state.tokens))
    state.status = Status.FINISHED
    edited.edits([])
    assert not edited.seen


def test_equal_logits_are_equally_likely_at_a_temperature_next_to_zero() -> None:
    logits = torch.full((40, VOCAB), -3.0)
    logits[:, [4, 9]] = 30.0
    requests = [running(n, SamplingParams(temperature=1e-300)) for n in range(40)]
    choosing, newest = Choosing(DEVICE, None, None, waits), torch.zeros(40, dtype=torch.int32, device=DEVICE)
    chosen = on_device(choosing, logits.to(DEVICE), [next_choice(request) for request in requests], newest)
    assert set(chosen.tokens.tolist()) == {4, 9}


def test_more_scores_than_tokens_are_all_of_them() -> None:
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(8))
    one = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    scores = Scores([0], to_host(best_scores(logits.to(DEVICE), one, one + 5, 128)))
    if ON_CARD:
        torch.cuda.synchronize()
    found, host = scores.of(0, 5, 128), logprobs(logits[0].numpy(), 5, 128)
    assert [token for token, _ in found.top] == [token for token, _ in host.top] and len(found.top) == 60
