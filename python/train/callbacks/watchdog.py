"""Who is where: each rank says in a file how far it is, and none waits for ever for one that says nothing any more.

    ranks-TOKEN/rank-00001.json    {"rank": 1, "host": "node7", "pid": 4711, "step": 63, "doing": "train",
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
from pathlib import Path
from types import FrameType
from typing import Any

from headrace.storage import local
from headrace.world import World

#: Exit code of a rank that gave up waiting.
EXIT_STALLED = 75
_BEAT_SECONDS = 1.0
_STALLED = "stalled"
#: A file that has not changed for so many beats is that of a rank that is dead, stopped or cut off.
_SILENT_BEATS = 3


class Watch:
    """This rank's end. Also where a request to stop is noted, by a signal or by the driver's file.

    Args:
        folder: of the ranks' files, on a file system that all share; None: nobody watches.
        world: the ranks.
        deadline: seconds that a message may take.
        stop_file: the driver makes it to ask for a stop.
        stalled: what is called with the message; default: leave it in `folder` and end the process.
    """

    def __init__(
        self,
        folder: Path | None = None,
        world: World = World(),
        deadline: float = 600.0,
        stop_file: Path | None = None,
        stalled: Callable[[str], None] | None = None,
    ) -> None:
        self._folder, self._world, self._deadline, self._stop_file = folder, world, deadline, stop_file
        self._stalled = stalled or self._end
        #: Whether this rank was asked to stop. All ranks agree in the next step's all-reduce.
        self.is_asked_to_stop = False
        self.step = 0
        #: When the rank first began to do what, seconds since 1970.
        self.began: dict[str, float] = {}
        self.doing = "start"
        self._waiting: tuple[str, float] | None = None
        self._closed = threading.Event()
        self._beats = 0
        self._beat = min(_BEAT_SECONDS, deadline / 5)
        #: By rank, what its file last said, and when that was new to this rank.
        self._heard: dict[int, tuple[str, float]] = {}
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._thread.start()

    @property
    def doing(self) -> str:
        """What the rank is at: start, restore, train, evaluate, checkpoint, save."""
        return self._doing

    @doing.setter
    def doing(self, what: str) -> None:
        self._doing = what
        self.began.setdefault(what, time.time())

    def on_signals(self) -> None:
        """Take SIGTERM as a request to stop after the step."""
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        self.is_asked_to_stop = True

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    @contextmanager
    def waits(self, message: str) -> Iterator[None]:
        """This rank is in a collective for the length of the block."""
        self._waiting = message, time.monotonic()
        try:
            yield
        finally:
            self._waiting = None

    def _run(self) -> None:
        with suppress(OSError):
            self._say(None, 0.0)  # a rank that dies in its first second is known, too
        while not self._closed.wait(self._beat):
            self._beats += 1
            waiting = self._waiting
            waited = time.monotonic() - waiting[1] if waiting else 0.0
            with suppress(OSError):  # a full disk is the checkpoints' to report
                self._say(waiting[0] if waiting else None, waited)
            if self._stop_file is not None and self._stop_file.exists():
                self.is_asked_to_stop = True
            if waiting and waited > 0.3 * self._deadline:
                self._listen()
            if waiting and waited > self._deadline:
                accusation = self._accuse(waiting[0], waited)
                # Files were written and read since the look at the message: it may have come.
                if self._waiting is waiting:
                    self._stalled(accusation)
                    return

    def _say(self, waiting: str | None, waited: float) -> None:
        assert self._folder is not None
        path = rank_file(self._folder, self._world.rank)
        partial = path.with_suffix(".partial")
        partial.write_text(
            json.dumps(
                {
                    "rank": self._world.rank,
                    "host": socket.gethostname(),
                    "pid": os.getpid(),
                    "step": self.step,
                    "doing": self.doing,
                    "waiting": waiting,
                    "waited": round(waited, 1),
                    "beat": self._beats,
                }
            )
        )
        partial.replace(path)

    def _listen(self) -> None:
        assert self._folder is not None
        for rank in range(self._world.size):
            with suppress(OSError):
                said = rank_file(self._folder, rank).read_text()
                if self._heard.get(rank, ("", 0.0))[0] != said:
                    self._heard[rank] = said, time.monotonic()

    def _accuse(self, message: str, waited: float) -> str:
        assert self._folder is not None
        missing = []
        for rank in range(self._world.size):
            if rank == self._world.rank:
                continue
            said, heard = self._heard.get(rank, ("", 0.0))
            silent = time.monotonic() - heard
            if not said:
                missing.append(f"rank {rank} never reported")
            elif silent > _SILENT_BEATS * self._beat:
                missing.append(f"{describe(json.loads(said))}, and has not reported for {silent:.0f} s")
            elif json.loads(said)["waiting"] is None:
                missing.append(f"{describe(json.loads(said))}, and is at work there")
        everybody = "all other ranks wait as well: the network between them, or a bug"
        return (
            f"rank {self._world.rank} waited {waited:.0f} s at step {self.step} in {message} "
            f"(train.deadline_seconds: {self._deadline:g}); missing: {'; '.join(missing) or everybody}"
        )

    def _end(self, message: str) -> None:
        assert self._folder is not None
        with suppress(OSError):
            local(self._folder / _STALLED).put_text(message)
        os._exit(EXIT_STALLED)


def rank_file(folder: Path, rank: int) -> Path:
    """Where a rank says how far it is."""
    return folder / f"rank-{rank:05d}.json"


def describe(said: dict[str, Any]) -> str:
    """What a rank's file says, as people read it."""
    return f"rank {said['rank']} (process {said['pid']} on {said['host']}) was at step {said['step']} ({said['doing']})"


def has_stalled(folder: Path) -> bool:
    """Whether a rank of a launch has given up waiting for others."""
    return (folder / _STALLED).is_file()


def last_words(folder: Path) -> str:
    """What is known of the ranks of a launch that failed: a stall's message, else how far each was."""
    with suppress(OSError):
        return (folder / _STALLED).read_text(encoding="utf-8")
    found = []
    for path in sorted(folder.glob("rank-*.json")):
        with suppress(OSError, ValueError):
            found.append(describe(json.loads(path.read_text())))
    return "; ".join(found)
