"""Output is token-for-token the same whatever the engine did on the way.

Random requests and random levers against one request alone. Ties are no excuse: the bits of the logits must agree, so
sampled tokens and log probabilities are compared too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.conftest import quiet_pair
from tests.draft.paying import make_rows_free
from tests.engine.oracle import OracleDrafter, RandomModelDrafter
from tests.tiny import FAMILIES, tiny_family
from twostroke import LLM, SamplingParams
from twostroke.draft.rates import FORCED
from twostroke.grammar.forced import BYTES
from twostroke.ops.reference.backend import ReferenceOps
from twostroke.sampling import Grammar
from twostroke.schedule.policy import POLICIES
from twostroke.schedule.together import Together
from twostroke.types import RequestState


@dataclass(frozen=True)
class Ask:
    tokens: tuple[int, ...]
    max_tokens: int
    temperature: float
    n: int
    priority: int
    abort_after: int | None  # steps after which the caller hangs up
    stop: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()


asks = st.builds(
    lambda shared, own, own_length, **rest: Ask(
        tokens=tuple((7 * i + 3) % 300 + 3 for i in range(shared))
        + tuple((own + 11 * i) % 300 + 3 for i in range(own_length)),
        **rest,
    ),
    shared=st.sampled_from([0, 0, 16, 45, 100]),
    own=st.integers(0, 100),
    own_length=st.integers(1, 60),
    max_tokens=st.integers(1, 24),
    temperature=st.sampled_from([0.0, 0.0, 1.0]),
    n=st.sampled_from([1, 1, 1, 3]),
    priority=st.integers(0, 2),
    abort_after=st.sampled_from([None, None, None, None, 2, 9]),
    stop=st.sampled_from([(), (), (), ("e",), ("dd", "ee", "v" * 9)]),
    logit_bias=st.sampled_from([(), (), ((70, 2.0), (71, 2.0)), ((70, 6.0), (71, 6.0)), ((88, 100.0), (75, -100.0))]),
)
levers = st.fixed_dictionaries(
    {
        "max_batch_tokens": st.sampled_from([16, 17, 50, 128, 2048]),
        "max_requests": st.sampled_from([1, 2, 5, 16]),
        "kv_blocks": st.sampled_from([40, 44, 60, 400]),
        "prefix_cache": st.booleans(),
        "batching": st.sampled_from(["continuous", "continuous", "static"]),
        "policy": st.sampled_from(sorted(POLICIES)),
        "chunked_prefill": st.sampled_from([True, True, True, False]),
        "host_slots": st.sampled_from([0, 2, 30, 500]),  # evicted blocks that the host keeps
        "threads": st.sampled_from([1, 1, 2]),
        "together": st.sampled_from([0.0, 0.0, 0.05, 1e9]),  # seconds for which answers wait for other prompts
        # lookup, none, an oracle: (most, share of errors), or a draft model that writes up to so many tokens
        "draft": st.sampled_from(["lookup", "off", (1, 0.0), (3, 0.3), (8, 0.0), (8, 0.2), (8, 0.9), 1, 5, 9]),
    }
)
BASE = {"max_model_len": 192, "threads": 1, "seed": 1}
LETTER_E = 71  # a token of the tiny models


def params(ask: Ask) -> SamplingParams:
    return SamplingParams(
        max_tokens=ask.max_tokens, temperature=ask.temperature, n=ask.n, priority=ask.priority, seed=17, logprobs=2,
        stop=ask.stop, logit_bias=dict(ask.logit_bias),
    )  # fmt: skip


def result(output):
    return [(s.token_ids, s.finish_reason, s.logprobs, s.text) for s in output.samples]


class Alone:
    """Answers of one request alone in a fresh cache, remembered."""

    def __init__(self, folder, **settings_):
        self.llm = LLM(folder, kv_blocks=400, prefix_cache=False, speculate="off", **(BASE | settings_))
        self.known: dict[tuple, list] = {}

    def answer(self, ask: Ask):
        key = (ask.tokens, ask.max_tokens, ask.temperature, ask.n, ask.stop, ask.logit_bias)
        if key not in self.known:
            self.known[key] = result(self.llm.generate([list(ask.tokens)], params(ask))[0])
        return self.known[key]


def run_together(llm: LLM, many: list[Ask]):
    """Submit all, step until done, hang up on some. Returns (ask, output or None when it was aborted)."""
    jobs = [(ask, llm._submit(list(ask.tokens), params(ask))) for ask in many]
    steps = 0
    while not all(job.finished for _, job in jobs):
        llm._pump()
        llm.engine.core.scheduler.check()
        steps += 1
        for ask, job in jobs:
            if ask.abort_after is not None and steps >= ask.abort_after and not job.finished:
                llm._abort([job])
    while not llm.engine.core.idle:  # a GPU's step in flight still has blocks of requests that have ended
        llm._pump()
    return [(ask, job.output()) for ask, job in jobs]


@pytest.fixture(scope="module", params=["llama", "llama-int8-kv", "llama-int4-kv", "gemma"])
def model(request, llama_pair, gemma_pair):
    folder, draft = gemma_pair if request.param == "gemma" else llama_pair
    kv = {"llama-int8-kv": "int8", "llama-int4-kv": "int4"}.get(request.param)
    return folder, {"kv_dtype": kv}, Alone(folder, kv_dtype=kv), draft


LIBRARY = "twostroke.ops.cpu.library.available"


def on_torch(folder, draft, **settings):
    settings |= {"threads": 2}  # torch has them for the whole process
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LIBRARY, lambda: False)
        alone = Alone(folder, **settings)
    assert isinstance(alone.llm.engine.core.runner.ops, ReferenceOps)
    return folder, settings, alone, draft


@pytest.fixture(scope="module", params=["llama", pytest.param("gemma", marks=pytest.mark.slow)])
def torch_model(request, llama_pair, gemma_pair):
    """The same on a machine without the native library."""
    return on_torch(*(gemma_pair if request.param == "gemma" else llama_pair))


def check_levers(model, many, lever):
    folder, extra, alone, *pair = model
    block = alone.llm.settings.layout.block_bytes
    offload = lever["host_slots"] * block if lever["prefix_cache"] else 0
    given = {name: value for name, value in lever.items() if name not in ("host_slots", "draft", "together")}
    draft = lever.get("draft", "lookup")
    speculate = draft if isinstance(draft, str) else "off"
    if isinstance(draft, int):
        given |= {"draft_model": str(pair[0]), "kv_blocks": 2 * given["kv_blocks"]}
        offload *= 2
    llm = LLM(folder, kv_offload=offload, speculate=speculate, **(BASE | given | extra))
    llm.engine.core.scheduler.together = Together(lever["together"], within=1e9, many=1)
    if isinstance(draft, int):
        llm.engine.core.scheduler.drafter = RandomModelDrafter(draft)
    elif draft != speculate:
        known = {(ask.tokens, ask.temperature): [s[0] for s in alone.answer(ask)] for ask in many}
        llm.engine.core.scheduler.drafter = OracleDrafter(known, *draft)
    for _ in range(2):  # the second time with whatever the cache holds by then
        for ask, output in run_together(llm, many):
            for got, want in zip(result(output), alone.answer(ask), strict=True):
                if got[1] == "abort":
                    assert got[0] == want[0][: len(got[0])]
                else:
                    assert got == want
    pool = llm.engine.core.scheduler.tables.pool
    assert pool.available == pool.total


def random_lives(examples: int):
    """Hypothesis with a fixed seed: the same examples on every machine."""
    fixed = settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: fixed(given(many=st.lists(asks, min_size=1, max_size=7), lever=levers)(test))


@random_lives(50)
def test_levers_do_not_change_a_token(model, many, lever):
    check_levers(model, many, lever)


@random_lives(8)
def test_levers_do_not_change_a_token_on_torch(torch_model, many, lever):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LIBRARY, lambda: False)
        check_levers(torch_model, many, lever)


@pytest.fixture(scope="module", params=["float16", "int8"])
def latent_model(request, deepseek_pair):
    folder, draft = deepseek_pair
    kv = {"kv_dtype": request.param}
    return folder, kv, Alone(folder, **kv), draft


@random_lives(14)
def test_levers_do_not_change_a_token_of_latent_attention(latent_model, many, lever):
    check_levers(latent_model, many, lever)


@pytest.fixture(scope="module")
def compressed_model(compressed_folder, llama_pair):
    """With a draft model of another kind: their caches share the pool."""
    return compressed_folder, {}, Alone(compressed_folder), llama_pair[1]


@random_lives(5)
def test_levers_do_not_change_a_token_of_compressed_attention(compressed_model, many, lever):
    check_levers(compressed_model, many, lever | {"kv_blocks": 2 * lever["kv_blocks"]})


@pytest.mark.slow
@random_lives(60)
def test_many_levers_do_not_change_a_token_of_compressed_attention(compressed_model, many, lever):
    check_levers(compressed_model, many, lever | {"kv_blocks": 2 * lever["kv_blocks"]})


def test_compressed_entries_are_shared_at_whole_multiples(compressed_folder):
    """Entries of 4 and of 32 tokens: a prefix is shared in steps of 32, also after its states are gone."""
    alone = Alone(compressed_folder)
    llm = LLM(compressed_folder, kv_blocks=400, speculate="off", **BASE)
    first = Ask(tuple(i % 300 + 3 for i in range(101)), 20, 0.0, 1, 0, None)
    run_together(llm, [first])
    for kept in (31, 32, 33, 70, 100):
        before = llm.stats()["cached_tokens"]
        ask = Ask((*first.tokens[:kept], 299), 9, 0.0, 1, 0, None)
        ((_, output),) = run_together(llm, [ask])
        assert result(output) == alone.answer(ask)
        assert llm.stats()["cached_tokens"] - before == 32 * (kept // 32)


@pytest.fixture(scope="module", params=["float16", "int8"])
def sinks_model(request, gpt_oss_pair):
    folder, draft = gpt_oss_pair
    kv = {"kv_dtype": request.param}
    return folder, kv, Alone(folder, **kv), draft


@random_lives(8)
def test_levers_do_not_change_a_token_of_attention_with_sinks(sinks_model, many, lever):
    check_levers(sinks_model, many, lever)


@pytest.fixture(scope="module")
def torch_latent_model(deepseek_pair):
    return on_torch(*deepseek_pair, kv_dtype="int8")


@random_lives(2)
def test_levers_do_not_change_a_token_of_latent_attention_on_torch(torch_latent_model, many, lever):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LIBRARY, lambda: False)
        check_levers(torch_latent_model, many, lever)


@pytest.fixture(scope="module")
def mixture_model(mixture_pair):
    folder, draft = mixture_pair
    return folder, {}, Alone(folder), draft


@random_lives(12)
def test_levers_do_not_change_a_token_of_a_mixture(mixture_model, many, lever):
    check_levers(mixture_model, many, lever)


@pytest.fixture(scope="module", params=FAMILIES)
def family_model(request, tmp_path_factory):
    folder, draft = quiet_pair(tmp_path_factory, tiny_family(tmp_path_factory.mktemp("plain"), request.param))
    return folder, {}, Alone(folder), draft


@random_lives(6)
def test_levers_do_not_change_a_token_of_any_family(family_model, many, lever):
    check_levers(family_model, many, lever)


@pytest.mark.slow
@random_lives(40)
def test_many_levers_do_not_change_a_token_of_any_family(family_model, many, lever):
    check_levers(family_model, many, lever)


@pytest.fixture(scope="module")
def torch_mixture_model(mixture_pair):
    return on_torch(*mixture_pair)


@random_lives(2)
def test_levers_do_not_change_a_token_of_a_mixture_on_torch(torch_mixture_model, many, lever):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LIBRARY, lambda: False)
        check_levers(torch_mixture_model, many, lever)


@pytest.fixture(scope="module")
def quantized_model(default_model):
    return default_model, {"threads": 2}, Alone(default_model, threads=2)


SHARED = tuple(range(1000, 1045))
REAL = [  # a life with everything in it, short: a step of the real model takes a while
    Ask((*SHARED, *range(2000, 2030)), 8, 0.0, 1, 0, None),
    Ask((*SHARED, 3000), 12, 1.0, 3, 1, None),
    Ask(tuple(range(4000, 4020)), 10, 0.0, 1, 2, None),
    Ask(tuple(range(5000, 5090)), 6, 1.0, 1, 0, None),
    Ask((*SHARED, 6000), 24, 0.0, 1, 0, 9),
]


@pytest.mark.parametrize(
    "lever",
    [
        {
            "max_batch_tokens": 50,
            "max_requests": 5,
            "kv_blocks": 14,
            "max_model_len": 112,
            "host_slots": 30,
        },
        {"max_batch_tokens": 128, "max_requests": 2, "kv_blocks": 400, "prefix_cache": False, "batching": "static"},
    ],
    ids=["scarce", "static"],
)
def test_levers_do_not_change_a_token_of_the_quantized_default_model(quantized_model, lever):
    check_levers(quantized_model, REAL, {"prefix_cache": True, "host_slots": 0, "together": 0.05} | lever)


@pytest.mark.parametrize("kind", ["llama", "latent", "compressed"])
def test_preemption_really_happens_and_changes_nothing(kind, llama_folder, deepseek_pair, compressed_folder):
    folder = {"llama": llama_folder, "latent": deepseek_pair[0], "compressed": compressed_folder}[kind]
    alone = Alone(folder)
    many = [Ask(tuple(range(10 * i + 3, 10 * i + 33)), 24, 0.0, 1, 0, None) for i in range(10)]
    blocks = 60 if kind == "compressed" else 16
    llm = LLM(folder, kv_blocks=blocks, **(BASE | {"max_model_len": 128}))
    for ask, output in run_together(llm, many):
        assert result(output) == alone.answer(ask)
    stats = llm.stats()
    assert stats["preemptions"] > 0
    assert stats["recomputed_tokens"] > 0


def test_drafts_are_really_verified_and_change_nothing(llama_folder):
    """A drafter that is always right: about as many steps as answers have ninths."""
    alone = Alone(llama_folder)
    many = [Ask(tuple(range(10 * i + 3, 10 * i + 33)), 24, float(i % 2), 1, 0, None) for i in range(4)]
    llm = LLM(llama_folder, kv_blocks=100, **BASE)
    known = {(ask.tokens, ask.temperature): [s[0] for s in alone.answer(ask)] for ask in many}
    drafter = llm.engine.core.scheduler.drafter = OracleDrafter(known, 8, 0.0)
    for ask, output in run_together(llm, many):
        assert result(output) == alone.answer(ask)
    assert drafter.proposed > 40 and llm.stats()["steps"] < 14


class Unready:
    """A runner that leaves out the drafts of every other plan, as one does on a GPU before a graph is made."""

    def __init__(self, runner):
        self.runner, self.plans, self.left_out = runner, 0, 0

    def __getattr__(self, name):
        return getattr(self.runner, name)

    def launch(self, plan):
        self.plans += 1
        left_out = self.plans % 2 == 0 and plan != plan.undrafted()
        self.left_out += left_out
        return left_out, self.runner.launch(plan.undrafted() if left_out else plan)

    def collect(self, handle):
        left_out, inner = handle
        return self.runner.collect(inner)._replace(verified=not left_out)


def test_drafts_that_a_runner_leaves_out_change_nothing_and_are_not_counted(llama_folder):
    alone = Alone(llama_folder)
    many = [Ask(tuple(range(10 * i + 3, 10 * i + 33)), 24, float(i % 2), 1, 0, None) for i in range(4)]
    llm = LLM(llama_folder, kv_blocks=100, **BASE)
    core = llm.engine.core
    runner = core.runner = Unready(core.runner)
    known = {(ask.tokens, ask.temperature): [s[0] for s in alone.answer(ask)] for ask in many}
    drafter = core.scheduler.drafter = OracleDrafter(known, 8, 0.0)
    for ask, output in run_together(llm, many):
        assert result(output) == alone.answer(ask)
    stats = llm.stats()
    assert runner.left_out > 3 and 0 < stats["drafted_tokens"] < drafter.proposed
    assert stats["accepted_tokens"] > 0.9 * stats["drafted_tokens"], "those at the end of an answer may be too many"
    drafted = sum(work.count - 1 for step in core.steplog for work in step.works if work.kind == "verify")
    wrong = drafted - stats["accepted_tokens"]
    assert drafted == stats["drafted_tokens"] and stats["computed_tokens"] == 4 * 30 + 4 * 23 + wrong
    assert all(work.count == 1 for step in core.steplog for work in step.works if work.kind == "write")


def test_lookup_drafts_are_verified_and_change_nothing(default_model):
    """A text that repeats itself: fewer steps, the same tokens and log probabilities."""
    alone = Alone(default_model)
    llm = LLM(default_model, kv_blocks=100, **BASE)
    make_rows_free(llm.engine.core.scheduler.drafter)
    text = "Line 1: the cat sat on the mat.\nLine 2: the dog lay on the rug.\n"
    tokens = tuple(llm.tokenizer.encode(text * 2))
    for temperature in (0.0, 1.0):
        ask = Ask(tokens, 40, temperature, 1, 0, None)
        output = run_together(llm, [ask])[0][1]
        assert result(output) == alone.answer(ask)
        timeline = output.timeline
        assert 0 < timeline.accepted_tokens <= timeline.drafted_tokens and timeline.tokens_per_step > 1
    stats = llm.stats()
    assert stats["accepted_tokens"] > 10 and stats["steps"] < 80 - stats["accepted_tokens"] + 5
    llm.generate([list(tokens)], SamplingParams(max_tokens=20, temperature=0, speculate=False))
    assert llm.stats()["drafted_tokens"] == stats["drafted_tokens"]


def test_penalties_grammars_and_stops_see_the_tokens_before_each_draft(llama_folder):
    """Per position: a penalty counts what was accepted, a mask follows the text, a stop string ends it."""
    prompt = [5, 6, 7, 8]
    asked = [
        SamplingParams(max_tokens=20, temperature=t, seed=3, logprobs=1, **more)
        for t in (0.0, 1.0)
        for more in (
            {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
            {"min_tokens": 9, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
            {"grammar": Grammar("regex", "[a-z ]{4,60}")},
            {"grammar": Grammar("json_object")},
            {"logit_bias": {70: 7.0, 71: 7.0, 72: -100.0}},
            {"logit_bias": {LETTER_E: 6.0}, "stop": ["ee", "x"]},
            {"logit_bias": {LETTER_E: 100.0}, "stop": ["eeeeee"], "min_tokens": 9},
        )
    ]
    plain = LLM(llama_folder, kv_blocks=100, **BASE)
    assert plain.tokenizer.decode([LETTER_E]) == "e"
    wanted = [result(plain.generate([prompt], one)[0]) for one in asked]
    assert len(wanted[-1][0][0]) in range(10, 16) and wanted[-1][0][1] == "stop"
    for errors in (0.0, 0.4):
        drafted = LLM(llama_folder, kv_blocks=100, **BASE)
        for one, want in zip(asked, wanted, strict=True):
            known = {(tuple(prompt), one.temperature): [s[0] for s in want]}
            drafted.engine.core.scheduler.drafter = OracleDrafter(known, 8, errors)
            assert result(drafted.generate([prompt], one)[0]) == want
        assert drafted.stats()["accepted_tokens"] > 60


def test_tokens_that_a_grammar_forces_are_drafted_and_change_nothing(default_model):
    keys = ("first_and_last_name", "favourite_colour_of_the_year", "number_of_children")
    schema = {"type": "object", "properties": {key: {"type": "string", "maxLength": 8} for key in keys}}
    schema |= {"required": list(keys), "additionalProperties": False}
    grammar = Grammar("json_schema", json.dumps(schema))
    plain = LLM(default_model, kv_blocks=100, speculate="off", **BASE)
    llm = LLM(default_model, kv_blocks=100, **BASE)
    make_rows_free(llm.engine.core.scheduler.drafter)
    for temperature in (0.0, 1.0):
        asked = SamplingParams(max_tokens=90, temperature=temperature, seed=5, grammar=grammar, logprobs=1)
        want = plain.generate(["A person as JSON:\n"], asked)[0]
        assert result(llm.generate(["A person as JSON:\n"], asked)[0]) == result(want)
        assert set(json.loads(want.text)) == set(keys)
    kinds = llm.engine.core.scheduler.drafter.acceptance
    assert kinds.right[FORCED] > 10 and kinds.right[FORCED] > 0.5 * kinds.tried[FORCED]


def test_a_long_forced_text_is_tokenized_in_part(default_model):
    llm = LLM(default_model, kv_blocks=100, **BASE)
    make_rows_free(llm.engine.core.scheduler.drafter)
    encoded = []
    forced = llm.engine.core.scheduler.forced
    plain = forced.tokenizer.encode
    forced.tokenizer = SimpleNamespace(encode=lambda text, **more: encoded.append(len(text)) or plain(text, **more))
    grammar = Grammar("regex", "the cat sat on the mat, " * 400)
    llm.generate(["Once"], SamplingParams(max_tokens=40, temperature=0, grammar=grammar))
    assert encoded and max(encoded) <= BYTES


def test_a_failed_step_changes_nothing(llama_folder):
    """A step that raises takes its requests back to the queue; the guilty one alone gets the error."""
    alone = Alone(llama_folder)
    llm = LLM(llama_folder, kv_blocks=100, **BASE)
    many = [Ask(tuple(range(3, 40 + i)), 12, 0.0, 1, 0, None) for i in range(4)]
    jobs = [(ask, llm._submit(list(ask.tokens), params(ask))) for ask in many]
    guilty: RequestState = llm.engine.core.scheduler.find(jobs[2][1].answers[0].request.id)
    launch = llm.engine.core.runner.launch

    def faulty(plan):
        if guilty.output_length >= 3 and any(work.request is guilty for work in plan.works):
            raise RuntimeError("boom")
        return launch(plan)

    llm.engine.core.runner.launch = faulty
    while not all(job.finished for _, job in jobs):
        llm._pump()
        llm.engine.core.scheduler.check()
    for index, (ask, job) in enumerate(jobs):
        got, want = result(job.output()), alone.answer(ask)
        if index == 2:
            assert got[0][1] == "error"
            assert got[0][0] == want[0][0][: len(got[0][0])]
        else:
            assert got == want
