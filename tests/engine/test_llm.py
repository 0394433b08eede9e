"""The Python face: what a caller asks for is what comes back."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest

from tests import tiny
from twostroke import LLM, ConfigError, Grammar, InputError, ModelError, SamplingParams
from twostroke.engine.chat_form import chat_form
from twostroke.grammar.tools import writer
from twostroke.text.formats import HARMONY

GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(llama_folder):
    return LLM(llama_folder, seed=3)


def test_text_tokens_and_reason(llm):
    out = llm.generate(["Once upon a time", [50, 60, 70]], GREEDY)
    assert [len(o.token_ids) for o in out] == [16, 16]
    assert out[0].prompt_token_ids == llm.tokenizer.encode("Once upon a time")
    assert out[1].prompt_token_ids == [50, 60, 70]
    assert out[0].text == llm.tokenizer.decode(out[0].token_ids, at_start=False)
    assert out[0].finish_reason == "length"
    assert llm.generate("Once upon a time", GREEDY)[0].token_ids == out[0].token_ids
    assert llm.generate([50, 60, 70], GREEDY)[0].token_ids == out[1].token_ids
    assert llm.generate([]) == []


def test_streaming_is_the_same_answer(llm):
    whole = llm.generate("Once", GREEDY)[0]
    events = list(llm.stream("Once", GREEDY))
    assert "".join(e.text for e in events) == whole.text
    assert [t for e in events for t in e.token_ids] == whole.token_ids
    assert [e.finish_reason for e in events][-1] == "length"
    assert sum(e.finish_reason is not None for e in events) == 1
    assert events[-1].timeline.output_tokens == 16


def test_closing_a_stream_frees_everything(llm):
    stream = llm.stream("Once upon", SamplingParams(max_tokens=200, temperature=0, ignore_eos=True))
    next(stream)
    stream.close()
    stats = llm.stats()
    assert stats["blocks_free"] + stats["blocks_cached"] == stats["blocks_total"]
    assert llm.engine.core.idle


def test_streams_and_generate_interleave(llm):
    want = llm.generate(["Once", "The"], GREEDY)
    first, second = llm.stream("Once", GREEDY), llm.stream("The", GREEDY)
    got = [next(first), next(second)]
    assert llm.generate("fox", GREEDY)[0].finish_reason == "length"
    texts = [got[0].text + "".join(e.text for e in first), got[1].text + "".join(e.text for e in second)]
    assert texts == [o.text for o in want]


def test_threads_share_the_engine(llm):
    want = [llm.generate([i, i + 1, i + 2], GREEDY)[0].token_ids for i in range(10, 14)]
    got: dict[int, list[int]] = {}

    def ask(i):
        got[i] = llm.generate([i, i + 1, i + 2], GREEDY)[0].token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(10, 14)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(10, 14)] == want


def test_chat_uses_the_template(llm):
    out = llm.chat([{"role": "user", "content": "Hi"}], GREEDY)
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert out.prompt_token_ids == llm.tokenizer.encode(text, add_special=False)
    many = llm.chat([[{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Ho"}]], GREEDY)
    assert many[0].token_ids == out.token_ids
    streamed = list(llm.stream([{"role": "user", "content": "Hi"}], GREEDY))
    assert [t for e in streamed for t in e.token_ids] == out.token_ids


def thinking(folder: Path, opens: bool) -> LLM:
    """A model whose template knows <think>, and may open it. Both marks are special tokens."""
    tiny.tiny_llama(folder, vocab_size=tiny.VOCAB + 2)
    data = json.loads((folder / "tokenizer.json").read_text())
    known = max(data["model"]["vocab"].values()) + 1
    data["added_tokens"] += [
        {"id": known + index, "content": mark, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False} for index, mark in enumerate(("<think>", "</think>"))
    ]  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(data))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = config["chat_template"] + "{# </think> #}" + ("<think>\n" if opens else "")
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return LLM(folder, seed=3)


def test_thoughts_are_apart(tmp_path):
    ask, params = [{"role": "user", "content": "Rain?"}], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    llm = thinking(tmp_path / "open", opens=True)
    out, plain = llm.chat(ask, params), llm.generate([llm.chat(ask, params).prompt_token_ids], params)[0]
    assert (out.text, out.reasoning) == ("", plain.text.strip())
    events = list(llm.stream(ask, params))
    assert ("".join(e.text for e in events), "".join(e.reasoning for e in events)) == ("", out.reasoning)
    bound = SamplingParams(grammar=Grammar("regex", "Yes"), max_tokens=6)
    assert llm.chat(ask, bound).text == "Yes"  # a grammar covers the whole answer
    form, prompt = chat_form(llm.tokenizer, tools=False), llm.tokenizer.encode("Hi", add_special=False)
    assert form.visible == {llm.tokenizer.token_id("<think>"), llm.tokenizer.token_id("</think>")}
    divide = form.division(prompt, constrained=False)
    assert [divide("<think>Hm.", False), divide("</think>\n\nYes.", True)] == [("", "Hm."), ("Yes.", "")]
    assert chat_form(llm.tokenizer, tools=True).division(prompt, constrained=False) is None
    assert thinking(tmp_path / "closed", opens=False).chat(ask, params).reasoning == ""


def test_channels_are_not_shown(tmp_path):
    """A model that writes Harmony: the text is the answer, reasoning is apart; with tools the text has all of it."""
    llm = LLM(tiny.tiny_harmony(tmp_path), seed=3)
    written = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    bound = Grammar("ebnf", f"start: {writer(HARMONY, llm.tokenizer)(written)}\n")
    params, ask = SamplingParams(grammar=bound, max_tokens=60), [{"role": "user", "content": "Rain?"}]
    out = llm.chat(ask, params)
    assert (out.text, out.reasoning, out.finish_reason) == ("Yes.", "Hm.", "stop")
    events = list(llm.stream(ask, params))
    assert ("".join(e.text for e in events), "".join(e.reasoning for e in events)) == ("Yes.", "Hm.")
    cut = llm.chat(ask, SamplingParams(grammar=bound, max_tokens=out.token_ids.index(out.token_ids[0], 1)))
    assert (cut.text, cut.reasoning, cut.finish_reason) == ("", "Hm.", "length")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert llm.chat(ask, params, tools=[tool]).text == written
    plain = llm.generate("Rain?", params)[0]
    assert plain.text == "analysisHm.assistantfinalYes." and plain.reasoning == ""


def test_stop_tokens_end_the_answer(llm):
    free = llm.generate("Once", GREEDY)[0]
    stop = free.token_ids[5]
    first = free.token_ids.index(stop)
    out = llm.generate("Once", SamplingParams(max_tokens=16, temperature=0, stop_token_ids=[stop], ignore_eos=True))[0]
    assert out.finish_reason == "stop"
    assert out.token_ids == free.token_ids[: first + 1]
    assert out.text == llm.tokenizer.decode(free.token_ids[:first], at_start=False)
    later = SamplingParams(max_tokens=16, min_tokens=first + 3, temperature=0, stop_token_ids=[stop], ignore_eos=True)
    assert len(llm.generate("Once", later)[0].token_ids) > first + 1


def test_stop_strings_end_the_text_before_them(llm):
    free = llm.generate("Once", GREEDY)[0]
    stop = free.text[5:8]
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, stop=[stop, "never there"])
    out = llm.generate("Once", params)[0]
    assert out.finish_reason == "stop"
    assert out.text == free.text[: free.text.index(stop)]
    assert out.token_ids == free.token_ids[: len(out.token_ids)]
    assert "".join(e.text for e in llm.stream("Once", params)) == out.text
    assert llm.engine.core.idle


def test_logprobs(llm):
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    out = llm.generate("Once upon a time there was", params)[0]
    assert [lp.token_id for lp in out.logprobs] == out.token_ids
    for lp in out.logprobs:
        assert len(lp.top) == 3
        assert lp.top[0] == (lp.token_id, pytest.approx(lp.logprob))
    assert len(out.prompt_logprobs) == len(out.prompt_token_ids)
    assert out.prompt_logprobs[0] is None
    assert [lp.token_id for lp in out.prompt_logprobs[1:]] == out.prompt_token_ids[1:]
    # A prompt that ends with the answer scores the answer as the answer was scored.
    again = llm.generate(out.prompt_token_ids + out.token_ids, params)[0]
    for scored, written in zip(again.prompt_logprobs[-4:], out.logprobs, strict=True):
        assert scored.logprob == written.logprob


def test_samples_share_the_prompt_and_differ(llama_folder):
    llm = LLM(llama_folder, kv_blocks=300)
    prompt = list(range(3, 163))
    out = llm.generate([prompt], SamplingParams(max_tokens=8, n=8, seed=4, ignore_eos=True))[0]
    assert len(out.samples) == 8
    assert len({tuple(s.token_ids) for s in out.samples}) == 8
    stats = llm.stats()
    assert stats["computed_tokens"] <= 160 + 7 * 16 + 8 * 8  # the prompt's full blocks once, then tails
    again = llm.generate([prompt], SamplingParams(max_tokens=8, n=8, seed=4, ignore_eos=True))[0]
    assert [s.token_ids for s in again.samples] == [s.token_ids for s in out.samples]


def test_unseeded_requests_differ_and_an_engine_seed_repeats_them(llama_folder):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    first = [o.token_ids for o in LLM(llama_folder, seed=9).generate(["Once", "Once"], params)]
    second = [o.token_ids for o in LLM(llama_folder, seed=9).generate(["Once", "Once"], params)]
    assert first == second
    assert first[0] != first[1]


def test_max_tokens_beyond_what_fits_ends_with_length(llama_folder):
    llm = LLM(llama_folder, kv_blocks=4)
    assert llm.settings.max_model_len == 64
    out = llm.generate([list(range(3, 53))], SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True))[0]
    assert out.finish_reason == "length"
    assert len(out.prompt_token_ids) + len(out.token_ids) == 64


def test_timeline_and_stats(llm):
    out = llm.generate("Once upon a time", GREEDY)[0]
    t = out.timeline
    assert t.e2e == pytest.approx(t.queue + t.prefill + t.decode)
    assert len(t.itl) == 15
    assert t.tpot == pytest.approx(sum(t.itl) / 15)
    assert t.chunks == 1
    names = "blocks_total blocks_free blocks_cached prompt_tokens cached_tokens output_tokens steps preemptions"
    assert {*names.split(), "recomputed_tokens"} <= set(llm.stats())


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        ("", "empty"),
        ([[]], "empty"),
        ([[1, 400]], "vocabulary"),
        ([[-1]], "vocabulary"),
        ([list(range(3)) * 300], "shorten"),
        ([[1.5]], "token ids"),
        ([None], "prompt"),
        (5, "prompts"),
        ([True], "prompt"),
    ],
)
def test_bad_prompts_are_refused_and_the_engine_stays_usable(llm, prompt, word):
    with pytest.raises(InputError, match=word):
        llm.generate(prompt, GREEDY)
    assert llm.engine.core.idle
    assert llm.generate("Once", GREEDY)[0].finish_reason == "length"


def test_bad_params_refuse_the_whole_call(llm):
    with pytest.raises(InputError, match="logit_bias"):
        llm.generate(["a", "b"], [GREEDY, SamplingParams(logit_bias={5000: 1.0})])
    with pytest.raises(InputError, match="one for each"):
        llm.generate(["a", "b"], [GREEDY])
    assert llm.engine.core.idle


def test_unknown_settings_name_the_nearest(llama_folder):
    with pytest.raises(ConfigError, match="kv_dtype"):
        LLM(llama_folder, kv_dtyp="int8")
    with pytest.raises(ModelError, match="smollm2"):
        LLM("smollm2-135n")


def test_a_model_without_template_says_so(llama_folder, tmp_path):
    for file in llama_folder.iterdir():
        if file.name != "tokenizer_config.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(InputError, match="generate"):
        LLM(tmp_path).chat([{"role": "user", "content": "Hi"}])


def test_every_sampling_parameter_together(llm):
    params = SamplingParams(
        max_tokens=12,
        min_tokens=4,
        temperature=0.9,
        top_k=50,
        top_p=0.95,
        min_p=0.01,
        seed=1,
        stop=["zzzz"],
        stop_token_ids=[5],
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        logit_bias={7: 2.0, 8: -100.0},
        logprobs=2,
        prompt_logprobs=1,
        n=2,
        priority=1,
        deadline=5.0,
    )
    first, second = llm.generate(["Once upon", "Once upon"], params)
    assert [s.token_ids for s in first.samples] == [s.token_ids for s in second.samples]
    assert all(8 not in s.token_ids and len(s.token_ids) >= 4 for s in first.samples)


def test_a_closed_model_is_refused_and_leaves_no_process(llama_folder):
    with LLM(llama_folder) as llm:
        assert llm.chat([{"role": "user", "content": "hi"}], GREEDY).error is None
        grammar = SamplingParams(max_tokens=4, temperature=0, grammar=Grammar("regex", "a+"))
        llm.generate("Once", grammar)
        children = [llm.tokenizer.chat._process, llm.engine.intake.grammars.checker.process]
        assert all(child._child is not None for child in children)
    assert all(child._child is None for child in children)
    with pytest.raises(InputError, match="closed"):
        llm.generate("Once", GREEDY)
    llm.close()


def test_roles_are_those_of_the_server(llm):
    with pytest.raises(InputError, match=r"messages\[1\].role: must be one of system, developer, user"):
        llm.chat([{"role": "user", "content": "hi"}, {"role": "king", "content": "hi"}])
    turns = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    same = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert llm.chat(turns, GREEDY).prompt_token_ids == llm.chat(same, GREEDY).prompt_token_ids


def test_the_error_of_an_answer(llm):
    class BrokenError(Exception):
        pass

    runner, real = llm.engine.core.runner, llm.engine.core.runner.launch

    def launch(plan):
        raise BrokenError("on purpose")

    runner.launch = launch
    try:
        out = llm.generate("Once", GREEDY)[0]
    finally:
        runner.launch = real
    assert out.finish_reason == "error" and "on purpose" in out.error
    assert llm.generate("Once", GREEDY)[0].error is None


def test_how_a_model_samples_by_itself(llama_folder, tmp_path):
    """Its generation config decides where the caller sets no temperature; a small model gets a light penalty."""
    folder = tmp_path / "own"
    shutil.copytree(llama_folder, folder)
    written = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(written | {"temperature": 0.5, "top_k": 7}))
    with LLM(folder, seed=3) as llm:
        intake = llm.engine.intake
        assert intake.defaults == {"temperature": 0.5, "top_k": 7, "repetition_penalty": 1.1}

        def made(**given):
            return intake.requests([1, 2], SamplingParams(**given), 0.0)[0].params

        assert made(max_tokens=3) == SamplingParams(max_tokens=3, temperature=0.5, top_k=7, repetition_penalty=1.1)
        assert made(top_k=2) == SamplingParams(temperature=0.5, top_k=2, repetition_penalty=1.1)
        for chosen in (0, 0.9):
            assert made(temperature=chosen) == SamplingParams(temperature=chosen)
        messages = [{"role": "user", "content": "hi"}]
        assert llm.chat(messages, SamplingParams(seed=1)).token_ids == llm.chat(
            messages, SamplingParams(seed=1, temperature=0.5, top_k=7, repetition_penalty=1.1)
        ).token_ids  # fmt: skip
