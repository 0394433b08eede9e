"""The server's metrics for Prometheus. Names are vLLM's where the meaning is the same, so its dashboards work; the rest
is under `twostroke:`. docs/metrics.md is the glossary."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from twostroke.metrics.counts import Counts
from twostroke.metrics.histogram import Histogram, Renamed
from twostroke.metrics.timeline import Timeline

TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
PHASES = (0.001, 0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0, 480.0)
LENGTHS = tuple(float(base * 10**power) for power in range(6) for base in (1, 2, 5))
SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0)
STEP_TOKENS = tuple(float(2**power) for power in range(15))


class Metrics:
    """Observes the engine (see remote/observer.py) and counts what the server refuses. What the engine counts itself is
    only kept when it reports, and written out when it is read."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, model: str):
        self.registry = CollectorRegistry()
        self.model = model
        self._now = self._written = Counts()
        self._seconds_now = self._seconds_written = 0.0
        self._gauges()
        self._counters()
        self._histograms()

    def render(self) -> bytes:
        self._write_counts()
        return generate_latest(self.registry)

    # ---- what there is ---------------------------------------------------------------------------------------------

    def _make(self, kind: Any, name: str, text: str, **more: Any) -> Any:
        return kind(name, text, ["model_name"], registry=self.registry, **more).labels(self.model)

    def _gauges(self) -> None:
        self.running = self._make(Gauge, "vllm:num_requests_running", "Samples in the engine's batch.")
        self.waiting = self._make(Gauge, "vllm:num_requests_waiting", "Samples waiting to be scheduled.")
        self.kv_usage = self._make(Gauge, "vllm:kv_cache_usage_perc", "KV blocks held by requests, 0 to 1.")
        self.gpu_usage = self._make(Gauge, "vllm:gpu_cache_usage_perc", "Older name of kv_cache_usage_perc.")
        self.kv_cached = self._make(Gauge, "twostroke:kv_cached_perc", "KV blocks kept for reuse only, 0 to 1.")
        self.kv_host = self._make(Gauge, "twostroke:kv_host_bytes", "Bytes of evicted KV blocks that the host keeps.")
        self.up = self._make(Gauge, "twostroke:engine_up", "1 while the engine makes progress or idles.")

    def _counters(self) -> None:
        self.prompt_tokens = self._make(Counter, "vllm:prompt_tokens", "Prompt tokens of scheduled requests.")
        self.output_tokens = self._make(Counter, "vllm:generation_tokens", "Tokens written.")
        self.queries = self._make(Counter, "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.hits = self._make(Counter, "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.cached = self._make(Counter, "vllm:prompt_tokens_cached", "Prompt tokens that were not computed again.")
        self.preemptions = self._make(Counter, "vllm:num_preemptions", "Times a request had to give its blocks back.")
        self.recomputed = self._make(Counter, "twostroke:recomputed_tokens", "Tokens computed again after that.")
        self.drafts = self._make(Counter, "vllm:spec_decode_num_drafts", "Drafts verified.")
        self.drafted = self._make(Counter, "vllm:spec_decode_num_draft_tokens", "Tokens of drafts.")
        self.accepted = self._make(Counter, "vllm:spec_decode_num_accepted_tokens", "Of these, what the model chose.")
        self._accepted_at = self._labelled(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "These by their place in the draft.", "position"
        )
        self.offloaded = self._make(Counter, "twostroke:kv_blocks_offloaded", "Evicted KV blocks copied to the host.")
        self.restored = self._make(Counter, "twostroke:kv_blocks_restored", "KV blocks copied back from the host.")
        self.steps = self._make(Counter, "twostroke:steps", "Steps of the engine.")
        self.step_seconds = self._make(Counter, "twostroke:step_seconds", "Seconds spent in steps.")
        self.restarts = self._make(Counter, "twostroke:engine_restarts", "Times the engine process was started again.")
        ended = self._labelled("vllm:request_success", "Answers by how they ended.", "finished_reason")
        self._ended = {reason: ended.labels(self.model, reason) for reason in ("stop", "length", "abort", "error")}
        self._refused = self._labelled("twostroke:requests_refused", "Requests refused, by reason.", "reason")

    def _labelled(self, name: str, text: str, label: str) -> Counter:
        return Counter(name, text, ["model_name", label], registry=self.registry)

    def _histograms(self) -> None:
        self.ttft = self._seconds("vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT)
        self.gap = self._seconds("vllm:inter_token_latency_seconds", "Gap between consecutive tokens.", GAPS)
        self.tpot = self._seconds("vllm:request_time_per_output_token_seconds", "Mean gap of one answer.", GAPS)
        self.e2e = self._seconds("vllm:e2e_request_latency_seconds", "Arrival to end.", PHASES)
        self.queue = self._seconds("vllm:request_queue_time_seconds", "Arrival to first scheduled.", PHASES)
        self.prefill = self._seconds("vllm:request_prefill_time_seconds", "First scheduled to first token.", PHASES)
        self.decode = self._seconds("vllm:request_decode_time_seconds", "First token to end.", PHASES)
        self.transfer = self._seconds(
            "twostroke:request_transfer_time_seconds", "KV blocks on their way to another worker.", PHASES
        )
        self.decode_queue = self._seconds(
            "twostroke:request_decode_queue_time_seconds", "Wait there, for a place and the first step.", PHASES
        )
        self.inference = self._seconds("vllm:request_inference_time_seconds", "First scheduled to end.", PHASES)
        self.prompt_length = self._seconds("vllm:request_prompt_tokens", "Prompt tokens of a request.", LENGTHS)
        self.prompt_computed = self._seconds(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens that were computed, not found.", LENGTHS
        )
        self.output_length = self._seconds("vllm:request_generation_tokens", "Tokens of an answer.", LENGTHS)
        self.longest = self._seconds("vllm:request_params_max_tokens", "Longest answer that was asked for.", LENGTHS)
        self.samples = self._seconds("vllm:request_params_n", "Samples of the request that an answer is of.", SAMPLES)
        for other, name in (
            (self.gap, "vllm:time_per_output_token_seconds"),
            (self.output_length, "vllm:request_max_num_generation_tokens"),
        ):
            self.registry.register(Renamed(other, name))
        self.step_tokens = self._seconds("vllm:iteration_tokens_total", "Tokens computed in a step.", STEP_TOKENS)

    def _seconds(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        made = Histogram(name, text, self.model, bounds)
        self.registry.register(made)
        return made

    # ---- what happens ----------------------------------------------------------------------------------------------

    def reported(self, now: Counts, step_seconds: float) -> None:
        last = self._now
        if now.steps < last.steps:  # a new engine process counts from zero
            self._write_counts()
            last = self._written = Counts()
            self._seconds_written = 0.0
        if now.steps != last.steps:
            self.step_tokens.observe(now.computed_tokens - last.computed_tokens)
        self._now, self._seconds_now = now, step_seconds

    def _write_counts(self) -> None:
        last, now = self._written, self._now
        self._written = now
        self.running.set(now.running)
        self.waiting.set(now.waiting)
        held = (now.blocks_total - now.blocks_free - now.blocks_cached) / max(1, now.blocks_total)
        self.kv_usage.set(held)
        self.gpu_usage.set(held)
        self.kv_cached.set(now.blocks_cached / max(1, now.blocks_total))
        self.kv_host.set(now.host_bytes)
        self.offloaded.inc(now.blocks_offloaded - last.blocks_offloaded)
        self.restored.inc(now.blocks_restored - last.blocks_restored)
        self.steps.inc(now.steps - last.steps)
        self.step_seconds.inc(self._seconds_now - self._seconds_written)
        self._seconds_written = self._seconds_now
        self.output_tokens.inc(now.output_tokens - last.output_tokens)
        self.prompt_tokens.inc(now.prompt_tokens - last.prompt_tokens)
        self.queries.inc(now.prompt_tokens - last.prompt_tokens)
        self.hits.inc(now.cached_tokens - last.cached_tokens)
        self.cached.inc(now.cached_tokens - last.cached_tokens)
        self.preemptions.inc(now.preemptions - last.preemptions)
        self.recomputed.inc(now.recomputed_tokens - last.recomputed_tokens)
        self.drafts.inc(now.drafts - last.drafts)
        self.drafted.inc(now.drafted_tokens - last.drafted_tokens)
        self.accepted.inc(now.accepted_tokens - last.accepted_tokens)
        for place, (count, before) in enumerate(zip_longest(now.accepted_at, last.accepted_at, fillvalue=0)):
            self._accepted_at.labels(self.model, str(place)).inc(count - before)

    def lost(self) -> None:
        """The engine process died; it is being started again."""
        self.restarts.inc()
        self._now = self._now._replace(
            running=0, waiting=0, blocks_free=self._now.blocks_total, blocks_cached=0, blocks_on_host=0, host_bytes=0
        )

    def gaps(self, seconds: list[float]) -> None:
        """Since the last token of each answer that got one more."""
        self.gap.observe_all(seconds)

    def tokens(self, timeline: Timeline, count: int) -> None:
        times = timeline.token_times
        if len(times) == count:
            self.ttft.observe(times[0] - timeline.arrival)
            return
        self.gap.observe(times[-count] - times[-count - 1])
        for _ in range(count - 1):
            self.gap.observe(0.0)

    def ended(self, timeline: Timeline, reason: str, params: Any) -> None:
        self._ended[reason].inc()
        self.e2e.observe(timeline.e2e)
        self.queue.observe(timeline.queue)
        if timeline.scheduled is not None:
            self.prefill.observe(timeline.prefill)
            self.decode.observe(timeline.decode)
            self.inference.observe(timeline.prefill + timeline.decode)
        if timeline.transfer or timeline.decode_queue:
            self.transfer.observe(timeline.transfer)
            self.decode_queue.observe(timeline.decode_queue)
        if timeline.tpot is not None:
            self.tpot.observe(timeline.tpot)
        self.prompt_length.observe(timeline.prompt_tokens)
        self.prompt_computed.observe(max(0, timeline.prompt_tokens - timeline.cached_tokens))
        self.output_length.observe(timeline.output_tokens)
        self.samples.observe(params.n)
        if params.max_tokens is not None:
            self.longest.observe(params.max_tokens)

    def configured(self, values: dict[str, Any]) -> None:
        """How the cache is set up, as labels of a gauge that is always 1."""
        text = "How the KV cache is set up."
        info = Gauge("vllm:cache_config_info", text, ["model_name", *values], registry=self.registry)
        info.labels(self.model, *map(str, values.values())).set(1)

    def refused(self, reason: str) -> None:
        self._refused.labels(self.model, reason).inc()
