"""/v1/responses: OpenAI's newer API. Nothing is stored, so nothing earlier can be referred to."""

from __future__ import annotations

import secrets
from typing import Any

from twostroke.remote.stream import Piece
from twostroke.serve.constrain import bind
from twostroke.serve.errors import ApiError
from twostroke.serve.http import Call
from twostroke.serve.protocol import answers, responses
from twostroke.serve.protocol.base import validate
from twostroke.serve.protocol.responses import ResponsesRequest
from twostroke.serve.reading import CALL, CONTENT, Block, Part
from twostroke.serve.service import Ask, Generation, Service
from twostroke.serve.stream import Writer, send
from twostroke.serve.stream import event as sse


async def handle(service: Service, call: Call) -> None:
    request = validate(ResponsesRequest, await call.body())
    service.check_model(request.model)
    constraints = request.constraints()
    binding = bind(service.engine.tokenizer, constraints)
    params = request.to_params(grammar=binding.grammar)
    text, tokens = await service.render(request.plain(), tools=binding.tools)
    explain = request.prefix_cache is not None and request.prefix_cache.explain
    field = "tools" if constraints.response_format is None else "text.format"
    generation = await service.generate(call, Ask([tokens], params, explain, binding, text, field), request.user)
    writer = ResponseWriter(generation, request)
    if request.stream:
        await send(generation, writer)
        return
    await generation.finish()
    await call.respond(200, writer.finished(), generation.headers())


class ResponseWriter(Writer):
    """Items one after the other; the last event carries the whole response."""

    def __init__(self, generation: Generation, request: ResponsesRequest):
        self.generation = generation
        self.request = request
        head = generation.service.head("resp_")
        self.begun = responses.response(head["id"], head["model"], head["created"], request)
        self.ids: list[str] = []  # of the items
        self.index = -1  # of the newest item
        self.open: Block | None = None
        self.sequence = 0

    def begin(self) -> bytes:
        started = self._event("response.created", response=self.begun)
        return started + self._event("response.in_progress", response=self.begun)

    def piece(self, piece: Piece) -> bytes:
        written = b""
        scores = self._scores(piece.event.logprobs)
        for part in self.generation.readers[0].push(piece.event):
            if part.opens:
                written += self._close() + self._open(part.block)
            written += self._more(part, scores)
            scores = []
        return written

    def end(self) -> bytes:
        document = self.finished()
        return self._close() + self._event(f"response.{document['status']}", response=document)

    def problem(self, error: ApiError) -> bytes:
        return self._event("response.failed", response=responses.failed(self.begun, error.code, error.message))

    def finished(self) -> dict[str, Any]:
        """The whole response: what non-streaming answers with."""
        sample, reader = self.generation.stream.answers[0].sample, self.generation.readers[0]
        cut = sample.finish_reason == "length"
        last = reader.blocks[-1] if reader.blocks else None
        output = []
        for index, block in enumerate(reader.blocks):
            scores = self._scores(sample.logprobs) if block.kind == CONTENT else []
            output.append(self._item(index, block, "incomplete" if cut and block is last else "completed", scores))
        used = responses.usage(
            len(self.generation.stream.prompts[0]), sample.timeline.cached_tokens, len(sample.token_ids)
        )
        document = responses.finished(self.begun, output, sample.finish_reason or "stop", used)
        return document | self.generation.extras()

    # ---- items -----------------------------------------------------------------------------------------------------

    def _item(self, index: int, block: Block, status: str, scores: list[dict[str, Any]]) -> dict[str, Any]:
        number = self._id(index, block)
        if block.kind == CONTENT:
            return responses.message_item(number, status, [responses.text_part(block.text, scores)])
        if block.kind == CALL:
            return responses.call_item(number, block.id, status, block.name, block.text)
        return responses.reasoning_item(number, block.text)

    def _id(self, index: int, block: Block) -> str:
        prefix = {CONTENT: "msg_", CALL: "fc_"}.get(block.kind, "rs_")
        while len(self.ids) <= index:
            self.ids.append(prefix + secrets.token_hex(12))
        return self.ids[index]

    def _scores(self, logprobs: Any) -> list[dict[str, Any]]:
        return answers.chat_logprobs(self.generation.service.engine.tokenizer, logprobs) if logprobs else []

    # ---- events ----------------------------------------------------------------------------------------------------

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        document = {"type": kind, "sequence_number": self.sequence, **fields}
        self.sequence += 1
        return sse(kind, document)

    def _place(self) -> dict[str, Any]:
        assert self.open is not None
        return {"item_id": self._id(self.index, self.open), "output_index": self.index}

    def _open(self, block: Block) -> bytes:
        self.index += 1
        self.open = block
        empty = Block(block.kind, "", block.number, block.id, block.name)
        item = self._item(self.index, empty, "in_progress", [])
        if block.kind != CONTENT:
            return self._event("response.output_item.added", output_index=self.index, item=item)
        written = self._event("response.output_item.added", output_index=self.index, item=item | {"content": []})
        part = responses.text_part("", [])
        return written + self._event("response.content_part.added", **self._place(), content_index=0, part=part)

    def _more(self, part: Part, scores: list[dict[str, Any]]) -> bytes:
        if not part.text:
            return b""
        if part.block.kind == CONTENT:
            more = {"content_index": 0, "delta": part.text, "logprobs": scores}
            return self._event("response.output_text.delta", **self._place(), **more)
        if part.block.kind == CALL:
            return self._event("response.function_call_arguments.delta", **self._place(), delta=part.text)
        return self._event("response.reasoning_text.delta", **self._place(), content_index=0, delta=part.text)

    def _close(self) -> bytes:
        block = self.open
        if block is None:
            return b""
        place = self._place()
        if block.kind == CONTENT:
            whole = responses.text_part(block.text, [])
            written = self._event("response.output_text.done", **place, content_index=0, text=block.text, logprobs=[])
            written += self._event("response.content_part.done", **place, content_index=0, part=whole)
        elif block.kind == CALL:
            more = {"arguments": block.text, "name": block.name}
            written = self._event("response.function_call_arguments.done", **place, **more)
        else:
            written = self._event("response.reasoning_text.done", **place, content_index=0, text=block.text)
        item = self._item(self.index, block, "completed", [])
        self.open = None
        return written + self._event("response.output_item.done", output_index=self.index, item=item)
