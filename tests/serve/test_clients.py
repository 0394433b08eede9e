"""The real clients: what people have installed must work unchanged."""

from __future__ import annotations

import anthropic
import openai
import pytest

from tests.serve.server import KEY, PATIENT, Server

MESSAGES = [{"role": "user", "content": "Tell me about the lazy dog."}]
GREEDY = {"extra_body": {"temperature": 0}}  # newer versions of the client have no such argument of their own


@pytest.fixture
def ai(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=PATIENT)


@pytest.fixture
def claude(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=PATIENT)


def test_models(ai: openai.OpenAI, server: Server) -> None:
    assert [model.id for model in ai.models.list()] == [server.model]
    assert ai.models.retrieve(server.model).id == server.model


def test_chat_is_the_fold_of_its_stream(ai: openai.OpenAI, server: Server) -> None:
    settings = {"model": server.model, "messages": MESSAGES, "max_completion_tokens": 12, "temperature": 0}
    whole = ai.chat.completions.create(**settings)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    chunks = list(ai.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


def test_chat_several_samples(ai: openai.OpenAI, server: Server) -> None:
    settings = {"model": server.model, "messages": MESSAGES, "max_tokens": 8, "n": 3, "seed": 7, "temperature": 1.0}
    whole = ai.chat.completions.create(**settings)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    streamed = ["", "", ""]
    for chunk in ai.chat.completions.create(**settings, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_chat_logprobs(ai: openai.OpenAI, server: Server) -> None:
    settings = {"model": server.model, "messages": MESSAGES, "max_tokens": 5, "temperature": 0}
    whole = ai.chat.completions.create(**settings, logprobs=True, top_logprobs=3)
    scores = whole.choices[0].logprobs.content
    assert len(scores) == 5
    for score in scores:
        assert score.logprob <= 0 and len(score.top_logprobs) == 3
        assert score.top_logprobs[0].logprob == pytest.approx(score.logprob)  # greedy takes the likeliest
    chunks = ai.chat.completions.create(**settings, logprobs=True, top_logprobs=3, stream=True)
    streamed = [s for c in chunks if c.choices and c.choices[0].logprobs for s in c.choices[0].logprobs.content]
    assert [s.token for s in streamed] == [s.token for s in scores]


def test_completions(ai: openai.OpenAI, server: Server) -> None:
    settings = {"model": server.model, "prompt": ["Once upon", "The quick"], "max_tokens": 6, "temperature": 0, "n": 2}
    whole = ai.completions.create(**settings)
    assert len(whole.choices) == 4
    texts = [choice.text for choice in whole.choices]
    assert texts[0] == texts[1] and texts[2] == texts[3]
    streamed = [""] * 4
    for chunk in ai.completions.create(**settings, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_completions_echo_with_scores(ai: openai.OpenAI, server: Server) -> None:
    settings = {"model": server.model, "prompt": "Once upon a time", "max_tokens": 0, "echo": True, "logprobs": 1}
    whole = ai.completions.create(**settings)
    choice = whole.choices[0]
    assert choice.text == "Once upon a time"
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in choice.logprobs.token_logprobs[1:])
    assert "".join(choice.logprobs.tokens) == choice.text
    assert whole.usage.completion_tokens == 0
    streamed = [chunk.choices[0] for chunk in ai.completions.create(**settings, stream=True)]
    assert "".join(choice.text for choice in streamed) == choice.text
    tokens = [token for one in streamed if one.logprobs for token in one.logprobs.tokens]
    assert tokens == choice.logprobs.tokens


def test_stop_and_bias(ai: openai.OpenAI, server: Server) -> None:
    plain = {"model": server.model, "prompt": "Once", "max_tokens": 20, "temperature": 0}
    text = ai.completions.create(**plain, logit_bias={"65": 100}).choices[0].text  # a letter, twenty times
    assert len(set(text)) == 1 and len(text) == 20
    stopped = ai.completions.create(**plain, logit_bias={"65": 100}, stop=[text[:5]])
    assert stopped.choices[0].text == "" and stopped.choices[0].finish_reason == "stop"
    assert stopped.usage.completion_tokens == 5


def test_seed_repeats(ai: openai.OpenAI, server: Server) -> None:
    def ask(seed: int) -> str:
        settings = {"model": server.model, "messages": MESSAGES, "max_tokens": 16}
        return ai.chat.completions.create(**settings, seed=seed).choices[0].message.content

    assert ask(1) == ask(1) != ask(2)


def test_responses(ai: openai.OpenAI, server: Server) -> None:
    settings = {"model": server.model, "input": "Hello", "instructions": "Be brief.", "max_output_tokens": 9}
    whole = ai.responses.create(**settings, temperature=0, store=False, metadata={"a": "b"})
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
    assert whole.output_text and whole.metadata == {"a": "b"}
    assert whole.usage.output_tokens == 9
    events = list(ai.responses.create(**settings, temperature=0, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-1] == "response.incomplete"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_responses_of_a_conversation(ai: openai.OpenAI, server: Server) -> None:
    first = ai.responses.create(model=server.model, input="Hi", max_output_tokens=5, temperature=0)
    history = [{"role": "user", "content": "Hi"}, *first.output, {"role": "user", "content": "More"}]
    again = ai.responses.create(model=server.model, input=history, max_output_tokens=5)
    assert again.usage.input_tokens > first.usage.input_tokens


def test_messages(claude: anthropic.Anthropic, server: Server) -> None:
    settings = {"model": server.model, "max_tokens": 10, "messages": MESSAGES, "system": "Be brief.", **GREEDY}
    whole = claude.messages.create(**settings)
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 10
    with claude.messages.stream(**settings) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == "max_tokens"
    counted = claude.messages.count_tokens(model=server.model, messages=MESSAGES, system="Be brief.")
    used = final.usage
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens


def test_messages_stop_sequence(claude: anthropic.Anthropic, server: Server) -> None:
    settings = {"model": server.model, "max_tokens": 30, "messages": MESSAGES, **GREEDY}
    text = claude.messages.create(**settings).content[0].text
    stop = text[len(text) // 2 :][:3]
    whole = claude.messages.create(**settings, stop_sequences=[stop])
    assert whole.stop_reason == "stop_sequence" and whole.stop_sequence == stop
    assert whole.content[0].text == text[: text.index(stop)]


def test_errors_reach_both_clients(ai: openai.OpenAI, claude: anthropic.Anthropic, server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        ai.chat.completions.create(model=server.model, messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        ai.chat.completions.create(model="another", messages=MESSAGES)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.AuthenticationError):
        ai.with_options(api_key="wrong-key").models.list()
    with pytest.raises(anthropic.BadRequestError) as bad:
        claude.messages.create(model=server.model, max_tokens=0, messages=MESSAGES)
    assert "max_tokens" in str(bad.value)
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(api_key="wrong-key").messages.create(model="x", max_tokens=1, messages=MESSAGES)
