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
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import UserError
from headrace.storage import Location

if TYPE_CHECKING:
    from pyspark.sql import Column

Mask = npt.NDArray[np.bool_]

#: What separates values in a line that could not be read; alike in Java's and Python's regular expressions.
BETWEEN = r"[\s,;|\"'{}\[\]:=()<>]+"


@dataclass(frozen=True)
class ForgottenValues:
    """The list of a pipeline. Small, and goes to Spark's tasks as it is."""

    salt: str
    #: By column: hashes, hexadecimal, in order.
    columns: Mapping[str, tuple[str, ...]]

    @staticmethod
    def new() -> ForgottenValues:
        """An empty list with a salt of its own."""
        return ForgottenValues(secrets.token_hex(16), {})

    @staticmethod
    def load(file: Location) -> ForgottenValues | None:
        """The list in a file; None where there is none.

        Raises:
            UserError: the file is damaged: nothing may be loaded then.
        """
        try:
            text = file.read_text()
        except FileNotFoundError:
            return None
        try:
            found = json.loads(text)
            return ForgottenValues(str(found["salt"]), {c: tuple(h) for c, h in found["columns"].items()})
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise UserError(
                f"{file} is damaged: it says whose rows must not be loaded again (headrace forget). Restore it from a "
                f"backup, or remove it and run headrace forget again with all values"
            ) from e

    def save(self, file: Location) -> None:
        """Replace the file in one step."""
        file.put_text(json.dumps({"salt": self.salt, "columns": self.columns}, indent=1) + "\n")

    def hashes(self, column: str, texts: Collection[str]) -> list[str]:
        """Of values by their texts."""
        head = hashlib.sha256(self._head(column).encode())
        found = []
        for text in texts:
            one = head.copy()
            one.update(text.encode())
            found.append(one.hexdigest())
        return found

    def having(self, column: str, hashes: Collection[str]) -> ForgottenValues:
        """The same with further hashes of a column."""
        both = tuple(sorted({*self.columns.get(column, ()), *hashes}))
        return ForgottenValues(self.salt, {**self.columns, column: both})

    def of(self, columns: Collection[str]) -> ForgottenValues | None:
        """What of it is of some columns; None where nothing is."""
        mine = {c: h for c, h in self.columns.items() if c in columns and h}
        return ForgottenValues(self.salt, mine) if mine else None

    def mask(self, column: str, values: pa.Array) -> Mask:
        """Which values are forgotten. Texts or integers, also null. bool [n]."""
        distinct = values.dictionary_encode()
        texts = distinct.dictionary.cast(pa.string()).to_pylist()
        wanted = self._sets.get(column, frozenset())
        hit = np.array([h in wanted for h in self.hashes(column, texts)] + [False], np.bool_)
        found: Mask = hit[pc.fill_null(distinct.indices, len(texts)).to_numpy(zero_copy_only=False)]
        return found

    def any_of(self, names: Sequence[str], columns: Sequence[pa.Array]) -> Mask:
        """Which rows have a forgotten value in one of these columns, by their names. bool [rows]."""
        found = np.zeros(len(columns[0]), np.bool_)
        for name in self.columns:
            found |= self.mask(name, columns[names.index(name)])
        return found

    def spark(self, column: str, value: Column) -> Column:
        """Whether a value of the column is forgotten, as Spark computes it; never null."""
        from pyspark.sql import functions as F

        hashed = F.sha2(F.concat(F.lit(self._head(column)), value.cast("string")), 256)
        return F.coalesce(hashed.isin(list(self.columns.get(column, ()))), F.lit(False))

    def spark_line(self, column: str, text: Column) -> Column:
        """Whether a line that could not be read has a forgotten value of the column somewhere; never null."""
        from pyspark.sql import functions as F

        words = F.split(text, BETWEEN)
        return F.coalesce(F.exists(words, lambda word: self.spark(column, word)), F.lit(False))

    @cached_property
    def _sets(self) -> dict[str, frozenset[str]]:
        return {column: frozenset(hashes) for column, hashes in self.columns.items()}

    def _head(self, column: str) -> str:
        return f"{self.salt}/{column}/"


def words_of(text: str) -> list[str]:
    """The words of a line that could not be read, as `ForgottenValues.spark_line` sees them."""
    return re.split(BETWEEN, text)
