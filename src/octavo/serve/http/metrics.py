"""Counts and durations, in the text that Prometheus reads (exposition format 0.0.4)."""

import bisect
import collections
from collections.abc import Mapping, Sequence

_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Histogram:
    """How many durations were at most so long, for some lengths, and their sum.

    >>> seconds = Histogram((0.1, 1.0))
    >>> seconds.observe(0.5)
    >>> seconds.lines("x")[1:3]
    ['x_bucket{le="1"} 1', 'x_bucket{le="+Inf"} 1']
    """

    def __init__(self, bounds: Sequence[float] = _BOUNDS):
        self.bounds, self.total = tuple(bounds), 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, seconds: float) -> None:
        """Count a duration."""
        self._counts[bisect.bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def lines(self, name: str) -> list[str]:
        """As text."""
        found, so_far = [], 0
        for bound, count in zip((*self.bounds, None), self._counts, strict=True):
            so_far += count
            found.append(f'{name}_bucket{{le="{"+Inf" if bound is None else f"{bound:g}"}"}} {so_far}')
        return [*found, f"{name}_sum {self.total:.6f}", f"{name}_count {so_far}"]


class Metrics:
    """What a server has done so far. Labels are taken from few values, never from what a client sent."""

    def __init__(self):
        self.requests: collections.Counter[tuple[str, int]] = collections.Counter()
        """By path and status."""
        self.prompt_tokens = self.generated_tokens = self.disconnects = 0
        self.seconds = Histogram()
        """From a request for texts to the end of its answer."""
        self.first_token = Histogram()
        """From a request for texts to its first token, waiting included."""

    def text(self, gauges: Mapping[str, tuple[int, str]]) -> str:
        """All of it, and gauges: numbers that rise and fall, each with what it is."""
        lines = ["# HELP octavo_requests_total HTTP requests answered.", "# TYPE octavo_requests_total counter"]
        for (path, status), count in sorted(self.requests.items()):
            lines.append(f'octavo_requests_total{{path="{path}",status="{status}"}} {count}')
        for name, value, about in (
            ("prompt_tokens_total", self.prompt_tokens, "Tokens of prompts that were accepted."),
            ("generated_tokens_total", self.generated_tokens, "Tokens that were generated."),
            ("disconnects_total", self.disconnects, "Requests whose client left before the answer was complete."),
        ):
            lines += [f"# HELP octavo_{name} {about}", f"# TYPE octavo_{name} counter", f"octavo_{name} {value}"]
        for name, (value, about) in gauges.items():
            lines += [f"# HELP octavo_{name} {about}", f"# TYPE octavo_{name} gauge", f"octavo_{name} {value:g}"]
        for name, histogram, about in (
            ("request_seconds", self.seconds, "Seconds from a request for texts to the end of its answer."),
            ("first_token_seconds", self.first_token, "Seconds from a request for texts to its first token."),
        ):
            lines += [f"# HELP octavo_{name} {about}", f"# TYPE octavo_{name} histogram"]
            lines += histogram.lines(f"octavo_{name}")
        return "\n".join(lines) + "\n"
