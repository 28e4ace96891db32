"""What the server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..engine import Engine

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """The server's metrics, in a registry of their own.

    Attributes:
        first_token, inter_token, request: histograms of seconds, of requests that succeed.
        prompt_tokens, completion_tokens: counters of finished requests.
        answers: counter of HTTP answers by route and status.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self.first_token = Histogram(
            "ostinato_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            registry=registry,
            buckets=_SECONDS,
        )
        self.inter_token = Histogram(
            "ostinato_inter_token_seconds",
            "Between two steps that bring tokens of one request.",
            registry=registry,
            buckets=_SECONDS,
        )
        self.request = Histogram(
            "ostinato_request_seconds",
            "From a request's arrival to its last token.",
            registry=registry,
            buckets=_SECONDS,
        )
        self.prompt_tokens = Counter(
            "ostinato_prompt_tokens", "Prompt tokens of finished requests.", registry=registry
        )
        self.completion_tokens = Counter(
            "ostinato_completion_tokens", "Tokens generated for them.", registry=registry
        )
        self.answers = Counter(
            "ostinato_http_answers", "Answers.", ["route", "status"], registry=registry
        )
        self._admitted = Gauge(
            "ostinato_choices_admitted", "Texts that run or wait.", registry=registry
        )
        self._engine = _EngineCollector()
        registry.register(self._engine)

    def render(self, admitted: int, engine: EngineNumbers | None) -> bytes:
        """Return everything as Prometheus' text.

        Args:
            admitted: texts that run or wait.
            engine: its numbers; None where there are none, when those of before stay.
        """
        self._admitted.set(admitted)
        if engine is not None:
            self._engine.numbers = engine
        return generate_latest(self._registry) + self._engine.numbers.graphs.encode()


# Of an engine: the name, whether it only grows, and what it is.
_ENGINE = (
    ("decode_tokens", True, "Tokens decoded behind each text's first."),
    ("decode_steps", True, "Steps that decoded; some of them computed prompts, too."),
    ("decode_seconds", True, "Seconds of them, each from the end of the step before."),
    ("prefill_tokens", True, "Prompt tokens computed."),
    ("prefill_steps", True, "Steps that computed prompts."),
    ("prefill_seconds", True, "Seconds of them, each from the end of the step before."),
    ("prefix_tokens", True, "Prompt tokens looked for in the KV cache."),
    ("shared_tokens", True, "Those of them that were there."),
    ("evicted_pages", True, "Pages of the KV cache kept for later prompts and given up."),
    ("preemptions", True, "Requests that gave way."),
    ("failed_requests", True, "Requests whose logits were NaN."),
    ("requests_waiting", False, "Texts that wait for a slot or for pages."),
    ("kv_pages", False, "Pages of the KV cache."),
    ("kv_pages_free", False, "Pages that requests could take now."),
)


@dataclass(frozen=True)
class EngineNumbers:
    """Numbers of an engine at one moment: `values` by the names above, `graphs` as text."""

    values: Mapping[str, float] = field(default_factory=dict)
    graphs: str = ""

    @staticmethod
    def of(engine: Engine) -> EngineNumbers:
        """Read them, on the engine's thread."""
        stats, cache = engine.stats, engine.cache
        values = {
            "decode_tokens": stats.decode_tokens,
            "decode_steps": stats.decode_seconds.steps,
            "decode_seconds": stats.decode_seconds.total,
            "prefill_tokens": stats.prefill_tokens,
            "prefill_steps": stats.prefill_seconds.steps,
            "prefill_seconds": stats.prefill_seconds.total,
            "prefix_tokens": cache.prefix_tokens,
            "shared_tokens": cache.shared_tokens,
            "evicted_pages": cache.evictions,
            "preemptions": stats.preemptions,
            "failed_requests": stats.failed_requests,
            "requests_waiting": engine.waiting,
            "kv_pages": cache.usable_pages,
            "kv_pages_free": cache.free_pages,
        }
        return EngineNumbers(values, engine.runner.stats().to_prometheus())


class _EngineCollector(Collector):
    """Hands the numbers that were read last to prometheus_client."""

    def __init__(self) -> None:
        self.numbers = EngineNumbers()

    def collect(self) -> Iterator[Metric]:
        for name, grows, text in _ENGINE:
            family = CounterMetricFamily if grows else GaugeMetricFamily
            value = self.numbers.values.get(name, 0)
            yield family(f"ostinato_engine_{name}", text, value=value)
