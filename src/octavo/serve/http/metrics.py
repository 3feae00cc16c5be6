"""Counters, gauges and durations of a server for Prometheus."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.metrics_core import Metric

_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class _Registry(CollectorRegistry):
    """A registry without the time at which each series was created: prometheus_client switches that globally."""

    def collect(self) -> Iterable[Metric]:
        for family in super().collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class Metrics:
    """The metrics of one server, in a registry of its own. Labels have few values, none of them from clients."""

    def __init__(self):
        own = {"namespace": "octavo", "registry": _Registry(auto_describe=True)}
        self._registry = own["registry"]
        self.requests = Counter("requests", "HTTP requests answered.", ["path", "status"], **own)
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of accepted prompts.", **own)
        self.generated_tokens = Counter("generated_tokens", "Generated tokens.", **own)
        self.disconnects = Counter("disconnects", "Requests whose client left before the response was complete.", **own)
        self.seconds = Histogram(
            "request_seconds", "Seconds from a request to the end of its response.", buckets=_BUCKETS, **own
        )
        self.first_token = Histogram(
            "first_token_seconds", "Seconds from a request to its first token.", buckets=_BUCKETS, **own
        )

    def add_gauge(self, name: str, about: str, value: Callable[[], float]) -> None:
        """A number that is read whenever the metrics are."""
        Gauge(name, about, namespace="octavo", registry=self._registry).set_function(value)

    def text(self) -> bytes:
        """All metrics in the exposition format, of the type `CONTENT_TYPE`."""
        return generate_latest(self._registry)


__all__ = ["CONTENT_TYPE", "Metrics"]
