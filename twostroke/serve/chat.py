"""/v1/chat/completions."""

from __future__ import annotations

from typing import Any

from twostroke.engine.aio import Piece
from twostroke.serve import stream
from twostroke.serve.constrain import refuse_unwired
from twostroke.serve.errors import ApiError
from twostroke.serve.http import Call
from twostroke.serve.protocol import answers, chat, problems
from twostroke.serve.protocol.base import validate
from twostroke.serve.protocol.chat import ChatRequest
from twostroke.serve.service import Generation, Service


async def handle(service: Service, call: Call) -> None:
    request = validate(ChatRequest, await call.body())
    service.check_model(request.model)
    refuse_unwired(request)
    params = request.to_params()
    tokens = await service.render([message.plain() for message in request.messages], **request.template_arguments())
    generation = service.generate(call, [tokens], params, request.explain)
    if request.stream:
        await stream.send(generation, ChatWriter(generation, request))
        return
    await generation.finish()
    await call.respond(200, whole(generation), generation.headers())


def whole(generation: Generation) -> dict[str, Any]:
    service = generation.service
    choices = []
    for index, answer in enumerate(generation.stream.answers):
        sample = answer.sample
        scores = None if sample.logprobs is None else answers.chat_logprobs(service.engine.tokenizer, sample.logprobs)
        choice = chat.choice(index, sample.text, sample.finish_reason, scores)
        choices.append(choice | generation.choice_extras(index))
    document = chat.completion(service.head("chatcmpl-"), choices, generation.usage())
    return document | generation.extras()


class ChatWriter:
    def __init__(self, generation: Generation, request: ChatRequest):
        self.generation = generation
        self.tokenizer = generation.service.engine.tokenizer
        self.head = generation.service.head("chatcmpl-")
        self.include_usage = request.include_usage
        self.begun: set[int] = set()

    def begin(self) -> bytes:
        return b""

    def piece(self, piece: Piece) -> bytes:
        event = piece.event
        scores = None if event.logprobs is None else answers.chat_logprobs(self.tokenizer, event.logprobs)
        if not event.text and not scores and event.finish_reason is None:
            return b""  # half a character
        written = b""
        if piece.choice not in self.begun:
            self.begun.add(piece.choice)
            written = self._chunk([chat.delta(piece.choice, {"role": "assistant", "content": ""})])
        if event.text or scores:
            written += self._chunk([chat.delta(piece.choice, {"content": event.text}, None, scores)])
        if event.finish_reason is not None:
            extras = self.generation.extras(piece.choice)
            written += self._chunk([chat.delta(piece.choice, {}, event.finish_reason)], extras)
        return written

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
