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


class Here:
    """Of an operator: run a command, its output to the task's log, and stop it with the task."""

    pipeline: Pipeline
    _process: subprocess.Popen[str] | None = None

    def run_here(self, context: Context, argv: Sequence[str]) -> tuple[int, str]:
        """Run it to its end; its exit code and its last line."""
        env, last = environment(self.pipeline) | parent_variables(context), ""
        with subprocess.Popen(
            argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as self._process:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                self.log.info("%s", line.rstrip())  # type: ignore[attr-defined]
                last = line.strip() or last
        return self._process.returncode, last

    def stop_here(self) -> None:
        """Stop the command, where there is one."""
        if self._process is not None:
            self._process.terminate()
