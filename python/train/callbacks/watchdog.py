"""The stall watchdog: each rank writes a heartbeat to a file, and none waits for ever for one that is silent.

    ranks-TOKEN/rank-00001.json    {"rank": 1, "host": "node7", "pid": 4711, "step": 63, "phase": "train",
                                    "waiting": "all_reduce_sum", "waited": 12.1, "beat": 60}

A thread of each rank writes its file every second, also while its loop waits in a message. Where that takes longer than
the deadline, the rank looks which files of the others still change, leaves a message that names the missing, and ends
its process: then Horovod ends the others, and the launch goes on from the last checkpoint. Horovod's own limits
(`HOROVOD_STALL_SHUTDOWN_TIME_SECONDS`, `HOROVOD_GLOO_TIMEOUT_SECONDS`; headrace.train.launch) are set behind this
one: they know tensors, not steps.
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
#: A file that has not changed for so many beats is that of a rank that is dead, stopped or cut off.
_SILENT_BEATS = 3


class Watchdog(Callback):
    """Writes this rank's heartbeat and looks for stalls. A request to stop is noted here, too: by a signal or the
    driver's file.

    Args:
        folder: of the ranks' files, on a file system that all share; None: nobody watches.
        world: the ranks.
        deadline: seconds that a message may take.
        stop_file: the driver makes it to ask for a stop.
        on_stall: called with the message; default: leave it in `folder` and end the process.
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
        #: By rank, its last heartbeat, and when that was new to this rank.
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
        """Take SIGTERM as a request to stop after the step."""
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
            self._write_heartbeat(None, 0.0)  # a rank that dies in its first second is known, too
        while not self._closed.wait(self._interval):
            self._beats += 1
            waiting = self._waiting
            waited = time.monotonic() - waiting[1] if waiting else 0.0
            with suppress(OSError, StoreRefused):  # a full disk is the checkpoints' to report
                self._write_heartbeat(waiting[0] if waiting else None, waited)
            with suppress(OSError, StoreRefused):  # it is away: what is written there says so
                if self._stop_file is not None and self._stop_file.exists():
                    self.stop_requested = True
            if waiting and waited > 0.3 * self._deadline:
                self._read_heartbeats()
            if waiting and waited > self._deadline:
                message = self._stall_message(waiting[0], waited)
                # Files were written and read since the look at the message: it may have come.
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
