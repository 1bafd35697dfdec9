"""Parts of `make quality`: cases, what they are measured against, and the list of parts."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headrace.errors import UserError, nearest
from headrace.workspace import checkout

#: All parts, in the page's order: modules of this package.
NAMES = ("movielens", "leave_one_out", "beauty", "gowalla", "adult", "talkingdata", "open_bandit", "generated")


@dataclass(frozen=True)
class Goal:
    """Goal of a metric: `floor` at least, `aim` where papers have it. `lower`: less is better (an error)."""

    floor: float | None = None
    aim: float | None = None
    lower: bool = False

    def reached(self, value: float) -> str:
        """Return `aim`, `floor`, or `below floor`: what a value comes to."""
        sign = -1 if self.lower else 1
        if self.aim is not None and sign * value >= sign * self.aim:
            return "aim"
        if self.floor is None:
            return "below aim"
        return "floor" if sign * value >= sign * self.floor else "below floor"


@dataclass(frozen=True)
class PublishedResult:
    """Result that others have published on this very split."""

    model: str
    metrics: Mapping[str, float]
    source: str


@dataclass(frozen=True)
class CaseResult:
    """Result of one run of a case.

    metrics: by name, as in the train stage's record (`auc`, `hr_at_k`), `SPLIT.NAME` of other splits than `valid` and
    `rank`. intervals: by metric, [low, high] of one run's bootstrap. seconds: of training and evaluation; None where an
    earlier run had begun it. peak_mib: the largest sum over the processes of the run, MiB. notes: facts that the page
    shows once a case, such as the hash of the test targets; of all seeds the same.
    """

    metrics: Mapping[str, float]
    seconds: float | None
    peak_mib: float | None
    intervals: Mapping[str, Sequence[float]] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class QualityCase:
    """A model with its settings.

    run: takes the seed and the part's folder. settings: JSON values that the result depends on besides the seed, or a
    function that makes them. goals: by metric; those of a case with goals are shown first.
    """

    name: str
    run: Callable[[int, Path], CaseResult]
    settings: Mapping[str, Any] | Callable[[], Mapping[str, Any]]
    goals: Mapping[str, Goal] = field(default_factory=dict)
    #: Metrics that the table shows; empty: those with goals or published figures, else all.
    metrics: tuple[str, ...] = ()

    def all_settings(self) -> Mapping[str, Any]:
        """Return the settings. Raises UserError where a spec has faults."""
        return self.settings() if callable(self.settings) else self.settings


@dataclass(frozen=True)
class QualityPart:
    """A data set, its protocol, and the models that are trained on it; see the package's docstring."""

    title: str
    protocol: str
    cases: tuple[QualityCase, ...]
    published: tuple[PublishedResult, ...] = ()
    #: Folders of `data_folder()` that must be there.
    data: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """Return the reason why the part cannot run here; None: it can."""
        absent = [name for name in self.data if not (data_folder() / name).is_dir()]
        return f"../shared/data/{absent[0]} is not there" if absent else None

    def shown_metrics(self, case: QualityCase, measured: Sequence[str]) -> list[str]:
        """Return the metrics of a case that tables show, of those that it has."""
        known = [*case.goals, *(m for p in self.published for m in p.metrics)]
        return [m for m in dict.fromkeys(case.metrics or known or measured) if m in measured]


def data_folder() -> Path:
    """Return the folder of the data sets; it need not exist."""
    return checkout().parent / "shared" / "data"


def load_parts(names: Sequence[str] = ()) -> dict[str, QualityPart]:
    """Return parts by name; all that there are without names.

    Raises:
        UserError: no such part.
    """
    known = [name for name in NAMES if find_spec(f"bench.quality.{name}") is not None]
    for name in names:
        if name not in known:
            raise UserError(f"no part '{name}'{nearest(name, known)}; parts: {', '.join(known)}")
    return {name: importlib.import_module(f"bench.quality.{name}").PART for name in names or known}
