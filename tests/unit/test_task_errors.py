"""Errors of Spark's Python tasks become the ones that were raised, by the text that reaches the driver."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import PySparkException

from headrace.errors import (
    EXIT_BUSY,
    EXIT_FAILURE,
    EXIT_INCOMPLETE,
    EXIT_REFUSED,
    EXIT_USER_ERROR,
    BusyError,
    RefusedError,
    UserError,
)
from headrace.errors.stores import ChangedInPlace
from headrace.errors.translate import exit_message, own_error, own_errors
from headrace.features.vocabulary.delta_table import CodesOvertaken
from headrace.jobs import run_stage
from headrace.storage import LeaseLost, StoreAway, StoreError
from headrace.train.job import Diverged

_STACK = (
    "\n\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:581)\n"
)


def of_task(work: Callable[[], object]) -> str:
    """Return a task's trace as it comes to the driver."""
    try:
        work()
    except Exception:
        return traceback.format_exc()
    raise AssertionError("nothing was raised")


def raising(error: BaseException) -> Callable[[], object]:
    def work() -> None:
        raise error

    return work


def job(trace: str) -> PySparkException:
    """A job that has failed with it, which says it twice: the first with what has become of the stage."""
    return PySparkException(
        "An error occurred while calling o1.save.\n: org.apache.spark.SparkException: Job aborted due to stage "
        "failure: Task 0 in stage 1.0 failed 4 times, most recent failure: Lost task 0.3 in stage 1.0 (TID 4) (host "
        f"executor 1): org.apache.spark.api.python.PythonException: {trace}{_STACK}\nDriver stacktrace:{_STACK}"
        f"Caused by: org.apache.spark.api.python.PythonException: {trace}{_STACK}"
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("'price' is null in 3 rows"), EXIT_USER_ERROR),
        (UserError("two lines:\n\n  of one message"), EXIT_USER_ERROR),
        (StoreAway("s3://b/a: the store is away"), EXIT_INCOMPLETE),
        (LeaseLost("it was taken over"), EXIT_BUSY),
        (BusyError("another is at work"), EXIT_BUSY),
        (RefusedError("its audit"), EXIT_REFUSED),
        (CodesOvertaken("fit again"), EXIT_USER_ERROR),
    ],
)
def test_an_error_of_a_task_is_itself(error: UserError | StoreAway, code: int) -> None:
    trace = of_task(raising(error))
    task_error = own_error(job(trace))
    assert type(task_error) is type(error)
    assert exit_message(job(trace)) == (str(error), code)
    # As Spark SQL has it, without Java's part.
    assert exit_message(PySparkException(f"\n  An exception was thrown from the Python worker.\n{trace}")) == (
        str(error),
        code,
    )
    # With spark.sql.execution.pyspark.udf.hideTraceback.enabled.
    bare_trace = f"{type(error).__module__}.{type(error).__name__}: {error}\n"
    assert exit_message(job(bare_trace)) == (str(error), code)


def test_a_store_that_does_not_do_as_asked() -> None:
    message, code = exit_message(job(of_task(raising(StoreError("s3://b/a: 400 Bad Request"))))) or ("", 0)
    assert message.startswith("s3://b/a: 400 Bad Request. Run this again;")
    assert code == EXIT_FAILURE


def test_a_file_that_was_changed_in_place() -> None:
    error = job(of_task(raising(ChangedInPlace("s3://b/a was changed in place"))))
    message, code = exit_message(error) or ("", 0)
    assert (message.partition(". ")[0], code) == ("s3://b/a was changed in place", EXIT_USER_ERROR)
    with pytest.raises(UserError, match=r"^s3://b/a was changed in place\. Run this again"), own_errors():
        raise error


def test_one_that_is_made_of_more_than_its_message() -> None:
    assert exit_message(job(of_task(raising(Diverged("the loss is nan", 5))))) == ("the loss is nan", EXIT_USER_ERROR)


def test_that_a_store_is_away_is_told_whatever_became_of_it() -> None:
    def damaged() -> None:
        try:
            raise StoreAway("s3://b/a: the store is away")
        except OSError as e:
            raise UserError("a is damaged") from e

    def torn() -> None:
        try:
            raise StoreAway("s3://b/a: the store is away")
        except StoreAway:
            raise OSError("torn")  # noqa: B904

    for work in (damaged, torn):
        assert exit_message(job(of_task(work))) == ("s3://b/a: the store is away", EXIT_INCOMPLETE)


def test_a_fault_of_a_task_is_shown_with_its_trace() -> None:
    def while_handled() -> None:
        try:
            raise UserError("a is damaged")
        except UserError:
            raise TypeError("of ours")  # noqa: B904

    def while_away() -> None:
        try:
            raise StoreAway("s3://b/a: the store is away")
        except StoreAway:
            raise TypeError("of ours")  # noqa: B904

    def quoting() -> None:
        raise ValueError("headrace.errors.UserError: not raised\nheadrace.errors.UserError: nor this")

    for work in (while_handled, while_away, quoting, raising(KeyError("x"))):
        assert exit_message(job(of_task(work))) is None
    assert exit_message(PySparkException("headrace.errors.UserError: of a text that is no trace")) is None
    assert exit_message(job("Traceback (most recent call last):\nheadrace.errors.NoSuch: x\n")) is None


def test_a_block_raises_it_as_itself() -> None:
    error = job(of_task(raising(LeaseLost("it was taken over"))))
    with pytest.raises(LeaseLost, match=r"^it was taken over$"), own_errors():
        raise error
    unknown = job(of_task(raising(KeyError("x"))))
    with pytest.raises(PySparkException) as raised, own_errors():
        raise unknown
    assert raised.value is unknown
    # What is not Spark's is not touched: that a store was away it may say by what it was raised for.
    with pytest.raises(OSError, match="torn"), own_errors():
        raise OSError("torn") from StoreAway("s3://b/a: the store is away")


@pytest.mark.parametrize(
    ("error", "code"), [(UserError("'price' is null"), EXIT_USER_ERROR), (LeaseLost("it was taken over"), EXIT_BUSY)]
)
def test_the_program_of_a_stage_ends_with_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], error: UserError, code: int
) -> None:
    def fail(*args: object, **named: object) -> None:
        raise job(of_task(raising(error)))

    monkeypatch.setattr(run_stage, "run_stage", fail)
    monkeypatch.setattr(run_stage, "when_parent_ends", lambda end: None)
    with pytest.raises(SystemExit) as exit_info:
        run_stage.main(["report", "clicks", "--ds", "2026-01-08", "--home", str(tmp_path)])
    assert exit_info.value.code == code
    assert capfd.readouterr().err == f"error: {error}\n"
