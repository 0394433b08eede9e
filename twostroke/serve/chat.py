"""/v1/chat/completions."""

from __future__ import annotations

from typing import Any

from twostroke.remote.stream import Piece
from twostroke.serve import stream
from twostroke.serve.constrain import bind, grammar_field
from twostroke.serve.errors import ApiError
from twostroke.serve.http import Call
from twostroke.serve.protocol import answers, chat, problems
from twostroke.serve.protocol.base import validate
from twostroke.serve.protocol.chat import ChatRequest
from twostroke.serve.reading import CONTENT, REASONING, Part
from twostroke.serve.service import Ask, Generation, Service

CONTENT_ONLY = {"content"}


async def handle(service: Service, call: Call) -> None:
    request = validate(ChatRequest, await call.body())
    service.check_model(request.model)
    binding = bind(service.engine.tokenizer, request)
    params = request.to_params(grammar=binding.grammar)
    messages = [message.plain() for message in request.messages]
    text, tokens = await service.render(messages, tools=binding.tools, **request.template_arguments())
    ask = Ask([tokens], params, request.explain, binding, text, grammar_field(request))
    generation = await service.generate(call, ask, request.user)
    if request.stream:
        await stream.send(generation, ChatWriter(generation, request))
        return
    await generation.finish()
    await call.respond(200, whole(generation), generation.headers())


def whole(generation: Generation) -> dict[str, Any]:
    service = generation.service
    choices = []
    for index, (answer, reader) in enumerate(zip(generation.stream.answers, generation.readers, strict=True)):
        sample = answer.sample
        scores = None if sample.logprobs is None else answers.chat_logprobs(service.engine.tokenizer, sample.logprobs)
        calls = [chat.call(block.id, block.name, block.text) for block in reader.calls]
        message = chat.message(reader.text(CONTENT), reader.text(REASONING), calls)
        choice = chat.choice(index, message, reader.reason(sample.finish_reason), scores)
        choices.append(choice | generation.choice_extras(index))
    document = chat.completion(service.head("chatcmpl-"), choices, generation.usage())
    return document | generation.extras()


def delta_of(part: Part) -> dict[str, Any]:
    if part.block.kind == CONTENT:
        return {"content": part.text}
    if part.block.kind == REASONING:
        return {"reasoning_content": part.text}
    call: dict[str, Any] = {"index": part.block.number, "function": {"arguments": part.text}}
    if part.opens:
        call = {"index": part.block.number, **chat.call(part.block.id, part.block.name, part.text)}
    return {"tool_calls": [call]}


class ChatWriter(stream.Writer):
    def __init__(self, generation: Generation, request: ChatRequest):
        self.generation = generation
        self.tokenizer = generation.service.engine.tokenizer
        self.head = generation.service.head("chatcmpl-")
        self.include_usage = request.include_usage
        self.begun: set[int] = set()
        self.forms = stream.Forms(self._plain)

    def begin(self) -> bytes:
        return b""

    def text(self, choice: int, text: str) -> bytes:
        reader = self.generation.readers[choice]
        if reader.plain and choice in self.begun:
            reader.add(text)
            return self.forms.fill(choice, text) if text else b""
        return super().text(choice, text)

    def piece(self, piece: Piece) -> bytes:
        event, choice = piece.event, piece.choice
        reader = self.generation.readers[choice]
        scores = None if event.logprobs is None else answers.chat_logprobs(self.tokenizer, event.logprobs)
        deltas = [delta_of(part) for part in reader.push(event)]
        if scores and not deltas:
            deltas = [{"content": ""}]
        if not deltas and event.finish_reason is None:
            return b""  # half a character, or text that may yet become a call
        written = b""
        if choice not in self.begun:
            self.begun.add(choice)
            written = self._chunk([chat.delta(choice, {"role": "assistant", "content": ""})])
        for delta in deltas:
            if scores is None and delta.keys() == CONTENT_ONLY:
                written += self.forms.fill(choice, delta["content"])
                continue
            written += self._chunk([chat.delta(choice, delta, None, scores)])
            scores = None if scores is None else []
        if event.finish_reason is not None:
            extras = self.generation.extras(choice)
            written += self._chunk([chat.delta(choice, {}, reader.reason(event.finish_reason))], extras)
        return written

    def _plain(self, choice: int, text: str) -> bytes:
        return self._chunk([chat.delta(choice, {"content": text})])

    def _chunk(self, choices: list[dict[str, Any]], extras: dict[str, Any] | None = None) -> bytes:
        document = chat.chunk(self.head, choices)
        if self.include_usage:
            document["usage"] = None
        return stream.data(document | extras if extras else document)

    def end(self) -> bytes:
        if not self.include_usage:
            return stream.DONE
        return stream.data(chat.chunk(self.head, []) | {"usage": self.generation.usage()}) + stream.DONE

    def problem(self, error: ApiError) -> bytes:
        return stream.data(problems.openai_error(error)) + stream.DONE
