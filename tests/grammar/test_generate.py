"""Grammars in the engine: batches, preemption, failed steps, penalties and poisoned rows."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.grammar.walks import PERSON, SCHEMAS, usable
from twostroke import LLM, InputError, SamplingParams
from twostroke.grammar.masks import TOO_SHORT
from twostroke.sampling import Grammar


def test_all_kinds_in_generate(llm):
    kinds = [
        (Grammar("json_schema", PERSON), lambda text: jsonschema.validate(json.loads(text), PERSON)),
        (Grammar("regex", r"[a-f]{3,6}-\d\d"), lambda text: re.fullmatch(r"[a-f]{3,6}-\d\d", text)[0]),
        (Grammar("ebnf", 'root ::= ("yes" | "no") " " [0-9]{2}'), lambda text: re.fullmatch(r"(yes|no) \d\d", text)[0]),
        (Grammar("json_object"), lambda text: json.loads(text)),
    ]
    for temperature in (0.0, 1.0):
        params = [SamplingParams(grammar=g, max_tokens=250, temperature=temperature, seed=3) for g, _ in kinds]
        for output, (_, check) in zip(llm.generate(["Once upon"] * 4, params), kinds, strict=True):
            assert output.samples[0].error is None
            if output.finish_reason == "stop":
                check(output.text)
    assert output.finish_reason in ("stop", "length")


@given(SCHEMAS.filter(usable), st.integers(0, 2**32))
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_weights_write_what_a_schema_says(llm, schema, seed):
    params = SamplingParams(grammar=Grammar("json_schema", schema), max_tokens=120, seed=seed, n=3)
    try:
        (output,) = llm.generate("The quick", params)
    except InputError:
        return
    for sample in output.samples:
        assert sample.error is None
        if sample.finish_reason == "stop":
            jsonschema.validate(json.loads(sample.text), schema)


def mixed_params():
    grammars = [Grammar("json_schema", PERSON), Grammar("regex", "(ab|[c-f]{2}){4,30}"), None, Grammar("json_object")]
    return [
        SamplingParams(
            grammar=grammars[i % 4], temperature=0.7 * (i % 3), seed=i, max_tokens=40 + i, top_k=20 * (i % 2)
        )
        for i in range(12)
    ]


def test_the_same_tokens_alone_in_a_batch_and_through_preemption(llm, llama_folder):
    prompts = [f"prompt number {i} " * (1 + i % 4) for i in range(12)]
    params = mixed_params()
    alone = [llm.generate(p, one)[0].token_ids for p, one in zip(prompts, params, strict=True)]
    assert [output.token_ids for output in llm.generate(prompts, params)] == alone
    tight = LLM(llama_folder, dtype="float32", max_requests=8, kv_blocks=14, max_model_len=200, max_batch_tokens=24)
    assert [output.token_ids for output in tight.generate(prompts, params)] == alone
    assert tight.stats()["preemptions"] > 0


def test_a_failed_step_is_taken_back(llm, monkeypatch):
    params = mixed_params()[:4]
    expected = [output.token_ids for output in llm.generate(["Once"] * 4, params)]
    runner, calls = llm.engine.core.runner, iter([False, False, True, False, False, True])
    launch = runner.launch

    def failing(plan):
        result = launch(plan)
        if len(plan.works) > 1 and next(calls, False):
            raise RuntimeError("on purpose")
        return result

    monkeypatch.setattr(runner, "launch", failing)
    assert [output.token_ids for output in llm.generate(["Once"] * 4, params)] == expected


def test_a_request_whose_grammar_cannot_go_on_fails_alone(llm):
    good = SamplingParams(grammar=Grammar("json_schema", PERSON), seed=5, max_tokens=60)
    bad = SamplingParams(grammar=Grammar("regex", "[ab]{2}"), min_tokens=20, seed=5)
    (expected,) = llm.generate("Once", good)
    first, second = llm.generate(["Once", "Once"], [bad, good])
    assert first.finish_reason == "error" and first.samples[0].error == TOO_SHORT
    assert second.token_ids == expected.token_ids


def test_logprobs_are_of_the_model_not_of_the_mask(llm):
    free = SamplingParams(temperature=0, max_tokens=1, logprobs=3, seed=1)
    bound = SamplingParams(temperature=0, max_tokens=1, logprobs=3, seed=1, grammar=Grammar("regex", "zzz"))
    first, second = llm.generate(["Once", "Once"], [free, bound])
    assert second.text == "z" and first.logprobs[0].top == second.logprobs[0].top
    assert second.logprobs[0].logprob <= first.logprobs[0].logprob


def test_bias_and_penalties_act_within_the_grammar(llm):
    b = llm.tokenizer.encode("b")[0]
    params = SamplingParams(grammar=Grammar("regex", "[abc]{8}"), temperature=0, logit_bias={b: 100.0, 9: 100.0})
    assert llm.generate("Once", params)[0].text == "b" * 8


def test_bad_grammars_are_refused_before_anything_runs(llm):
    before = llm.stats()["steps"]
    with pytest.raises(InputError, match="grammar"):
        llm.generate(["Once", "Once"], [SamplingParams(), SamplingParams(grammar=Grammar("regex", "("))])
    with pytest.raises(InputError, match="grammar"):
        next(llm.stream("Once", SamplingParams(grammar=Grammar("regex", "("))))
    assert llm.stats()["steps"] == before


def test_a_poisoned_row_fails_as_before(llm, monkeypatch):
    logits = llm.engine.core.runner.model.logits

    def poisoned(hidden):
        out = logits(hidden)
        out[0, 7] = torch.nan
        return out

    monkeypatch.setattr(llm.engine.core.runner.model, "logits", poisoned)
    (output,) = llm.generate("Once", SamplingParams(grammar=Grammar("json_object")))
    assert output.finish_reason == "error" and "not numbers" in output.samples[0].error
