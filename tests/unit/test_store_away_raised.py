"""A store that is away is told as that where what is damaged, gone or changed is told otherwise."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import PySparkException

from headrace.dataset.parquet import layout
from headrace.errors import EXIT_INCOMPLETE, UserError
from headrace.features.build import append
from headrace.features.build.stage import BuildFeatures
from headrace.features.workflow import saved
from headrace.lake.landing import LandingFile
from headrace.lake.sources import lines
from headrace.lake.told_errors import told
from headrace.models import saved_size
from headrace.storage import StoreAway, local
from headrace.storage.objects import calls
from headrace.train.loop import evaluation
from tests.storage_homes import memory_home


def away(*args: object, **named: object) -> Any:
    raise StoreAway("s3://b/a: the store is away")


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A place whose store does not answer."""
    found = memory_home(monkeypatch, tmp_path / "cache")
    for name in ("get_small", "head", "download", "list_below", "list_level"):
        monkeypatch.setattr(calls, name, away)
    return found


def context(home: Any) -> Any:
    return SimpleNamespace(ws=SimpleNamespace(locate=lambda name: home))


@pytest.mark.parametrize(
    "ask",
    [
        lambda home: LandingFile("a", home / "a", 1, 0).unchanged(),
        lambda home: saved._metadata(home / "a.parquet"),
        lambda home: saved._read(home / "a.parquet"),
        lambda home: append.open_base(context(home), SimpleNamespace(name="x")),  # type: ignore[arg-type]
        lambda home: BuildFeatures().verify(
            context(home),
            SimpleNamespace(output=lambda name: SimpleNamespace(name=name)),  # type: ignore[arg-type]
        ),
    ],
    ids=["landing", "metadata", "table", "base", "verify"],
)
def test_what_is_asked_of_a_store_that_is_away(home: Any, ask: Callable[[Any], object]) -> None:
    with pytest.raises(StoreAway):
        ask(home)


def test_the_size_of_a_saved_model(home: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_size, "needed_models", lambda folder: (folder,))
    with pytest.raises(StoreAway):
        saved_size.saved_rows_bytes(home)


def test_a_split_without_a_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "valid").mkdir()
    (tmp_path / "valid/a.parquet").touch()
    monkeypatch.setattr(layout, "stored_columns", lambda schema, carried: ())
    with pytest.raises(UserError, match="is not a whole Parquet file"):
        layout.open_split(local(tmp_path), "valid", None)  # type: ignore[arg-type]
    monkeypatch.setattr(layout.pq, "read_metadata", away)
    with pytest.raises(StoreAway):
        layout.open_split(local(tmp_path), "valid", None)  # type: ignore[arg-type]


def test_rows_that_a_model_is_measured_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank: Any = SimpleNamespace(_collective=SimpleNamespace(world=None), _model=SimpleNamespace(schema=None))
    monkeypatch.setattr(evaluation, "open_split", away)
    with pytest.raises(StoreAway):
        evaluation.Evaluations._unreadable(rank, local(tmp_path))


def test_a_landing_file_that_spark_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_quiet_tasks", lambda spark: nullcontext())
    file = SimpleNamespace(name="a.csv.gz")
    batch: Any = SimpleNamespace(spark=None, files=[("2026-01-01", file)], uri=lambda i: "s3://b/a.csv.gz")
    text = (
        "[FAILED_READ_FILE.NO_HINT] Encountered error while reading file s3://b/a.csv.gz. SQLSTATE: KD001\nCaused by: "
    )
    with pytest.raises(PySparkException) as raised, lines.damaged_file_named(batch):
        raise PySparkException(f"{text}java.net.SocketTimeoutException: read on s3://b/a.csv.gz: Read timed out")
    assert (told(raised.value) or ("", 0))[1] == EXIT_INCOMPLETE
    with pytest.raises(lines.FileDamaged), lines.damaged_file_named(batch):
        raise PySparkException(f"{text}java.io.EOFException: Unexpected end of input stream")


def test_a_fault_of_the_program_while_a_store_is_away_is_shown_with_its_trace() -> None:
    def while_away(error: Exception) -> Exception:
        try:
            try:
                away()
            except StoreAway:
                raise error  # noqa: B904
        except Exception as e:
            return e

    assert told(while_away(TypeError("of ours"))) is None
    for error in (UserError("damaged"), OSError("torn"), PySparkException("wrapped")):
        assert (told(while_away(error)) or ("", 0))[1] == EXIT_INCOMPLETE
