"""Values of vocabularies and keys of keyed tables: which are a person's, and what takes their place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from headrace.features.ops.categorify import Categorify
from headrace.features.workflow.workflow import Workflow

#: A letter of Unicode's private use, which no data of others have, and a number: one text for each code.
_NOBODY = "\ue000forgotten/{}"
_LENGTH = re.compile(r"(\d+):")


def is_blanked(value: str | None) -> bool:
    """Whether a value has taken the place of one that went."""
    return value is not None and value.startswith(_NOBODY.format(""))


def blanked(
    values: Sequence[str | None], gone: Sequence[bool] | npt.NDArray[np.bool_], numbers: Iterable[int]
) -> list[str | None]:
    """Texts, those that go replaced by one that is nobody's, distinct by their numbers."""
    return [_NOBODY.format(n) if out else v for v, out, n in zip(values, gone, numbers, strict=True)]


def vocabularies_of(workflow: Workflow, column: str) -> set[str]:
    """The vocabularies that have values of a column; one that an older spec named after the column, too."""
    found = {column}
    for chain in workflow.chains:
        found |= {t.vocabulary for n, t in chain.outputs.items() if t.vocabulary and column in chain.sources[n]}
        for step in chain.steps:
            if isinstance(step.op, Categorify) and column in step.inputs:
                found.add(step.op.vocabulary_of(column))
    return found


def parts_of(key: str) -> list[str]:
    """The values that a key may be made of (headrace.features.functions.keys.joint_key): itself, or its parts."""
    parts, at = [], 0
    while (match := _LENGTH.match(key, at)) is not None and match.end() + int(match.group(1)) <= len(key):
        end = match.end() + int(match.group(1))
        parts.append(key[match.end() : end])
        at = end
    return [key, *parts, *([key[at:]] if parts else [])]
