"""Run a command as the driver of a standalone cluster of Spark, and say how it ends: `run_command.py WORD...`.

Spark's master has Python programs for drivers and knows no exit codes but 0: the last line of the driver's log tells
it (airflow_dags/headrace_airflow/cluster.py). The command opens its own Spark session, where it needs one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from headrace.jobs.process import when_parent_ends

#: The JVM that has started this program is not for the command's own session.
_GATEWAY = ("PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET", "PYTHONPATH")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, its output to standard output; returns its exit code, 128 + N where signal N has ended it."""
    words = list(sys.argv[1:] if argv is None else argv)
    environment = {name: value for name, value in os.environ.items() if name not in _GATEWAY}
    with subprocess.Popen(words, env=environment, stderr=subprocess.STDOUT) as command:
        signal.signal(signal.SIGTERM, lambda *_: command.terminate())
        # A driver that the master or the worker kills must not leave its command at work.
        when_parent_ends(command.terminate)
        code = command.wait()
    code = code if code >= 0 else 128 - code
    print(f"headrace ends with exit code {code}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
