"""A vocabulary table that lost files or commits: codes come back as they were given, from what datasets have."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import UserError
from headrace.features.vocabulary.codes import VocabularyRule
from headrace.features.vocabulary.delta_table import VocabularyTable
from headrace.features.vocabulary.restoration import SavedCopies
from headrace.lake.delta.log import DeltaLog
from headrace.storage import local

RULES = {"word": VocabularyRule(min_count=1), "user": VocabularyRule(min_count=1)}
COLUMNS = ["name", "value", "code", "count", "added_ds"]
DAYS = {
    "2026-01-01": {"word": {"a": 9, "b": 5}, "user": {"u": 3}},
    "2026-01-02": {"word": {"b": 6, "c": 4}, "user": {"u": 4, "v": 1}},
    "2026-01-03": {"word": {"d": 2}, "user": {}},
}
#: How a power cut or a bad disk leaves a data file.
DAMAGE: dict[str, Callable[[Path], Any]] = {
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-9]),
    "gone": lambda file: file.unlink(),
}


class Pipeline:
    """A vocabulary table and the vocabularies of its datasets."""

    def __init__(self, folder: Path) -> None:
        self.table = folder / "vocabulary"
        #: By day: the vocabularies of its dataset, and the version of the table that its manifest names.
        self.datasets: dict[str, dict[str, pa.Table]] = {}
        self.versions: dict[str, int] = {}

    def fit(self, ds: str, counted: dict[str, dict[str, int]] | None = None) -> dict[str, dict[str, int]]:
        """Fit a day, for the first time or again; return the codes that its dataset has."""
        types = [("name", pa.string()), ("value", pa.string()), ("count", pa.int64()), ("day", pa.int64())]
        rows = [
            {"name": name, "value": value, "count": count, "day": 0}
            for name, values in (counted or DAYS[ds]).items()
            for value, count in values.items()
        ]
        spark: Any = None  # nothing here is a Spark job
        copies = SavedCopies(next((v for _, v in sorted(self.versions.items(), reverse=True)), None), self._copies)
        table = VocabularyTable(spark, local(self.table), ds, self.versions.get(ds), copies=copies)
        vocabularies = table.update(pa.Table.from_pylist(rows, pa.schema(types)), RULES)
        self.datasets[ds] = {name: v for name, v in vocabularies.items() if isinstance(v, pa.Table)}
        assert table.version is not None
        self.versions[ds] = table.version
        return {name: dict(zip(*v.to_pydict().values(), strict=True)) for name, v in self.datasets[ds].items()}

    def _copies(self) -> Iterator[tuple[str, str, pa.Table]]:
        for ds in sorted(self.datasets):
            for name, table in self.datasets[ds].items():
                yield ds, name, table

    def file(self, version: int) -> Path:
        """The data file that a commit added."""
        commit = next(c for c in DeltaLog(local(self.table)).commits() if c.version == version)
        return commit.adds[0].path.local_path()

    def rows(self) -> list[dict[str, Any]]:
        """The newest version, by another reader of Delta tables."""
        table = pa.concat_tables([pq.ParquetFile(f).read(COLUMNS) for f in DeltaTable(str(self.table)).file_uris()])
        return sorted(table.to_pylist(), key=lambda row: (row["name"], row["code"]))


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    created = Pipeline(tmp_path)
    for ds in DAYS:
        created.fit(ds)
    return created


def without_counts(rows: list[dict[str, Any]], *days: str) -> list[dict[str, Any]]:
    return [row | ({"count": None} if row["added_ds"] in days else {}) for row in rows]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_of_the_day_is_made_again_whole(
    damage: str, pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    rows_before, codes = pipeline.rows(), pipeline.fit("2026-01-03")
    file = pipeline.file(2)
    DAMAGE[damage](file)
    assert pipeline.fit("2026-01-03") == codes
    assert pipeline.rows() == rows_before
    assert f"1 codes are put back into {pipeline.table} from datasets and models" in caplog.text
    assert str(file) in caplog.text
    assert not file.exists()


@pytest.mark.parametrize("versions", [(0,), (1,), (0, 1), (0, 1, 2)])
def test_files_of_earlier_days_are_made_again_for_older_versions_too(
    versions: tuple[int, ...], pipeline: Pipeline
) -> None:
    rows_before, codes = pipeline.rows(), {ds: pipeline.fit(ds) for ds in DAYS}
    for version in versions:
        pipeline.file(version).write_bytes(b"")
    added = {"word": {"e": 1}}
    assert pipeline.fit("2026-01-04", added)["word"] == codes["2026-01-03"]["word"] | {"e": 6}
    lost = [ds for version, ds in enumerate(DAYS) if version in versions]
    after = [row for row in pipeline.rows() if row["added_ds"] != "2026-01-04"]
    # A value's count was for people: no code rests on it.
    assert after == without_counts(rows_before, *lost)
    assert {ds: pipeline.fit(ds) for ds in DAYS} == codes


def test_a_lost_commit_is_made_again(pipeline: Pipeline) -> None:
    codes = pipeline.fit("2026-01-03")
    (pipeline.table / "_delta_log" / f"{2:020d}.json").write_bytes(b"")
    # Without its codes, `e` would be given the code that `d` has in the dataset and the model of the day before.
    assert pipeline.fit("2026-01-04", {"word": {"e": 7, "d": 1}})["word"] == codes["word"] | {"e": 6}


def test_a_lost_table_is_made_again(pipeline: Pipeline) -> None:
    rows_before, codes = pipeline.rows(), {ds: pipeline.fit(ds) for ds in DAYS}
    shutil.rmtree(pipeline.table)
    assert pipeline.fit("2026-01-03") == codes["2026-01-03"]
    assert pipeline.rows() == without_counts(rows_before, "2026-01-01", "2026-01-02")
    # The others name versions of the table that was lost.
    assert {ds: pipeline.fit(ds) for ds in DAYS} == codes


def test_codes_that_nobody_has_are_given_again(pipeline: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    rows_before, codes = pipeline.rows(), pipeline.fit("2026-01-03")
    pipeline.file(2).write_bytes(b"")
    del pipeline.datasets["2026-01-03"]
    assert pipeline.fit("2026-01-03") == codes
    assert pipeline.rows() == rows_before
    assert "what none of them has is given again" in caplog.text


def test_codes_between_others_that_nobody_has_are_refused(pipeline: Pipeline) -> None:
    """Later values would be given codes that models know as those of other values."""
    file = pipeline.file(0)
    file.write_bytes(b"")
    pipeline.datasets.clear()
    with pytest.raises(UserError, match=rf"{file} has 0 bytes, not [0-9]+: .* 2 of the vocabulary 'word' are gone"):
        pipeline.fit("2026-01-04", {"word": {"e": 1}})
    assert len(DeltaLog(local(pipeline.table)).versions()) == 3


def test_a_process_that_is_killed_before_its_commit_leaves_the_damage(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_before, codes = pipeline.rows(), pipeline.fit("2026-01-03")
    pipeline.file(2).write_bytes(b"")

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("headrace.lake.delta.transaction.Transaction.join", kill)
        with pytest.raises(KeyboardInterrupt):
            pipeline.fit("2026-01-03")
    assert pipeline.fit("2026-01-03") == codes
    assert pipeline.rows() == rows_before


VALUES = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 3), max_size=4)


@settings(max_examples=30)
@given(days=st.lists(VALUES, min_size=1, max_size=5), data=st.data())
def test_no_value_of_a_dataset_ever_gets_another_code(
    days: list[dict[str, int]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any files damaged, any datasets gone: codes that a dataset still has stay, and no code is given twice."""
    pipeline = Pipeline(tmp_path_factory.mktemp("days"))
    codes: dict[str, int] = {}
    for number, values in enumerate(days):
        codes |= pipeline.fit(f"2026-01-{number + 1:02d}", {"word": values, "user": {}})["word"]
    with_files = [c.version for c in DeltaLog(local(pipeline.table)).commits() if c.adds]
    for version in data.draw(st.sets(st.sampled_from(with_files)) if with_files else st.just(set[int]())):
        DAMAGE[data.draw(st.sampled_from(sorted(DAMAGE)))](pipeline.file(version))
    for ds in data.draw(st.sets(st.sampled_from(sorted(pipeline.datasets)))):
        del pipeline.datasets[ds]
    saved = {v for vocabularies in pipeline.datasets.values() for v in vocabularies["word"].column("value").to_pylist()}
    with suppress(UserError):  # codes between others are in no dataset
        after = pipeline.fit("2026-02-01", {"word": data.draw(VALUES), "user": {}})["word"]
        assert {v: c for v, c in after.items() if v in saved} == {v: c for v, c in codes.items() if v in saved}
        assert sorted(after.values()) == list(range(2, 2 + len(after)))
