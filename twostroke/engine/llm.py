"""`LLM`: load a model in this process and ask it, from Python."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from twostroke.config import make_config
from twostroke.embed.description import is_embedder_at
from twostroke.engine.answer import Answer, Output, StreamEvent
from twostroke.engine.build import Engine, build_engine
from twostroke.engine.chat_form import AS_WRITTEN, ChatForm, chat_form
from twostroke.engine.intake import Prompt
from twostroke.engine.interrupt import interrupt_deferred
from twostroke.engine.several import as_list, params_for
from twostroke.engine.vectors import VectorMethods
from twostroke.errors import InputError
from twostroke.sampling import SamplingParams
from twostroke.text.conversation import render_conversation
from twostroke.types import Event, TokenLogprobs
from twostroke.weights.checkpoint import locate
from twostroke.weights.files import OnProgress

ChatMessages = Sequence[Mapping[str, Any]]
DEFAULT_MODEL = "smollm2-135m"


class Job:
    """The n samples of one prompt, under way."""

    def __init__(self, tokens: list[int], answers: list[Answer], wants_prompt_logprobs: bool):
        self.tokens = tokens
        self.answers = answers
        self.pieces: deque[StreamEvent] = deque()
        self.prompt_logprobs: dict[int, TokenLogprobs] | None = {} if wants_prompt_logprobs else None

    @property
    def finished(self) -> bool:
        return all(answer.finished for answer in self.answers)

    def output(self) -> Output:
        scores: list[TokenLogprobs | None] | None = None
        if self.prompt_logprobs is not None:
            scores = [self.prompt_logprobs.get(position) for position in range(len(self.tokens))]
        return Output(self.tokens, [answer.sample for answer in self.answers], scores)


class LLM(VectorMethods):
    """A model with its engine.

    `model` is a catalog name, a folder with safetensors, a .gguf file or a hub id. Every setting is optional and
    derived when absent: `llm.settings.reasons` says why. Calls from several threads share the engine's batches.
    `close()`, or a `with` block, gives the memory back.

    `ahead`: on a GPU, compile every kernel that steps can meet before the first request, as a server does. Else the
    kernels of a prompt and its stream are compiled, for a first token sooner, and the others when they are met.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        download_progress: OnProgress | None = None,
        load_progress: OnProgress | None = None,
        ahead: bool = False,
        **settings: Any,
    ):
        config, path = make_config(**settings), locate(model, download_progress)
        if is_embedder_at(path):
            from twostroke.embed.embedder import open_embedder  # a model that writes does not wait for its import

            self._embedder = open_embedder(path, settings)
            return
        self._engine = build_engine(path, config, load_progress=load_progress, ahead=ahead)
        self.settings = self.engine.settings
        self.tokenizer = self.engine.tokenizer
        self.arch = self.engine.arch
        self._lock = threading.Lock()
        self._answers: dict[int, tuple[Job, Answer]] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Output]:
        """Answers to all prompts, batched together. One SamplingParams for all, or one for each."""
        many = as_list(prompts)
        return self._run([self.engine.intake.tokenize(prompt) for prompt in many], params)

    def chat(
        self,
        messages: ChatMessages | Sequence[ChatMessages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_arguments: Any,
    ) -> Output | list[Output]:
        """The answer to one conversation, or a list of answers to a list of conversations.

        Of a model that writes its reasoning first (in a channel, as gpt-oss, or between <think> and </think>) the text
        is the answer, and `reasoning` what came before it. With `tools` its text has all channels and marks:
        `text.parse.StreamParser` reads calls from it.
        """
        single = not messages or isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if single else messages
        prompts = [self._render(c, template_arguments) for c in conversations]
        outputs = self._run(prompts, params, chat_form(self.tokenizer, bool(template_arguments.get("tools"))))
        return outputs[0] if single else outputs

    def stream(self, prompt: Prompt | ChatMessages, params: SamplingParams | None = None) -> Iterator[StreamEvent]:
        """Pieces of the answer as they are written; a list of messages is a chat. Closing the iterator aborts it."""
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            tokens, form = self._render(cast(ChatMessages, prompt), {}), chat_form(self.tokenizer, tools=False)
        else:
            tokens, form = self.engine.intake.tokenize(cast(Prompt, prompt)), AS_WRITTEN
        params = params or SamplingParams()
        self.engine.intake.prepare(params)
        return self._pieces(self._submit(tokens, params, form))

    def close(self) -> None:
        """End what is under way and the child processes, and give the model's memory back. Any later call is refused.
        Closing twice does nothing."""
        if self._closed or self._embedder_closed():
            return
        with self._lock:
            jobs = [job for job, _ in self._answers.values()]
        self._abort(jobs)
        self._closed = True
        if self.tokenizer.chat is not None:
            self.tokenizer.chat.close()
        self._engine.intake.grammars.close()
        if self._engine.ranks is not None:
            self._engine.ranks.close()
        del self._engine

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def engine(self) -> Engine:
        if self._closed:
            raise InputError("this LLM is closed: open another one.")
        if self._embedder is not None:
            raise InputError("this model makes vectors and writes no text: use embed() or rank().")
        return self._engine

    def stats(self) -> dict[str, int]:
        """Totals since the start, and the requests and KV blocks now."""
        counts = self.engine.core.counts()._asdict()
        del counts["accepted_at"]  # a number for each place of a draft
        return counts

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _render(self, messages: ChatMessages, arguments: Mapping[str, Any]) -> list[int]:
        template = self.engine.tokenizer.chat
        if template is None:
            raise InputError("this model has no chat template: use generate() with a plain prompt.")
        text = render_conversation(template, list(messages), **arguments)
        return self.engine.intake.tokenize(text, add_special=False)

    def _run(
        self,
        prompts: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        form: ChatForm = AS_WRITTEN,
    ) -> list[Output]:
        each = params_for(params, len(prompts))
        for one in each:
            self.engine.intake.prepare(one)  # refuse the whole call before any of it runs
        jobs: list[Job] = []
        try:
            for tokens, one in zip(prompts, each, strict=True):
                jobs.append(self._submit(tokens, one, form))
            with interrupt_deferred() as interrupt:  # once for all steps: a handler takes microseconds to set
                while not all([job.finished for job in jobs]):  # noqa: C419 - a list is faster here
                    self._pump()
                    interrupt.deliver()
        finally:
            self._abort(jobs)
        return [job.output() for job in jobs]

    def _pieces(self, job: Job) -> Iterator[StreamEvent]:
        try:
            while job.pieces or not job.finished:
                if job.pieces:
                    yield job.pieces.popleft()
                else:
                    with interrupt_deferred():
                        self._pump()
        finally:
            self._abort([job])

    def _submit(self, tokens: list[int], params: SamplingParams, form: ChatForm = AS_WRITTEN) -> Job:
        with self._lock:
            core = self.engine.core
            requests = self.engine.intake.requests(tokens, params, core.clock())
            constrained = params.grammar is not None
            answers = [Answer(r, self.tokenizer, form.visible, form.division(tokens, constrained)) for r in requests]
            job = Job(tokens, answers, params.prompt_logprobs is not None)
            for request, answer in zip(requests, job.answers, strict=True):
                self._answers[request.id] = (job, answer)
                core.submit(request)
            return job

    def _pump(self) -> None:
        """One step of the engine; its events go to the jobs that wait for them."""
        with self._lock:
            for event in self.engine.core.step():
                self._deliver(event)

    def _deliver(self, event: Event) -> None:
        core = self.engine.core
        job, answer = self._answers[event.request_id]
        if job.prompt_logprobs is not None and event.prompt_logprobs:
            job.prompt_logprobs.update(event.prompt_logprobs)
        job.pieces.append(answer.push(event, core.collected))
        if answer.finished:
            core.abort(event.request_id)  # a stop string ended it; otherwise the core has ended it already
            del self._answers[event.request_id]

    def _abort(self, jobs: list[Job]) -> None:
        with self._lock, interrupt_deferred():
            for job in jobs:
                for answer in job.answers:
                    event = self.engine.core.abort(answer.request.id) if not answer.finished else None
                    if event is not None:
                        self._deliver(event)
