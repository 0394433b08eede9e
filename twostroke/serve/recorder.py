"""Questions that are recorded for `diagnose`, where the operator switched that on."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from twostroke.answers.topics import Topics
from twostroke.remote.stream import Stream
from twostroke.serve.answering import comparable, context_of

if TYPE_CHECKING:
    from twostroke.serve.service import GenerationInput, Service


class Recorder:
    def __init__(self, topics: Topics):
        self.topics = topics
        self._secret = secrets.token_bytes(32)

    def record(self, service: Service, stream: Stream, given: GenerationInput, salt: bytes) -> None:
        """Questions that a semantic answer cache would compare."""
        question, params = given.question, given.params.with_defaults(service.engine.intake.defaults)
        if question is None or len(stream.answers) != 1 or not comparable(question, params):
            return
        context = context_of(question, given.format.visible, self._secret, salt, service.fingerprint, params)
        self.topics.add_later(stream.answers[0].request.id, context, question.text)
