"""The queue of a model: each request gets its own rows, whatever it was merged with."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: run `make onnx`")
from headrace.export.serve.model import Batcher, Model
from headrace.export.serve.options import Metrics, RequestError, RequestLimits
from headrace.export.serve.tensors import Array, TensorSpec, blocks_of, inputs_of, key_of, merged


class SumOfRows(Model):
    """A model that adds up each row of a list, refuses rows that begin with -1, and counts its runs."""

    def __init__(self, by_row: bool = True) -> None:
        super().__init__("m", 1, [TensorSpec("x", "INT64", (-1, -1))], [TensorSpec("y", "INT64", (-1,))], by_row)
        self.runs: list[int] = []
        self.threads: list[threading.Thread] = []

    def run(self, feeds: Sequence[Array]) -> list[Array]:
        (x,) = feeds
        self.runs.append(len(x))
        self.threads.append(threading.current_thread())
        if (x[:, 0] == -1).any():
            raise RequestError(400, "a row begins with -1")
        return [x.sum(axis=1)]


def submit(batcher: Batcher, x: Array, timeout: float = 60) -> asyncio.Future[list[Array]]:
    blocks = blocks_of([x])
    return batcher.submit(blocks, len(x), key_of(blocks), timeout)


def answers_of(model: Model, requests: Sequence[Array], timeout: float, **limits: float) -> list[object]:
    """Answers to requests that are there at once, in order; errors among them."""

    async def ask() -> list[object]:
        with ThreadPoolExecutor(1) as executor:
            batcher = Batcher(model, RequestLimits(**limits), executor, Metrics().of_model("m", 1))  # type: ignore[arg-type]
            waiting = [submit(batcher, x, timeout) for x in requests]
            results = await asyncio.gather(*waiting, return_exceptions=True)
            assert batcher.idle
            return [x if isinstance(x, BaseException) else x[0] for x in results]

    return asyncio.run(ask())


@settings(max_examples=100, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3), st.booleans()), min_size=1, max_size=30),
    batch_rows=st.integers(1, 40),
    delay=st.sampled_from([0.0, 0.001]),
    by_row=st.booleans(),
)
def test_each_request_gets_its_own_rows(
    shapes: list[tuple[int, int, bool]], batch_rows: int, delay: float, by_row: bool
) -> None:
    rng = np.random.default_rng(len(shapes))
    requests = [rng.integers(0, 1000, (rows, length)) for rows, length, _ in shapes]
    for request, (*_, wrong) in zip(requests, shapes, strict=True):
        if wrong:
            request[-1, 0] = -1
    model = SumOfRows(by_row)
    answers = answers_of(model, requests, 60, batch_rows=batch_rows, batch_delay=delay)
    for request, answer in zip(requests, answers, strict=True):
        if (request[:, 0] == -1).any():
            assert isinstance(answer, RequestError)
        else:
            assert np.array_equal(answer, request.sum(axis=1))  # type: ignore[arg-type]
    largest = max(len(r) for r in requests)
    assert max(model.runs) <= max(batch_rows, largest)
    if not any(wrong for *_, wrong in shapes) and not by_row:
        assert model.runs == [len(r) for r in requests]


def test_requests_of_one_length_are_one_run() -> None:
    model = SumOfRows()
    requests = [np.ones((2, 1 + n % 2), np.int64) for n in range(20)]
    answers_of(model, requests, 60)
    assert model.runs == [20, 20]


def test_what_has_waited_too_long_is_not_run() -> None:
    model = SumOfRows()
    errors = answers_of(model, [np.ones((2, 1), np.int64)] * 3, 1e-9)
    assert [(e.status, e.retry_after) for e in errors] == [(503, 1)] * 3  # type: ignore[attr-defined]
    assert model.runs == []


class OutOfMemory(SumOfRows):
    """Has memory for few rows only."""

    def run(self, feeds: Sequence[Array]) -> list[Array]:
        if len(feeds[0]) > 4:
            raise MemoryError("no room")
        return super().run(feeds)


@pytest.mark.parametrize("known", [False, True], ids=["thread", "at once"])
def test_a_run_that_fails_by_any_error_is_answered(known: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Merged it has no memory, nor has the largest request alone; the others, and those behind, are answered."""

    async def ask() -> list[object]:
        with ThreadPoolExecutor(1) as executor:
            batcher = Batcher(OutOfMemory(), RequestLimits(batch_rows=8), executor, Metrics().of_model("m", 1))
            if known:
                await submit(batcher, np.ones((1, 1), np.int64))
            requests = [np.full((rows, 1), rows) for rows in (3, 4, 5, 2, 2)]
            waiting = [submit(batcher, x) for x in requests]
            results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 30)
            assert batcher.idle
            return [x.status if isinstance(x, RequestError) else x[0].tolist() for x in results]  # type: ignore[index]

    assert asyncio.run(ask()) == [[3] * 3, [4] * 4, 500, [2] * 2, [2] * 2]
    assert "no room" in caplog.text


@pytest.mark.parametrize("by_row", [False, True])
def test_runs_of_unknown_length_leave_the_loop_to_others(by_row: bool) -> None:
    """The first one, and all of models whose requests have no rows to tell their sizes by."""
    model, main_thread = SumOfRows(by_row), threading.current_thread()

    async def ask() -> None:
        with ThreadPoolExecutor(1) as executor:
            batcher = Batcher(model, RequestLimits(), executor, Metrics().of_model("m", 1))
            for _ in range(3):
                await submit(batcher, np.ones((2, 1), np.int64))

    asyncio.run(ask())
    assert [thread is main_thread for thread in model.threads] == [False, by_row, by_row]


def test_answers_are_written_before_the_next_run() -> None:
    """An answer is written at the end of the turn of the loop in which it is handed over."""
    events: list[str] = []

    class ReportingModel(SumOfRows):
        def run(self, feeds: Sequence[Array]) -> list[Array]:
            events.append(f"run of {len(feeds[0])}")
            return super().run(feeds)

    async def ask() -> None:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as executor:
            batcher = Batcher(ReportingModel(), RequestLimits(batch_rows=2), executor, Metrics().of_model("m", 1))
            await submit(batcher, np.ones((1, 1), np.int64))  # how long a row takes
            events.clear()
            waiting = [submit(batcher, np.ones((2, 1), np.int64)) for _ in range(2)]
            waiting[0].add_done_callback(lambda _: loop.call_soon(events.append, "written"))
            # One that comes while the last answers are under way.
            waiting[1].add_done_callback(lambda _: waiting.append(submit(batcher, np.ones((1, 1), np.int64))))
            waiting[1].add_done_callback(lambda _: loop.call_soon(events.append, "written"))
            await asyncio.gather(*waiting)
            await waiting[2]

    asyncio.run(ask())
    assert events == ["run of 2", "written", "run of 2", "written", "run of 1"]


def test_blocks_are_inputs_behind_each_other() -> None:
    rng = np.random.default_rng(1)
    requests = [(rng.integers(0, 9, (3, rows)), rng.normal(size=(1, rows, 2))) for rows in (4, 1, 2)]
    model_inputs = inputs_of(merged(requests))
    assert [x.flags.c_contiguous for x in model_inputs] == [True] * 4
    for i, x in enumerate(model_inputs):
        assert np.array_equal(x, np.concatenate([inputs_of(r)[i] for r in requests]))
    scalar = np.array(3.5)
    assert [(type(x), x.shape) for x in inputs_of(blocks_of([scalar, np.zeros(2)]))] == [
        (np.ndarray, ()),
        (np.ndarray, (2,)),
    ]
    assert key_of(requests[0]) == key_of(requests[1]) == ((3,), (1, 2))
