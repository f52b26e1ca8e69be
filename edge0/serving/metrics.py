"""What Prometheus is told: requests as they end, and the engine's and the process's counters when it asks."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from edge0.serving.completion import Finished
from edge0.serving.refusals import Refusal
from edge0.serving.worker import Worker
from edge0.telemetry.memory import memory_counters

FIRST_TOKEN_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
PER_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2.5, 5)


class Metrics:
    """One server's metrics, in a registry of their own."""

    def __init__(self, worker: Worker):
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "edge0_requests", "Completion requests by how they ended.", ("endpoint", "outcome"), registry=registry
        )
        self.prompt_tokens = Counter("edge0_prompt_tokens", "Prompt tokens of complete answers.", registry=registry)
        self.completion_tokens = Counter(
            "edge0_completion_tokens", "Tokens written in complete answers.", registry=registry
        )
        self.first_token = Histogram(
            "edge0_time_to_first_token_seconds",
            "From the arrival of a request to its first token, waiting included.",
            buckets=FIRST_TOKEN_SECONDS,
            registry=registry,
        )
        self.per_token = Histogram(
            "edge0_seconds_per_token",
            "Mean time of a decode step of an answer.",
            buckets=PER_TOKEN_SECONDS,
            registry=registry,
        )
        registry.register(_EngineCollector(worker))

    def request(self, endpoint: str) -> RequestRecord:
        """A record of a request that arrives now."""
        return RequestRecord(self, endpoint)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)


class RequestRecord:
    """One request, from its arrival to its end, which is what the first call that tells of an end says."""

    def __init__(self, metrics: Metrics, endpoint: str):
        self._metrics, self._endpoint, self._arrived_ns = metrics, endpoint, time.monotonic_ns()
        self._ended = False

    def refused(self, refusal: Refusal) -> None:
        self._end(refusal.outcome)

    def finished(self, finished: Finished) -> None:
        if not self._end(finished.reason):
            return
        metrics = self._metrics
        metrics.prompt_tokens.inc(finished.prompt_tokens)
        metrics.completion_tokens.inc(finished.completion_tokens)
        metrics.first_token.observe((finished.first_token_ns - self._arrived_ns) / 1e9)
        if finished.decode.tokens:
            metrics.per_token.observe(finished.decode.duration_ns / finished.decode.tokens / 1e9)

    def _end(self, outcome: str) -> bool:
        """Count the request, unless it was counted."""
        first, self._ended = not self._ended, True
        if first:
            self._metrics.requests.labels(self._endpoint, outcome).inc()
        return first


class _EngineCollector(Collector):
    """Reads plain numbers of the engine from the event loop; they may be of different moments of one step."""

    def __init__(self, worker: Worker):
        self._worker, self._started = worker, time.time()

    def collect(self) -> Iterator[Metric]:
        engine, memory = self._worker.engine, memory_counters()
        totals = engine.recorder.totals
        for name, told, value in (
            ("edge0_expert_loads", "Experts read from storage or the page cache.", totals.loads),
            ("edge0_expert_hits", "Experts that were asked for and in memory.", totals.hits),
            ("edge0_expert_asked_bytes", "Bytes of experts that were asked for.", totals.asked_bytes),
            ("edge0_expert_read_calls", "Reads asked of the operating system.", totals.calls),
            ("edge0_expert_wait_seconds", "Time the engine thread waited for reads.", totals.loads_wait_ns / 1e9),
            ("edge0_experts_dropped", "Routed experts that did not take part; must be 0.", engine.recorder.dropped),
        ):
            yield CounterMetricFamily(name, told, value, created=self._started)
        for name, told, value in (
            ("edge0_queue_depth", "Requests that wait for the engine.", self._worker.waiting),
            ("edge0_running_requests", "Requests that the engine works on.", self._worker.running),
            ("edge0_bank_bytes", "Memory for experts.", engine.store.nbytes),
            ("edge0_rss_anon_bytes", "Anonymous memory of this process.", memory.rss_anon_bytes),
            ("edge0_allocator_active_bytes", "Live bytes of the MLX allocator.", memory.alloc_active_bytes),
            ("edge0_allocator_peak_bytes", "Highest live bytes of the MLX allocator.", memory.alloc_peak_bytes),
        ):
            if value is not None:
                yield GaugeMetricFamily(name, told, value)
