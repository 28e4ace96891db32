"""Numbers in the text format that Prometheus reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate

from .histogram import Histogram

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*\Z")


class Metric:
    """One metric with its samples.

    Args:
        name, kind: as Prometheus calls them; kinds are "counter" and "histogram".
        help: one line for people.
    """

    def __init__(self, name: str, kind: str, help: str) -> None:
        self.name = name
        self.kind = kind
        self.help = help
        self.samples: list[tuple[str, Mapping[str, str], float]] = []

    def add(self, value: float, labels: Mapping[str, str], suffix: str = "") -> None:
        """Add a sample."""
        self.samples.append((self.name + suffix, labels, value))

    def add_histogram(self, histogram: Histogram, *, scale: float) -> None:
        """Add the samples of a histogram, its values times `scale`."""
        counts = list(accumulate(histogram.counts))
        bounds = [f"{bound * scale:g}" for bound in histogram.bounds]
        for bound, count in zip([*bounds, "+Inf"], counts, strict=True):
            self.add(count, {"le": bound}, "_bucket")
        self.add(histogram.total * scale, {}, "_sum")
        self.add(counts[-1], {}, "_count")


def to_text(metrics: Sequence[Metric], labels: Mapping[str, str]) -> str:
    """Return the metrics as text, every sample with `labels` beside its own.

    Raises:
        TypeError: when the labels are not a mapping of strings to strings.
        ValueError: for a label whose name is not allowed, or that a metric has itself.
    """
    _check_kinds(labels)
    lines = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
        for name, own, value in metric.samples:
            for label in labels:
                if not _LABEL.match(label) or label in own:
                    raise ValueError(f"labels: got the name {label!r}, which cannot be used")
            pairs = [f'{key}="{_escape(text)}"' for key, text in {**labels, **own}.items()]
            braces = f"{{{','.join(pairs)}}}" if pairs else ""
            lines.append(f"{name}{braces} {value:.17g}")
    return "\n".join([*lines, ""])


def _check_kinds(labels: object) -> None:
    if not isinstance(labels, Mapping):
        raise TypeError(f"labels: got {type(labels).__name__}, expected a mapping")
    for label, text in labels.items():
        if not isinstance(label, str):
            raise TypeError(f"labels: got the name {label!r}, expected a string")
        if not isinstance(text, str):
            raise TypeError(f"labels[{label!r}]: got {text!r}, expected a string")


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
