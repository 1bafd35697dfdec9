"""Runs of headrace in processes that are forked from one with Spark at work and all modules imported.

By the command line a day starts a dozen programs and several JVMs, which take most of its time. Here `headrace ...`,
and each application that `headrace run` starts, is a fork that calls the same `main` with the same words and
environment. Plans, verification, locks, stages and ranks are those of the command line. What differs:

- one JVM serves all runs. Each application gets a session of its own there, and no cache of tables from another run;
- the session has the slots of the stage that needs most of them;
- Python workers of Spark serve one task each. What earlier homes have left in memory does not reach a run.

Whoever forks must have no threads that hold locks: read nothing with Arrow or delta-rs in the calling process.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO, TypeVar
from unittest import mock

import psutil
from pyspark import SparkContext, accumulators
from pyspark.sql import SparkSession

import headrace.cli
from headrace.config import Spark, Spec
from headrace.config.installation import checkout
from headrace.config.operations import local_slots
from headrace.config.stages import ORDER, STAGES
from headrace.config.workspace import Workspace
from headrace.jobs import run_stage, submit
from headrace.jobs.output import OnEvent, Sink, copy_output, ignore
from headrace.jobs.stages import load_stage, spark_settings_of
from headrace.lake.spark import session
from tests.support import SMALL, Run, command

_T = TypeVar("_T")
#: Imported before the first fork, besides what the stages name.
_MODULES = ("headrace.jobs.check_specs", "mlflow.tracking", "mlflow.store.tracking.sqlalchemy_store")


def in_fork(function: Callable[[], _T], seconds: float = 1200) -> _T:
    """Return what a function returns in a forked process; it is pickled.

    Raises:
        RuntimeError: the process ended without a result, with its trace on standard error, or was killed after
            `seconds`.
    """
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=lambda: sender.send(function()))
    child.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            for process in psutil.Process(child.pid).children(recursive=True):
                process.kill()
            child.kill()
            raise RuntimeError(f"no result in {seconds:.0f} s")
        result: _T = receiver.recv()
    except EOFError:
        raise RuntimeError("the forked process ended without a result: see its trace") from None
    finally:
        child.join()
    return result


class WarmRuns:
    """Spark and imports that forked runs share. Call it like `tests.support.headrace`."""

    def __init__(self, spec: Spec, folder: Path) -> None:
        """Start Spark.

        Args:
            spec: the pipeline that is run.
            folder: Spark's files; outside of the homes, which come and go.
        """
        for name in (*_MODULES, *(module for stage in ORDER for module in STAGES[stage].imports)):
            import_module(name.partition(":")[0])
        for stage in ORDER:
            if STAGES[stage].applies(spec):
                load_stage(stage)
        settings = [conf for stage in ORDER if (conf := spark_settings_of(stage, spec)) is not None]
        most = max(settings, key=lambda conf: local_slots(conf.master) or 0)
        properties = {
            **most.properties,
            "spark.python.worker.reuse": "false",
            "spark.python.daemon.module": "tests.fault.warm_daemon",
        }
        os.environ["PYTHONPATH"] = str(checkout())
        self._spark = session._start(most.model_copy(update={"properties": properties}), Workspace(folder), "warm")
        if session._worker is not None:
            session._worker.join()
        gc.freeze()

    def stop(self) -> None:
        """Stop Spark."""
        self._spark.stop()

    def __call__(self, home: Path, *words: str, settings: Mapping[str, Any] = SMALL) -> Run:
        """Run headrace to its end."""
        line = command(home, *words, settings=settings)
        output = io.BytesIO()

        def run() -> None:
            os.environ["COLUMNS"] = "160"
            sys.argv = ["headrace", *line[3:]]
            with self._patches():
                headrace.cli.main()

        with open(os.devnull, "w") as nowhere:
            code = _forked(run, None, output, nowhere)
        return Run(code, output.getvalue().decode(errors="replace"))

    @contextmanager
    def _patches(self) -> Iterator[None]:
        """Have applications be forks, and their sessions those of the shared JVM."""
        with (
            mock.patch.object(submit, "run_logged", _run_application),
            mock.patch.object(session, "_start", self._new_session),
            mock.patch.object(session, "_stop"),
        ):
            yield

    def _new_session(self, conf: Spark, ws: Workspace, name: str) -> SparkSession:
        context = self._spark.sparkContext
        _serve_accumulators(context)
        assert self._spark._jvm is not None
        # Tables of another home had the same paths.
        self._spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()
        self._spark.catalog.clearCache()
        return self._spark.newSession()


def _serve_accumulators(context: SparkContext) -> None:
    """Have the JVM send the values of accumulators to this process, as SparkContext does at its start."""
    gateway, jvm = context._gateway, context._jvm
    assert gateway is not None
    assert jvm is not None
    token = gateway.gateway_parameters.auth_token
    context._accumulatorServer = accumulators._start_update_server(token)
    address = context._accumulatorServer.server_address
    context._javaAccumulator = jvm.PythonAccumulatorV2(*address, token)
    context._jsc.sc().register(context._javaAccumulator)


def _run_application(
    line: Sequence[str], env: Mapping[str, str], sink: Sink, echo: TextIO, on_event: OnEvent = ignore
) -> int:
    """Do as `headrace.jobs.process.run_logged` does, for the program of the stages."""
    assert Path(line[1]).name == "run_stage.py", line
    return _forked(lambda: run_stage.main(line[2:]), env, sink, echo, on_event)


def _forked(
    main: Callable[[], object], env: Mapping[str, str] | None, sink: Any, echo: TextIO, on_event: OnEvent = ignore
) -> int:
    """Call a program's `main` in a fork; return its exit code, 128 + N where signal N killed it."""
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for fd in (1, 2):
                os.dup2(writer, fd)
            os.close(reader)
            if env is not None:
                os.environ.clear()
                os.environ.update(env)
            code = _exit_code(main)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    os.close(writer)
    with open(reader, "rb", buffering=0) as pipe:
        copy_output(pipe.fileno(), sink, echo, on_event)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _exit_code(main: Callable[[], object]) -> int:
    """Return the code that Python would exit with after a program's `main`."""
    try:
        main()
    except SystemExit as e:
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
            return 1
        return e.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
