"""A draft model beside everything else an engine does: the same tokens, and drafts that are really verified."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from tests import tiny
from tests.draft.paying import make_drafts_cheap
from tests.engine.exchanges import export_prefix, submit_with
from tests.engine.oracle import RandomModelDrafter
from tests.engine.test_exactness import BASE, result
from tests.engine.test_exchange import KEY, PROMPT, asked, finish
from tests.grammar.test_tools import TOOLS, calls_in
from tests.remote.engines import healthy, run
from tests.waiting import until
from twostroke import LLM, ConfigError, ModelError, SamplingParams
from twostroke.config import make_config
from twostroke.draft.rates import FORCED, MODEL
from twostroke.engine.build import build_engine
from twostroke.engine.settings import change
from twostroke.grammar.tools import tool_grammar
from twostroke.record import replace
from twostroke.remote import process
from twostroke.remote.async_engine import ENGINE_GONE
from twostroke.sampling import Grammar
from twostroke.text.formats import HERMES
from twostroke.text.tools import read_choice
from twostroke.types import Request, RequestState

PROMPTS = [[(7 * i + 13 * n) % 290 + 3 for i in range(20 + 9 * n)] for n in range(5)]


@pytest.fixture(scope="module")
def plain(llama_pair):
    return LLM(llama_pair[0], kv_blocks=200, speculate="off", **BASE)


def drafted(pair, most: int = 6, **settings) -> LLM:
    """An engine whose drafter asks the draft model for a random number of tokens, also where that is slower."""
    llm = LLM(pair[0], draft_model=str(pair[1]), **(BASE | {"kv_blocks": 400} | settings))
    llm.engine.core.scheduler.drafter = RandomModelDrafter(most)
    return llm


def looked_up(pair) -> LLM:
    """An engine that guesses from the texts of all its streams wherever there is a match."""
    llm = LLM(pair[0], speculate="lookup", **(BASE | {"kv_blocks": 400}))
    drafter = llm.engine.core.scheduler.drafter
    make_drafts_cheap(drafter)
    drafter.text_streams = drafter.most_streams = 32
    return llm


def same(llm: LLM, plain: LLM, prompts, params) -> list:
    """Both engines' answers, compared to the bit. Returns them."""
    got, want = llm.generate(prompts, params), plain.generate(prompts, params)
    assert [result(one) for one in got] == [result(one) for one in want]
    llm.engine.core.scheduler.check()
    return got


def test_a_draft_model_that_does_not_fit_is_refused(llama_pair, tmp_path: Path) -> None:
    target, draft = llama_pair
    with pytest.raises(ConfigError, match="speculate='draft' needs a draft model: give draft_model"):
        make_config(speculate="draft")
    with pytest.raises(ModelError, match=r"^draft_model: /no/such/model: no such file or folder"):
        LLM(target, draft_model="/no/such/model", **BASE)
    with pytest.raises(ConfigError, match="a draft model must be smaller"):
        LLM(draft, draft_model=str(target), **BASE)
    other = tiny.tiny_llama(tmp_path / "other", num_hidden_layers=1)
    words = json.loads((other / "tokenizer.json").read_text())
    words["model"]["vocab"]["zz"] = words["model"]["vocab"].pop("e")
    words["model"]["merges"] = []
    (other / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(ConfigError, match=r"has another vocabulary than the model \(token 71 is b'e' in one and"):
        LLM(target, draft_model=str(other), **BASE)
    llm = LLM(target, **BASE)
    with pytest.raises(ConfigError, match="needs a draft model"):
        change(llm.engine.core.scheduler, llm.settings, {"speculate": "draft"})


def test_a_running_engine_takes_drafts_together_with_other_settings(llama_pair) -> None:
    llm = drafted(llama_pair)
    then = change(llm.engine.core.scheduler, llm.settings, {"speculate": "draft", "max_gap": 0.5, "policy": "shortest"})
    assert (then.speculate, then.max_gap, then.policy) == ("draft", 0.5, "shortest")
    with pytest.raises(ConfigError, match="max_gap cannot hold"):
        change(llm.engine.core.scheduler, then, {"speculate": "draft", "max_gap": 0.5, "policy": "prefill-first"})


def test_padding_of_the_vocabularies_may_differ(llama_pair, plain, tmp_path: Path) -> None:
    """Rows of the logits without a token: more or fewer in the draft model."""
    target = llama_pair[0]
    for vocab in (tiny.VOCAB - 8, tiny.VOCAB + 8):
        folder = tiny.tiny_llama(tmp_path / str(vocab), num_hidden_layers=1, vocab_size=vocab)
        params = [
            SamplingParams(max_tokens=12, temperature=t, seed=2, logprobs=1, **more)
            for t in (0.0, 1.0)
            for more in ({}, {"logit_bias": {tiny.VOCAB - 1: 3.0}, "repetition_penalty": 1.2})
        ]
        prompts = [[*PROMPTS[n], tiny.VOCAB - 1] for n in range(len(params))]
        same(drafted((target, folder)), plain, prompts, params)


@pytest.mark.parametrize("kind", ["draft", "lookup"])
def test_schemas_and_tools_under_load(kind, llama_pair, plain) -> None:
    """The second time lookup finds what was answered to the same prompts."""
    keys = ("name", "age_in_years")
    schema = {"type": "object", "properties": {keys[0]: {"type": "string", "maxLength": 6}, keys[1]: {"enum": [1, 22]}}}
    schema |= {"required": list(keys), "additionalProperties": False}
    call = tool_grammar(TOOLS, read_choice({"type": "function", "function": {"name": "tree"}}, TOOLS), HERMES)
    params = [
        SamplingParams(max_tokens=160, temperature=float(n % 2), seed=n, logprobs=1, grammar=grammar)
        for n in range(4)
        for grammar in (Grammar("json_schema", json.dumps(schema)), call)
    ]
    llm = drafted(llama_pair) if kind == "draft" else looked_up(llama_pair)
    for _ in range(2):
        outputs = same(llm, plain, [PROMPTS[n % 5] for n in range(8)], params)
    assert {one.finish_reason for one in outputs} == {"stop"}
    for one in outputs[::2]:
        jsonschema.validate(json.loads(one.text), schema)
    for one in outputs[1::2]:
        assert [name for name, _ in calls_in(one.text, HERMES)] == ["tree"]
    assert llm.stats()["accepted_tokens"] > 0
    if kind == "lookup":
        assert sum(llm.engine.core.scheduler.drafter.acceptance.right[:FORCED]) > 20, "beside what a grammar forces"


def test_samples_of_one_prompt_share_what_the_draft_model_has_read(llama_pair, plain) -> None:
    llm = drafted(llama_pair)
    llm.engine.core.scheduler.drafter.reads = lambda request: True
    reads: list[int] = []
    launch = llm.engine.core.runner.launch
    llm.engine.core.runner.launch = lambda plan: reads.append(sum(d.count for d in plan.drafts)) or launch(plan)
    same(llm, plain, [PROMPT], SamplingParams(max_tokens=30, n=8, seed=4, logprobs=1))
    assert reads[0] < 75 + 7 * (75 - 64 + 1)  # whole blocks were read once
    before = len(reads)
    same(llm, plain, [PROMPT], SamplingParams(max_tokens=1, n=1, temperature=0.0, logprobs=1))
    assert reads[before] == 75 - 64  # and are found again
    assert llm.stats()["accepted_tokens"] > 0


def test_preempted_while_drafts_are_verified(llama_pair, plain) -> None:
    llm = drafted(llama_pair, kv_blocks=45, max_model_len=128)
    prompts = [[(5 * i + 31 * n) % 290 + 3 for i in range(30)] for n in range(10)]
    for temperature in (0.0, 1.0):
        same(llm, plain, prompts, SamplingParams(max_tokens=24, temperature=temperature, seed=9, logprobs=1))
    stats = llm.stats()
    assert stats["preemptions"] > 0 and stats["accepted_tokens"] > 0


def test_live_switching_in_the_middle_of_answers(llama_pair, plain) -> None:
    llm = LLM(llama_pair[0], draft_model=str(llama_pair[1]), kv_blocks=400, **BASE)
    scheduler, settings = llm.engine.core.scheduler, llm.settings
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=6, logprobs=1)
    want = [result(one) for one in plain.generate(PROMPTS[:2], params)]
    jobs = [llm._submit(prompt, params) for prompt in PROMPTS[:2]]
    order = ["off", "draft", "lookup", "auto", "draft", "off", "auto"]
    while not all(job.finished for job in jobs):
        settings = change(scheduler, settings, {"speculate": order[0]})
        order.append(order.pop(0))
        if scheduler.drafter is not None:
            make_drafts_cheap(scheduler.drafter)
        for _ in range(3):
            llm._pump()
            scheduler.check()
    assert [result(job.output()) for job in jobs] == want
    assert llm.stats()["accepted_tokens"] > 0


def test_auto_takes_the_draft_model_where_it_pays(llama_pair, plain) -> None:
    llm = LLM(llama_pair[0], draft_model=str(llama_pair[1]), kv_blocks=400, **BASE)
    drafter = llm.engine.core.scheduler.drafter
    make_drafts_cheap(drafter)
    same(llm, plain, [PROMPTS[0]], SamplingParams(max_tokens=80, temperature=0.0, logprobs=1))
    assert drafter.acceptance.tried[MODEL] > 10 and llm.stats()["steps"] < 70
    same(llm, plain, [PROMPTS[1]], SamplingParams(max_tokens=20, temperature=0.0, logprobs=1, speculate=False))
    assert llm.engine.core.scheduler.counters.drafted_tokens == llm.stats()["drafted_tokens"]


def test_a_question_that_comes_again_is_answered_from_the_same_tenants_answer(llama_pair) -> None:
    llm = LLM(llama_pair[0], speculate="lookup", kv_blocks=400, **BASE)
    core = llm.engine.core
    make_drafts_cheap(core.scheduler.drafter)

    def ask(number: int, salt: bytes) -> tuple[list[int], int]:
        """Its tokens, and how many of them were accepted guesses."""
        params, before = SamplingParams(max_tokens=60, temperature=1.0), core.scheduler.counters.accepted_tokens
        state = core.submit(Request(number, tuple(PROMPT), params, seed=3, limit=len(PROMPT) + 60, salt=salt))
        finish(core)
        return state.tokens, core.scheduler.counters.accepted_tokens - before

    tokens, accepted = ask(1, b"a")
    assert ask(2, b"b") == (tokens, accepted)  # another tenant: as if it had never been asked
    again, found = ask(3, b"a")
    assert again == tokens and found > accepted + 20


def test_blocks_of_the_draft_model_move_to_another_engine(llama_pair, plain) -> None:
    settings = BASE | {"kv_blocks": 200, "draft_model": str(llama_pair[1])}
    want = plain.generate([PROMPT], SamplingParams(max_tokens=12, temperature=0))[0].token_ids

    def engine(reads: bool):
        core = build_engine(llama_pair[0], make_config(**settings), block_key=KEY).core
        core.scheduler.drafter = RandomModelDrafter(5)
        core.scheduler.drafter.reads = lambda request: reads
        return core

    for reads in (True, False):
        first, second = engine(reads), engine(True)
        first.submit(replace(asked(), params=SamplingParams(max_tokens=1, temperature=0), limit=len(PROMPT) + 1))
        finish(first)
        state = submit_with(second, asked(), export_prefix(first, PROMPT, b"t"), len(PROMPT))
        assert (state.computed, state.drafted) == (64, 64 if reads else 0)
        finish(second)
        assert state.tokens[len(PROMPT) :] == want


def test_a_request_that_another_engine_began(llama_pair, plain) -> None:
    """Its answer so far is part of what the draft model reads."""
    params = SamplingParams(max_tokens=40, temperature=1.0)
    whole = plain.engine.core.submit(Request(1, tuple(PROMPT), params, seed=8, limit=len(PROMPT) + 40))
    finish(plain.engine.core)
    core = drafted(llama_pair).engine.core
    begun = Request(2, tuple(whole.tokens[:-25]), params, seed=8, limit=len(PROMPT) + 40, written=15)
    state: RequestState = core.submit(begun)
    finish(core)
    assert state.tokens == whole.tokens and core.scheduler.counters.accepted_tokens > 0


STOPS_IN_ONE = """
import sys, time
sys.path.append(sys.argv[3])
from tests.draft import paying
from twostroke.engine import core
from twostroke.remote import child_main
paying.install()
plain = core.Core.step
def step(self):
    if any(r.params.max_tokens == 101 and r.output_length > 40 for r in self.scheduler.running.values()):
        time.sleep(1000)
    return plain(self)
core.Core.step = step
child_main.main(*sys.argv[1:3])
"""


def test_in_a_child_process_that_ends_and_starts_again(llama_pair, plain, monkeypatch) -> None:
    """Killed in the middle of an answer of 101 tokens, in which it stops. Drafts are accepted before and after."""
    monkeypatch.setattr(process, "BOOT", STOPS_IN_ONE)
    whole, broken = (SamplingParams(temperature=0, max_tokens=most, ignore_eos=True) for most in (100, 101))

    async def whole_answer(engine) -> None:
        stream = engine.submit([PROMPT], whole)
        assert [token async for piece in stream for token in piece.event.token_ids] == want
        assert stream.answers[0].sample.timeline.accepted_tokens > 0

    async def scenario(engine) -> None:
        assert engine.intake.settings.draft_model == str(llama_pair[1])
        await whole_answer(engine)
        first, tokens, most = engine.client.child, [], 0
        async for piece in engine.submit([PROMPT], broken):
            tokens += piece.event.token_ids
            most = max(most, len(piece.event.token_ids))
            if len(tokens) > 40:
                first.process.kill()
        assert piece.event.error == ENGINE_GONE and most > 1
        assert 40 < len(tokens) < 100 and tokens == want[: len(tokens)]
        await until(lambda: engine.client.child is not first, "its death was not seen")
        await healthy(engine)
        await whole_answer(engine)

    want = plain.generate([PROMPT], whole)[0].token_ids
    run(llama_pair[0], scenario, speculate="draft", draft_model=str(llama_pair[1]), max_model_len=192)
