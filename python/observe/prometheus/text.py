"""Prometheus' text format: https://prometheus.io/docs/instrumenting/exposition_formats/."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sample:
    """A value and its labels."""

    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Metric:
    """A gauge: a name, what it means, samples."""

    name: str
    help: str
    samples: list[Sample] = field(default_factory=list)

    def add(self, value: float | int | None, **labels: str) -> None:
        """A sample; None is none."""
        if value is not None:
            self.samples.append(Sample(float(value), labels))


def render(metrics: Iterable[Metric]) -> str:
    """The file's text; metrics without samples are left out.

    Of samples with the same labels the last one counts: a file that has both is refused as a whole.
    """
    lines: list[str] = []
    for metric in metrics:
        if not metric.samples:
            continue
        lines += [f"# HELP {metric.name} {_escape(metric.help)}", f"# TYPE {metric.name} gauge"]
        unique = {tuple(sample.labels.items()): sample for sample in metric.samples}
        lines += [f"{metric.name}{_labels(sample.labels)} {_number(sample.value)}" for sample in unique.values()]
    return "".join(f"{line}\n" for line in lines)


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    shown = (f'{name}="{_escape(value).replace(chr(34), chr(92) + chr(34))}"' for name, value in labels.items())
    return "{" + ",".join(shown) + "}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
