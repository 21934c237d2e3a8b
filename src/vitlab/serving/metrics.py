"""Counters and histograms, and their text for Prometheus. Label values come from fixed tables, so their number is bounded."""

import bisect
from collections.abc import Iterator, Sequence

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
IMAGES = (1, 2, 4, 8, 16, 32, 64, 128)


class Counter:
    """Grows. One number for each value of the labels, as text: `route="/v1/predict",status="200"`."""

    def __init__(self, name: str, what: str) -> None:
        self.name, self.what = name, what
        self.values: dict[str, float] = {}

    def add(self, labels: str = "", by: float = 1) -> None:
        self.values[labels] = self.values.get(labels, 0) + by

    def lines(self) -> Iterator[str]:
        yield from _head(self.name, self.what, "counter")
        for labels, value in sorted((self.values or {"": 0}).items()):
            yield f"{self.name}{f'{{{labels}}}' if labels else ''} {_number(value)}"


class Histogram:
    """How often a value fell below each bound."""

    def __init__(self, name: str, what: str, bounds: Sequence[float]) -> None:
        self.name, self.what, self.bounds = name, what, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self) -> Iterator[str]:
        yield from _head(self.name, self.what, "histogram")
        below = 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            below += count
            yield f'{self.name}_bucket{{le="{bound}"}} {below}'
        yield f"{self.name}_sum {_number(self.sum)}"
        yield f"{self.name}_count {below}"


class Metrics:
    """All of them."""

    def __init__(self) -> None:
        self.requests = Counter("vitlab_requests_total", "Requests, by route and status.")
        self.refused = Counter("vitlab_refused_total", "Requests refused, by the code of the error.")
        self.refused_images = Counter("vitlab_refused_images_total", "Images refused, by the code of the error.")
        self.images = Counter("vitlab_images_total", "Images answered, by model and route.")
        self.cancelled = Counter(
            "vitlab_cancelled_total", "Images that nobody waited for any more, and were not computed."
        )
        self.decoder_restarts = Counter("vitlab_decoder_restarts_total", "Decoders that were killed or died.")
        self.batch_size = Histogram("vitlab_batch_images", "Images of a batch.", IMAGES)
        self.batch_seconds = Histogram("vitlab_batch_seconds", "What a batch took the model.", SECONDS)
        self.request_seconds = Histogram(
            "vitlab_request_seconds", "Of admitted requests, from the last byte to the answer.", SECONDS
        )

    def text(self, gauges: dict[str, tuple[str, float]]) -> str:
        """In Prometheus' format. `gauges`: name -> what it is, and its value now."""
        own = (each for each in vars(self).values() if isinstance(each, Counter | Histogram))
        lines = [line for each in own for line in each.lines()]
        for name, (what, value) in gauges.items():
            lines += [*_head(name, what, "counter" if name.endswith("_total") else "gauge"), f"{name} {_number(value)}"]
        return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    """All of its digits: a counter that is rounded moves in steps."""
    return str(int(value)) if value == int(value) else repr(value)


def _head(name: str, what: str, kind: str) -> list[str]:
    return [f"# HELP {name} {what}", f"# TYPE {name} {kind}"]
