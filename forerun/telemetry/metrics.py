"""What the coordinator counts, for Prometheus. Counters, not rates; no label is a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from forerun.core.hits import Hit

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class CoordinatorMetrics:
    """One registry per process, so that tests can have several."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "forerun_requests", "Requests that ended, by how.", ["outcome"], registry=self.registry
        )
        self._prompt = Counter("forerun_prompt_tokens", "Prompt tokens of answered requests.", registry=self.registry)
        self._completion = Counter("forerun_completion_tokens", "Completion tokens.", registry=self.registry)
        self._passes = Counter("forerun_passes", "Target passes that picked tokens.", registry=self.registry)
        self._drafted = Counter("forerun_drafted_tokens", "Nodes that were checked.", registry=self.registry)
        self._accepted = Counter("forerun_accepted_tokens", "Checked nodes that were accepted.", registry=self.registry)
        self._hits = Counter(
            "forerun_hits",
            "Passes that were to have a draft's hints, by what the target knew when it needed them.",
            ["cause"],
            registry=self.registry,
        )
        for hit in Hit:
            self._hits.labels(hit.name.lower())
        self._ttft = Histogram(
            "forerun_time_to_first_token_seconds",
            "From the request's arrival to its first tokens.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self._itl = Histogram(
            "forerun_inter_token_seconds",
            "Time per token after the first: m tokens that come t after the ones before count m times t/m.",
            buckets=SECONDS,
            registry=self.registry,
        )

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """A gauge that is read when it is asked for."""
        Gauge(name, text, registry=self.registry).set_function(value)

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def tokens(self, count: int, seconds: float) -> None:
        """`count` tokens came `seconds` after the ones before."""
        for _ in range(count):
            self._itl.observe(seconds / count)

    def finished(
        self, prompt: int, completion: int, passes: int, drafted: int, accepted: int, hits: Mapping[str, int]
    ) -> None:
        """The figures of one answer, as its usage states them."""
        self._prompt.inc(prompt)
        self._completion.inc(completion)
        self._passes.inc(passes)
        self._drafted.inc(drafted)
        self._accepted.inc(accepted)
        for cause, count in hits.items():
            self._hits.labels(cause).inc(count)

    def ended(self, outcome: str) -> None:
        self._requests.labels(outcome).inc()

    def serve(self, host: str, port: int) -> None:
        """GET /metrics on a thread of its own."""
        start_http_server(port, addr=host, registry=self.registry)
