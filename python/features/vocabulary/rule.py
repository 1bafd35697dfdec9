"""What is to become of the values of a vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.schema import OOV_CODE


@dataclass(frozen=True)
class VocabularyRule:
    """What is to become of the values of a vocabulary."""

    #: Values seen fewer times in the training range get no code.
    min_count: int = 1
    #: At most this many values, the most frequent; None: no limit.
    max_size: int | None = None
    #: Other values hash into so many codes, 1..oov_buckets.
    oov_buckets: int = 1

    @property
    def first_code(self) -> int:
        """The code of the vocabulary's first value."""
        return OOV_CODE + self.oov_buckets
