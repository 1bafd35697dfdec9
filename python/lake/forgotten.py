"""Values whose rows are not to come back (`headrace forget`): salted hashes, never the values.

Whoever brings rows in asks: ingest, and who reads a user's own table in place. A hash is SHA-256 of the salt, the
column and the value's text. It hides long or random values; integers of a small range can be tried one by one by
whoever has the file, so it is to be kept as the data were.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.compute import pc
from headrace.errors import UserError, known_keys
from headrace.storage import Location

if TYPE_CHECKING:
    from pyspark.sql import Column

Mask = npt.NDArray[np.bool_]

#: What separates values in a line that could not be read; alike in Java's and Python's regular expressions. The blanks
#: beyond ASCII are named, as only Python's `\s` has them.
BETWEEN = r"[\s\x1c-\x1f\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000" r",;|\"'{}\[\]:=()<>]+"
#: Between the words of a value that has separators itself: in no word of a line.
_JOINT = "\x1f"


@dataclass(frozen=True)
class ForgottenValues:
    """The list of a pipeline. Small, and goes to Spark's tasks as it is."""

    salt: str
    #: By column: hashes, hexadecimal, in order.
    columns: Mapping[str, tuple[str, ...]]
    #: By column: how many words values have that are not one word of a line, ascending. Their words, joined, are hashed
    #: as well, so that a line that could not be read is recognised by them, whatever stands between.
    words: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @staticmethod
    def new() -> ForgottenValues:
        """Return an empty list with a salt of its own."""
        return ForgottenValues(secrets.token_hex(16), {})

    @staticmethod
    def load(file: Location) -> ForgottenValues | None:
        """Return the list in a file; None where there is none.

        Raises:
            UserError: the file is damaged, or of a newer release: nothing may be loaded then.
        """
        try:
            text = file.read_text()
        except FileNotFoundError:
            return None
        return ForgottenValues.parsed(text, file)

    @staticmethod
    def parsed(text: str, file: Location) -> ForgottenValues:
        """Return the list in a file's text. Raises UserError as `load`."""
        try:
            content = known_keys(json.loads(text), ("salt", "columns", "words"), str(file))
            columns, words = (
                {column: tuple(values) for column, values in hashes.items()}
                for hashes in (content["columns"], content.get("words", {}))
            )
            return ForgottenValues(str(content["salt"]), columns, words)
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise UserError(
                f"{file} is damaged: it says whose rows must not be loaded again (headrace forget). Restore it from a "
                f"backup, or remove it and run headrace forget again with all values"
            ) from e

    def to_text(self) -> str:
        """Return the text that `parsed` reads."""
        content = {"salt": self.salt, "columns": self.columns} | ({"words": self.words} if self.words else {})
        return json.dumps(content, indent=1) + "\n"

    def hashes(self, column: str, texts: Collection[str]) -> list[str]:
        """Return the hashes of values, given as text."""
        return self._hashes(self._head(column), texts)

    @staticmethod
    def _hashes(prefix: str, texts: Collection[str]) -> list[str]:
        head, hashes = hashlib.sha256(prefix.encode()), []
        for text in texts:
            digest = head.copy()
            digest.update(text.encode())
            hashes.append(digest.hexdigest())
        return hashes

    def having(self, column: str, texts: Collection[str]) -> ForgottenValues:
        """Return the same with further values of a column, by their texts."""
        of_words = {text: [w for w in words_of(text) if w] for text in texts if words_of(text) != [text]}
        of_words = {text: words for text, words in of_words.items() if words}
        joined = self._hashes(self._words_head(column), [_JOINT.join(words) for words in of_words.values()])
        both = tuple(sorted({*self.columns.get(column, ()), *self.hashes(column, texts), *joined}))
        counts = tuple(sorted({*self.words.get(column, ()), *map(len, of_words.values())}))
        words = {**self.words, **({column: counts} if counts else {})}
        return ForgottenValues(self.salt, {**self.columns, column: both}, words)

    def restricted_to(self, columns: Collection[str]) -> ForgottenValues | None:
        """Return the list for some columns alone, None where it has no value of them."""
        listed = {c: h for c, h in self.columns.items() if c in columns and h}
        words = {c: counts for c, counts in self.words.items() if c in listed}
        return ForgottenValues(self.salt, listed, words) if listed else None

    def mask(self, column: str, values: pa.Array) -> Mask:
        """Return which values are forgotten, bool [n], of texts or integers, which may be null."""
        distinct = values.dictionary_encode()
        texts = distinct.dictionary.cast(pa.string()).to_pylist()
        listed = self._sets.get(column, frozenset())
        hit = np.array([h in listed for h in self.hashes(column, texts)] + [False], np.bool_)
        is_listed: Mask = hit[pc.fill_null(distinct.indices, len(texts)).to_numpy(zero_copy_only=False)]
        return is_listed

    def any_of(self, names: Sequence[str], columns: Sequence[pa.Array]) -> Mask:
        """Return which rows have a forgotten value in one of these columns, found by name: bool [rows]."""
        is_listed = np.zeros(len(columns[0]), np.bool_)
        for name in self.columns:
            is_listed |= self.mask(name, columns[names.index(name)])
        return is_listed

    def spark(self, column: str, value: Column) -> Column:
        """Return Spark's column of whether a value of `column` is forgotten; it is never null."""
        from pyspark.sql import functions as F

        hashed = F.sha2(F.concat(F.lit(self._head(column)), value.cast("string")), 256)
        return F.coalesce(hashed.isin(list(self.columns.get(column, ()))), F.lit(False))

    def spark_line(self, column: str, text: Column) -> Column:
        """Return Spark's column of whether an unreadable line has a forgotten value of `column` anywhere; it is never
        null.
        """
        from pyspark.sql import functions as F

        words, listed = F.split(text, BETWEEN), list(self.columns.get(column, ()))
        is_match = F.coalesce(F.exists(words, lambda word: self.spark(column, word)), F.lit(False))
        all_words, head = F.filter(words, lambda word: word != ""), F.lit(self._words_head(column))

        def some(count: int) -> Column:
            def is_listed(start: Column) -> Column:
                joined = F.array_join(F.slice(all_words, start, F.lit(count)), _JOINT)
                return F.sha2(F.concat(head, joined), 256).isin(listed)

            starts = F.sequence(F.lit(1), F.size(all_words) - count + 1)
            return F.when(F.size(all_words) >= count, F.exists(starts, is_listed)).otherwise(F.lit(False))

        for count in self.words.get(column, ()):
            is_match = is_match | some(count)
        return F.coalesce(is_match, F.lit(False))

    def in_line(self, text: str) -> bool:
        """Return whether an unreadable line has a forgotten value of a column anywhere, as `spark_line` does."""
        words = words_of(text)
        present = [word for word in words if word]
        for column, listed in self._sets.items():
            if not listed.isdisjoint(self.hashes(column, words)):
                return True
            for count in self.words.get(column, ()):
                joined = [_JOINT.join(present[k : k + count]) for k in range(len(present) - count + 1)]
                if not listed.isdisjoint(self._hashes(self._words_head(column), joined)):
                    return True
        return False

    @cached_property
    def _sets(self) -> dict[str, frozenset[str]]:
        return {column: frozenset(hashes) for column, hashes in self.columns.items()}

    def _head(self, column: str) -> str:
        return f"{self.salt}/{column}/"

    def _words_head(self, column: str) -> str:
        return f"{self.salt}/{column}{_JOINT}words/"


def listed_in(file: Location, column: str, texts: Sequence[str]) -> ForgottenValues:
    """Add values of a column, by their texts, to the list in a file; what the list is then.

    Of several who do so at once, none loses what another has added.

    Raises:
        UserError: the file is damaged.
    """
    while True:
        tagged = file.read_tagged()
        known = ForgottenValues.new() if tagged is None else ForgottenValues.parsed(tagged[0].decode(), file)
        listed = known.having(column, texts)
        if listed == known or file.put_if(listed.to_text().encode(), None if tagged is None else tagged[1]):
            return listed


def words_of(text: str) -> list[str]:
    """Return the words of a line that could not be read, as `ForgottenValues.spark_line` sees them."""
    return re.split(BETWEEN, text)
