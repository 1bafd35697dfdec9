"""The pipelines' environment as the DAGs see it, with stages that take no time: `headrace`, `spark-submit`.

A stage of a day writes one file whose content follows from what it reads, as real ones do: a model from the model
before it and the day's data, scores from the champion. What they answer is said by files of the folder `orders`:
`PIPELINE.DS.STAGE` holds exit codes, one a try, or seconds to work for (s5), or a stage to
wait for within its work (`with:train`). It is a program by itself, as it runs
where neither Airflow nor headrace is; `make` installs it. A program of a stage's name in the folder is
run in its turn, with the day.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

#: As headrace.config.stages: a lease of their own.
LEASE_STAGES = ("train", "baseline")


def make(folder: Path) -> Path:
    """Install it in a folder; returns the path of the "interpreter", beside which its commands are."""
    for name in ("headrace", "spark-submit", "python"):
        path = folder / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!{sys.executable} -S\nimport runpy, sys\nsys.argv.insert(1, {name!r})\n")
        with path.open("a") as file:
            file.write(f"sys.path.insert(0, {str(folder)!r})\nrunpy.run_path({__file__!r}, run_name='__main__')\n")
        path.chmod(0o755)
    (folder / "orders").mkdir(exist_ok=True)
    return folder / "bin" / "python"


def order(folder: Path, pipeline: str, ds: str, stage: str, text: str) -> None:
    """Have a stage of a day answer so."""
    (folder / "orders" / f"{pipeline}.{ds}.{stage}").write_text(text)


def calls(folder: Path) -> list[dict[str, Any]]:
    """Return the calls that were started, in order of their beginning."""
    path = folder / "calls"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> int:
    folder, program, argv = Path(sys.path[0]), sys.argv[1], sys.argv[2:]
    if program == "python" and argv[0].endswith("check_specs.py"):
        # What stages are given here needs no data, nor columns.
        print(json.dumps({path: {"fault": None, "stages": []} for path in argv[1:]}))
        return 0
    if program == "python":
        os.execv(sys.executable, [sys.executable, *argv])
    home = Path(argv[argv.index("--home") + 1])
    if argv[0] == "spark-properties":
        path = home / f"{Path(argv[1]).stem}.properties"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("spark.app=stub\n")
        print(path)
        return 0
    if argv[0] == "run" and "--dry-run" not in argv:  # of a pod or a driver: the stage's verdict is its exit code
        argv[0] = argv[argv.index("--from") + 1]
        program = "run"
    if program == "spark-submit":
        argv = argv[next(i for i, word in enumerate(argv) if word.endswith(".py")) + 1 :]
    pipeline = Path(argv[1]).stem
    ds = argv[argv.index("--ds") + 1] if "--ds" in argv else "-"
    stage = argv[0] if "--dry-run" not in argv else "look"
    note = {"stage": stage, "pipeline": pipeline, "ds": ds, "argv": sys.argv[1:], "env": dict(os.environ)}
    note |= {"t": time.time(), "pid": os.getpid()}
    with (folder / "calls").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(note) + "\n")
    orders = folder / "orders" / f"{pipeline}.{ds}.{stage}"
    tries = folder / f"{pipeline}.{ds}.{stage}.tries"
    with tries.open("a") as file:
        file.write("x")
        number = file.tell()
    if stage == "look":
        marker = folder / "orders" / f"{pipeline}.{ds}.late"
        print(f"{ds} is not complete yet: the marker is not there" if marker.exists() else "1 of 1 stages would run")
        return 75 if marker.exists() else 0
    answers = orders.read_text().split() if orders.exists() else []
    word = answers[min(number, len(answers)) - 1] if answers else "0"
    if program == "headrace" and stage == "gate":
        return int(word)
    # The gate's own verdict is in its manifest; commands tell it.
    if word.isdigit() and int(word) and stage != "gate":
        print(f"error: {stage} of {pipeline} answers {word}", file=sys.stderr)
        return int(word)
    leases = [stage] if stage in LEASE_STAGES else ["pipeline", *LEASE_STAGES]
    lock_files = []
    for lease in leases:
        lock_files.append((folder / f"{pipeline}.{lease}.lock").open("w"))
        try:
            fcntl.flock(lock_files[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"error: another run of pipeline '{pipeline}' is at work", file=sys.stderr)
            return 69
    if word.startswith("s"):
        time.sleep(float(word[1:]))
    hook = folder / stage
    if hook.exists() and subprocess.run([hook, ds], check=False).returncode:
        return 1
    if word.startswith("with:"):
        meet(folder, pipeline, ds, stage, word.removeprefix("with:"))
    work(home, pipeline, ds, stage)
    return int(word) if program == "run" and stage == "gate" else 0


def meet(folder: Path, pipeline: str, ds: str, stage: str, other_stage: str) -> None:
    """Go on when another stage is at work, too."""
    (folder / f"{pipeline}.{ds}.{stage}.here").touch()
    for _ in range(1200):
        if (folder / f"{pipeline}.{ds}.{other_stage}.here").exists():
            return
        time.sleep(0.1)
    raise TimeoutError(f"{stage} is alone")


def work(home: Path, pipeline: str, ds: str, stage: str) -> None:
    """Write what the stage makes."""
    outputs = home / "made" / pipeline
    outputs.mkdir(parents=True, exist_ok=True)
    read = [stage, ds]
    if stage == "train":
        earlier_files = sorted(p for p in outputs.glob("*.train") if p.name[:10] < ds)
        read += [p.read_text() for p in earlier_files[-1:]]
    elif stage == "promote":
        read += [(outputs / f"{ds}.train").read_text()]
    elif stage == "score":
        champions = sorted(p for p in outputs.glob("*.promote") if p.name[:10] <= ds)
        read += [p.read_text() for p in champions[-1:]]
    elif stage == "publish":
        read += [(outputs / f"{ds}.score").read_text()]
    text = hashlib.sha256("\n".join(read).encode()).hexdigest()
    (outputs / f".{ds}.{stage}").write_text(text)
    (outputs / f".{ds}.{stage}").replace(outputs / f"{ds}.{stage}")


if __name__ == "__main__":
    sys.exit(main())
