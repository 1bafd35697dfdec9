"""The stall watchdog: each rank writes a heartbeat to a file, and no rank waits for ever for a silent one.

    ranks-TOKEN/rank-00001.json    {"rank": 1, "host": "node7", "pid": 4711, "step": 63, "phase": "train",
                                    "waiting": "all_reduce_sum", "waited": 12.1, "beat": 60}

A thread of each rank writes its file every second, also while the loop waits for a message. If that takes longer than
the deadline, the rank checks which files of other ranks still change, writes a message that names the missing ranks,
and ends its process. Horovod then ends the other ranks, and the launch resumes from the last checkpoint. Horovod's own
limits (`HOROVOD_STALL_SHUTDOWN_TIME_SECONDS`, `HOROVOD_GLOO_TIMEOUT_SECONDS`; headrace.train.launch) are longer: they
know tensors, not steps.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from headrace.comm import World
from headrace.storage import Location, StoreRefused
from headrace.train.callbacks.base import Callback, StepEnd

#: Exit code of a rank that gave up waiting.
EXIT_STALLED = 75
_HEARTBEAT_SECONDS = 1.0
_STALLED = "stalled"
#: Phases of the loop that the heartbeat names.
_PHASES = {"step": "train", "evaluate": "evaluate", "checkpoint": "checkpoint"}
#: Beats without a change of its file after which a rank counts as dead, stopped or cut off.
_SILENT_BEATS = 3


class Watchdog(Callback):
    """Callback that writes this rank's heartbeat, detects stalls, and notes requests to stop.

    A request to stop is a signal, or a file of the driver.

    Args:
        folder: folder of the ranks' files, on a file system that all share; None: no watching.
        world: the ranks.
        deadline: seconds that a message may take.
        stop_file: file that the driver creates to request a stop.
        on_stall: called with the message; default: write it to `folder` and end the process.
    """

    def __init__(
        self,
        folder: Location | None = None,
        world: World = World(),
        deadline: float = 600.0,
        stop_file: Location | None = None,
        on_stall: Callable[[str], None] | None = None,
    ) -> None:
        self._folder, self._world, self._deadline, self._stop_file = folder, world, deadline, stop_file
        self._on_stall = on_stall or self._exit
        #: Whether this rank was asked to stop. All ranks agree in the next step's all-reduce.
        self.stop_requested = False
        self.step = 0
        #: When each phase first began, seconds since 1970.
        self.phase_starts: dict[str, float] = {}
        self.phase = "start"
        self._waiting: tuple[str, float] | None = None
        self._closed = threading.Event()
        self._beats = 0
        self._interval = min(_HEARTBEAT_SECONDS, deadline / 5)
        #: Last heartbeat of each rank, and the time at which this rank first saw it.
        self._heartbeats: dict[int, tuple[str, float]] = {}
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        if folder is not None:
            folder.make_dir()
            self._thread.start()

    @property
    def phase(self) -> str:
        """The rank's phase: start, restore, train, evaluate, checkpoint, save."""
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase = phase
        self.phase_starts.setdefault(phase, time.time())

    def on_phase_start(self, phase: str) -> None:
        if phase in _PHASES:
            self.phase = _PHASES[phase]

    def on_step_end(self, step: StepEnd) -> None:
        self.step = step.step

    def on_signals(self) -> None:
        """Treat SIGTERM as a request to stop after the step."""
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        self.stop_requested = True

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    @contextmanager
    def waiting(self, message: str) -> Iterator[None]:
        """Mark this rank as waiting in a collective for the length of the block."""
        self._waiting = message, time.monotonic()
        try:
            yield
        finally:
            self._waiting = None

    def _run(self) -> None:
        with suppress(OSError, StoreRefused):
            self._write_heartbeat(None, 0.0)  # now, for a rank that dies in its first second
        while not self._closed.wait(self._interval):
            self._beats += 1
            waiting = self._waiting
            waited = time.monotonic() - waiting[1] if waiting else 0.0
            with suppress(OSError, StoreRefused):  # the writer of checkpoints reports a full disk
                self._write_heartbeat(waiting[0] if waiting else None, waited)
            with suppress(OSError, StoreRefused):  # it is away: what is written there says so
                if self._stop_file is not None and self._stop_file.exists():
                    self.stop_requested = True
            if waiting and waited > 0.3 * self._deadline:
                self._read_heartbeats()
            if waiting and waited > self._deadline:
                message = self._stall_message(waiting[0], waited)
                # The message may have arrived during the reading of files.
                if self._waiting is waiting:
                    self._on_stall(message)
                    return

    def _write_heartbeat(self, waiting: str | None, waited: float) -> None:
        assert self._folder is not None
        heartbeat_file(self._folder, self._world.rank).put_text(
            json.dumps(
                {
                    "rank": self._world.rank,
                    "host": socket.gethostname(),
                    "pid": os.getpid(),
                    "step": self.step,
                    "phase": self.phase,
                    "waiting": waiting,
                    "waited": round(waited, 1),
                    "beat": self._beats,
                }
            )
        )

    def _read_heartbeats(self) -> None:
        assert self._folder is not None
        for rank in range(self._world.size):
            with suppress(OSError, StoreRefused):
                content = heartbeat_file(self._folder, rank).read_text()
                if self._heartbeats.get(rank, ("", 0.0))[0] != content:
                    self._heartbeats[rank] = content, time.monotonic()

    def _stall_message(self, message: str, waited: float) -> str:
        assert self._folder is not None
        missing = []
        for rank in range(self._world.size):
            if rank == self._world.rank:
                continue
            content, heard = self._heartbeats.get(rank, ("", 0.0))
            silent = time.monotonic() - heard
            if not content:
                missing.append(f"rank {rank} never reported")
            elif silent > _SILENT_BEATS * self._interval:
                missing.append(f"{describe(json.loads(content))}, and has not reported for {silent:.0f} s")
            elif json.loads(content)["waiting"] is None:
                missing.append(f"{describe(json.loads(content))}, and is at work there")
        everybody = "all other ranks wait as well: the network between them, or a bug"
        return (
            f"rank {self._world.rank} waited {waited:.0f} s at step {self.step} in {message} "
            f"(train.deadline_seconds: {self._deadline:g}); missing: {'; '.join(missing) or everybody}"
        )

    def _exit(self, message: str) -> None:
        assert self._folder is not None
        with suppress(OSError, StoreRefused):
            (self._folder / _STALLED).put_text(message)
        os._exit(EXIT_STALLED)


def heartbeat_file(folder: Location, rank: int) -> Location:
    """Return the file of a rank's heartbeat."""
    return folder / f"rank-{rank:05d}.json"


def describe(heartbeat: dict[str, Any]) -> str:
    """Return a rank's heartbeat as text for people."""
    process = f"process {heartbeat['pid']} on {heartbeat['host']}"
    return f"rank {heartbeat['rank']} ({process}) was at step {heartbeat['step']} ({heartbeat['phase']})"


def has_stalled(folder: Location) -> bool:
    """Return True if a rank of a launch has given up waiting for others."""
    return (folder / _STALLED).is_file()


def describe_failure(folder: Location) -> str:
    """Describe the ranks of a launch that failed: a stall's message, else the last phase and step of each."""
    with suppress(OSError, StoreRefused):
        return (folder / _STALLED).read_text()
    states = []
    for path in (p for p in folder.entries() if p.name.startswith("rank-")):
        with suppress(OSError, ValueError):
            states.append(describe(json.loads(path.read_text())))
    return "; ".join(states)
