"""Two logs by day, as conf/pipelines/attribution.yaml reads them, from TalkingData's file of clicks.

    python scripts/attribution_days.py                         # the sample in ../shared/data/talkingdata
    python scripts/attribution_days.py /data/train.csv --home /data/headrace

The competition's file says of a click in one row whether an install followed, and when. A log has the click when it is
made and the install when it happens: so the days of landing/attribution/clicks are those of `click_time`, with no word
of installs, and the days of landing/attribution/installs those of `attributed_time`. Prints what it wrote.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from headrace.config.installation import checkout
from headrace.config.workspace import Workspace

SAMPLE = checkout().parent / "shared" / "data" / "talkingdata" / "train_sample.csv"
KEYS = ("ip", "app", "device", "os", "channel")
#: By log: the column of its time.
LOGS = {"clicks": "click_time", "installs": "attributed_time"}


def write_days(source: Path, ws: Workspace) -> Counter[tuple[str, str]]:
    """Write the landing files of all days of a file, which is read once; (log, day): rows.

    A file that is there is replaced; all of them appear when the last row is written.
    """
    counts: Counter[tuple[str, str]] = Counter()
    files: dict[tuple[str, str], TextIO] = {}
    with ExitStack() as stack, source.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            for log, time in LOGS.items():
                if not row[time]:
                    continue
                day = log, row[time].split(" ")[0]
                if day not in files:
                    files[day] = stack.enter_context(_landing_file(ws, *day))
                files[day].write(",".join((*(row[k] for k in KEYS), row[time])) + "\n")
                counts[day] += 1
    return counts


@contextmanager
def _landing_file(ws: Workspace, log: str, ds: str) -> Iterator[TextIO]:
    path = ws.landing("attribution") / log / ds / "part-0.csv"
    with path.new_file() as partial, partial.open("w", encoding="utf-8") as lines:
        lines.write(",".join((*KEYS, LOGS[log])) + "\n")
        yield lines


def main() -> None:
    """Write the files that the command line asks for."""
    title = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=title, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=SAMPLE, help="as the competition has it")
    parser.add_argument("--home", type=Path, default=Path("var"), metavar="FOLDER", help="the workspace")
    words = parser.parse_args()
    ws = Workspace(words.home)
    for (log, ds), rows in sorted(write_days(words.file, ws).items()):
        print(f"{ws.landing('attribution') / log / ds}: {rows:,} rows")


if __name__ == "__main__":
    main()
