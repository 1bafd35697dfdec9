"""How far training is: written by rank 0 to a file, shown by the driver while the ranks run.

A file, because Horovod forwards the ranks' standard output in blocks of 64 KiB: minutes of silence, then all at once.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, TextIO

log = logging.getLogger("headrace.train")
_BAR = 24
_POLL_SECONDS = 0.25


@dataclass(frozen=True)
class Tick:
    """One message of the chief."""

    #: evaluated: the loop has looked at the split `valid` on its way, and found `metrics`.
    phase: Literal["train", "evaluated", "evaluate", "save"]
    step: int = 0
    total: int = 0
    epoch: int = 0
    epochs: int = 0
    #: Mean loss of the last step's global batch.
    loss: float = 0.0
    #: Mean since this run began, evaluations and checkpoints included.
    samples_per_s: float = 0.0
    seconds_left: float = 0.0
    metrics: dict[str, float | None] | None = None


def show(tick: Tick) -> str:
    """A message as people read it."""
    if tick.phase == "evaluate":
        return "evaluating"
    if tick.phase == "save":
        return "saving the model"
    filled = _BAR * tick.step // max(1, tick.total)
    minutes, seconds = divmod(round(tick.seconds_left), 60)
    return (
        f"[{'#' * filled}{'.' * (_BAR - filled)}] epoch {tick.epoch}/{tick.epochs}  step {tick.step}/{tick.total}  "
        f"loss {tick.loss:.4f}  {tick.samples_per_s:,.0f} samples/s  {minutes}:{seconds:02d} left"
    )


class Speaker(logging.Handler):
    """Rank 0's end: progress, and as a logging handler its log lines, one JSON object a line."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  (lives as long as the rank)

    def say(self, tick: Tick) -> None:
        self._write({"tick": asdict(tick)})

    def emit(self, record: logging.LogRecord) -> None:
        self._write({"text": record.getMessage(), "level": record.levelno})

    def _write(self, message: dict[str, object]) -> None:
        self._file.write(json.dumps(message) + "\n")


class Console:
    """What people see: one bar that rewrites itself on a terminal, elsewhere a log line every `every` seconds."""

    def __init__(self, out: TextIO | None = None, every: float = 5.0) -> None:
        self._out = out or sys.stderr
        self._terminal = self._out.isatty()
        self._every = every
        self._said = -every
        self._phase = ""
        self._open = False

    def tick(self, tick: Tick) -> None:
        if tick.phase == "evaluated":
            return  # the chief's log says it
        now = time.monotonic()
        last = tick.step == tick.total
        if self._terminal and tick.phase == "train":
            self._out.write(f"\r{show(tick)}\x1b[K")
            self._out.flush()
            self._open = True
            if last:
                self.end()
        elif now - self._said >= self._every or tick.phase != self._phase or last:
            self.end()
            self._said = now
            log.info("%s", show(tick))
        self._phase = tick.phase

    def text(self, text: str, level: int = logging.INFO) -> None:
        self.end()
        log.log(level, "%s", text)

    def end(self) -> None:
        """Leave the bar's line."""
        if self._open:
            self._out.write("\n")
            self._out.flush()
            self._open = False


class Follower:
    """The driver's end: reads the file as it grows, in a thread, for the length of a `with` block.

    Args:
        path: the speaker's file; it may not be there yet.
        on_tick: called with each message, before it is shown.
    """

    def __init__(self, path: Path, console: Console, on_tick: Callable[[Tick], None] = lambda tick: None) -> None:
        self._path, self._console, self._on_tick = path, console, on_tick
        self._offset = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self._console.end()

    def _follow(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            self._read()
        self._read()

    def _read(self) -> None:
        try:
            with open(self._path, "rb") as f:
                f.seek(self._offset)
                content = f.read()
        except FileNotFoundError:
            return
        whole = content.rfind(b"\n") + 1
        self._offset += whole
        for line in content[:whole].splitlines():
            message = json.loads(line)
            if "tick" in message:
                tick = Tick(**message["tick"])
                self._on_tick(tick)
                self._console.tick(tick)
            else:
                self._console.text(message["text"], message["level"])
