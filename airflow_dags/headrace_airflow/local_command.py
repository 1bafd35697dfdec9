"""Commands of `headrace` as processes of a task, where the task's machine has the workspace."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace_airflow.lineage import parent_variables
from headrace_airflow.outside import environment
from headrace_airflow.pipelines import Pipeline

if TYPE_CHECKING:
    from airflow.sdk import Context

#: What a command has to end its ranks and give its lease back.
_GRACE_SECONDS = 30.0


class LocalCommand:
    """Operator part that runs a command, writes its output to the task's log, and stops it with the task."""

    pipeline: Pipeline
    _process: subprocess.Popen[str] | None = None

    def run_locally(self, context: Context, argv: Sequence[str]) -> tuple[int, str]:
        """Run it to its end; its exit code and its last line."""
        env, last = environment(self.pipeline) | parent_variables(context), ""
        with subprocess.Popen(
            argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as self._process:
            assert self._process.stdout is not None
            try:
                for line in self._process.stdout:
                    self.log.info("%s", line.rstrip())  # type: ignore[attr-defined]
                    last = line.strip() or last
            except BaseException:
                # A timeout of the task: the end of the block would wait for the command.
                self.stop_process()
                _end(self._process)
                raise
        return self._process.returncode, last

    def stop_process(self) -> None:
        """Stop the command, where there is one."""
        if self._process is not None:
            self._process.terminate()


def _end(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
