"""/v1/messages and /v1/messages/count_tokens: Anthropic's API over the same engine."""

from __future__ import annotations

import json
import secrets
from typing import Any

from twostroke.remote.stream import Piece
from twostroke.serve.constrain import Binding, bind
from twostroke.serve.errors import ApiError
from twostroke.serve.http import Call
from twostroke.serve.protocol import anthropic, problems
from twostroke.serve.protocol.anthropic import Conversation, CountTokensRequest, MessagesRequest
from twostroke.serve.protocol.base import validate
from twostroke.serve.reading import CALL, CONTENT, Block, Part
from twostroke.serve.service import Ask, Generation, Service
from twostroke.serve.stream import Writer, send
from twostroke.serve.stream import event as sse


async def handle(service: Service, call: Call) -> None:
    request = validate(MessagesRequest, await call.body())
    text, tokens, binding = await read(service, request)
    params = request.to_params(grammar=binding.grammar)
    explain = request.prefix_cache is not None and request.prefix_cache.explain
    user = request.metadata.user_id if request.metadata is not None else None
    generation = await service.generate(call, Ask([tokens], params, explain, binding, text, "tools"), user)
    if request.stream:
        await send(generation, MessageWriter(generation))
        return
    await generation.finish()
    await call.respond(200, whole(generation), generation.headers())


async def count_tokens(service: Service, call: Call) -> None:
    request = validate(CountTokensRequest, await call.body())
    _, tokens, _ = await read(service, request)
    await call.respond(200, {"input_tokens": len(tokens)})


async def read(service: Service, request: Conversation) -> tuple[str, list[int], Binding]:
    service.check_model(request.model)
    binding = bind(service.engine.tokenizer, request.constraints())
    text, tokens = await service.render(request.plain(), tools=binding.tools)
    return text, tokens, binding


def whole(generation: Generation) -> dict[str, Any]:
    reader = generation.readers[0]
    blocks = [written_block(block) for block in reader.blocks] or [anthropic.text_block("")]
    reason, stop = ending(generation)
    head = (f"msg_{secrets.token_hex(12)}", generation.service.name)
    return anthropic.message(*head, blocks, reason, stop, used(generation)) | generation.extras()


def written_block(block: Block) -> dict[str, Any]:
    if block.kind == CONTENT:
        return anthropic.text_block(block.text)
    if block.kind != CALL:
        return anthropic.thinking_block(block.text)
    try:
        arguments = json.loads(block.text)
    except ValueError:
        arguments = {}  # cut short by max_tokens: stop_reason says so
    return anthropic.tool_block(block.id, block.name, arguments)


def ending(generation: Generation) -> tuple[str, str | None]:
    """Why the answer ended, and the stop sequence if one did it."""
    answer, reader = generation.stream.answers[0], generation.readers[0]
    reason = reader.reason(answer.sample.finish_reason)
    if reason == "tool_calls":
        return "tool_use", None
    stop = answer.stops.push("")[1] if answer.stops is not None and reason == "stop" else None
    return ("stop_sequence", stop) if stop else (anthropic.STOP_REASONS[reason or "stop"], None)


def used(generation: Generation) -> dict[str, Any]:
    sample = generation.stream.answers[0].sample
    return anthropic.usage(len(generation.stream.prompts[0]), sample.timeline.cached_tokens, len(sample.token_ids))


class MessageWriter(Writer):
    """Blocks one after the other, each opened, filled and closed."""

    def __init__(self, generation: Generation):
        self.generation = generation
        self.begun = False
        self.open = False
        self.index = -1

    def begin(self) -> bytes:
        return b""

    def piece(self, piece: Piece) -> bytes:
        parts = self.generation.readers[0].push(piece.event)
        written = b"" if self.begun else self._start()
        for part in parts:
            if part.opens:
                written += self._close() + self._open(part)
            if part.text:
                written += sse("content_block_delta", self._delta(part))
        return written

    def _start(self) -> bytes:
        """With the first token: by then it is known how much of the prompt was cached."""
        self.begun = True
        head = (f"msg_{secrets.token_hex(12)}", self.generation.service.name)
        document = anthropic.message(*head, [], None, None, used(self.generation))
        return sse("message_start", {"type": "message_start", "message": document})

    def _open(self, part: Part) -> bytes:
        self.index += 1
        self.open = True
        if part.block.kind == CONTENT:
            block = anthropic.text_block("")
        elif part.block.kind == CALL:
            block = anthropic.tool_block(part.block.id, part.block.name, {})
        else:
            block = anthropic.thinking_block("")
        return sse("content_block_start", anthropic.block_start(self.index, block))

    def _delta(self, part: Part) -> dict[str, Any]:
        if part.block.kind == CONTENT:
            return anthropic.block_delta(self.index, "text_delta", "text", part.text)
        if part.block.kind == CALL:
            return anthropic.block_delta(self.index, "input_json_delta", "partial_json", part.text)
        return anthropic.block_delta(self.index, "thinking_delta", "thinking", part.text)

    def _close(self) -> bytes:
        if not self.open:
            return b""
        self.open = False
        return sse("content_block_stop", anthropic.block_stop(self.index))

    def end(self) -> bytes:
        document = anthropic.message_delta(*ending(self.generation), used(self.generation)) | self.generation.extras()
        return self._close() + sse("message_delta", document) + sse("message_stop", {"type": "message_stop"})

    def problem(self, error: ApiError) -> bytes:
        return sse("error", problems.anthropic_error(error))
