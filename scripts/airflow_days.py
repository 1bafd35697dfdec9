"""Days of a pipeline under a real Airflow, a bad one in the middle, and what a reader of the warehouse sees meanwhile.

    .venv/bin/python -m scripts.airflow_days [--days 5]

Airflow's four processes, its database and the embedded PostgreSQL run on this machine, in a temporary folder.
The stages take no time (tests/dags/stub.py); what `publish` does is real: staging and the swap of a day, while a reader
asks for the newest day all the time. On the bad day the data are late, the training's process is killed, the machine of
the scheduler goes while the model is trained again, and the gate refuses the model. Prints a line for each task as it
ended, and one for each change that the reader saw.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import psycopg
import yaml

from headrace.config import Warehouse
from headrace.config.installation import checkout
from headrace.config.workspace import Workspace
from headrace.publish.postgres import server as warehouse
from headrace.publish.postgres import tables
from scripts.warehouse_reader import TABLE, look, publish
from tests.dags import stub
from tests.dags.service import Service
from tests.dags.test_service import kill_task, started

_SPEC = {
    "pipeline": "site",
    "source": {"path": "landing/site/{ds}/*"},
    **{section: {} for section in ("drift", "baseline", "gate", "score", "publish")},
}
_CURRENT = "SELECT count(*), min(model_version), max(model_version) FROM scores_current"


def clock() -> str:
    """Return the time of day, UTC."""
    return f"{datetime.now(UTC):%H:%M:%S}"


class WarehouseReader:
    """Asks for the newest day all the time, in a thread; keeps each change of what it saw."""

    def __init__(self, conn: warehouse.Connection) -> None:
        self._conn, self._stop = conn, threading.Event()
        self.reads, self.faults = 0, 0
        self.changes: list[tuple[str, str]] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        previous: object = None
        while not self._stop.wait(0.02):
            try:
                version, fault = look(self._conn, _CURRENT)
                newest = self._conn.execute("SELECT max(ds)::text FROM scores_current").fetchone()
            except psycopg.Error as e:
                version, fault, newest = "", str(e), None
            self.reads += 1
            self.faults += bool(fault) and version != "None"
            current = (version, newest, fault)
            if current != previous:
                previous = current
                day = newest[0] if newest else None
                message = f"the newest day is {day}, {version} rows, all of one version" if day else "no day yet"
                self.changes.append((clock(), f"{message}{f'; FAULT: {fault}' if fault and day else ''}"))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


@contextmanager
def environment(folder: Path, ds: list[str]) -> Iterator[tuple[Service, WarehouseReader]]:
    """Start the warehouse with its reader, and Airflow."""
    python = stub.make(folder)
    home = Workspace(folder / "warehouse")
    script = folder / "publish"
    line = f"{sys.executable} -m scripts.airflow_days --publish $1 --home {folder}"
    script.write_text(f"#!/bin/sh\ncd {checkout()} && exec {line}\n")
    script.chmod(0o755)
    (folder / "pipelines").mkdir()
    (folder / "pipelines" / "site.yaml").write_text(yaml.safe_dump(_SPEC))
    (folder / "airflow").mkdir()
    env = {
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", "host": "local[2]"}),
        "HEADRACE_CHECKOUT": str(checkout()),
        "HEADRACE_PYTHON": str(python),
        "HEADRACE_SPARK_SUBMIT": str(folder / "bin" / "spark-submit"),
        "HEADRACE_HOME": str(folder / "home"),
        "HEADRACE_PIPELINES": str(folder / "pipelines"),
        "HEADRACE_WAIT_SECONDS": "2",
        "HEADRACE_RETRY_SECONDS": "1",
    }
    service = Service(folder / "airflow", env)
    with warehouse.serve(Warehouse(), home) as server, server.connect() as conn, server.connect() as reader_conn:
        tables.create_tables(conn, TABLE)
        reader = WarehouseReader(reader_conn)
        try:
            service.start()
            yield service, reader
        finally:
            service.stop()
            reader.stop()


def bad_day(service: Service, folder: Path, ds: str) -> None:
    """Run a day with late data, a killed task and a killed scheduler; the gate has its order already."""
    run = "headrace_site_retrain", f"day_{ds}"
    service.until(lambda: service.tasks(*run)["complete"]["state"] == "deferred", 600)
    print(f"{clock()}  {ds}  the data are late: the task 'complete' waits in the triggerer", flush=True)
    time.sleep(6)
    (folder / "orders" / f"site.{ds}.late").unlink()
    print(f"{clock()}  {ds}  the data are complete", flush=True)
    kill_task(folder, service, "site", "train", ds)
    print(f"{clock()}  {ds}  SIGKILL to the process of the task 'train'", flush=True)
    service.until(lambda: [c["ds"] for c in started(folder, "site", "train")].count(ds) > 1, 300)
    service.kill("scheduler")
    print(f"{clock()}  {ds}  SIGKILL to the scheduler and all that it had at work", flush=True)
    service.launch("scheduler")


def show(service: Service, ds: list[str], reader: WarehouseReader) -> None:
    """Print the timeline of tasks and of what the reader saw."""
    lines: list[tuple[str, str]] = [(when, f"            reader: {event}") for when, event in reader.changes]
    for kind in ("retrain", "score"):
        dag_id = f"headrace_site_{kind}"
        for number, run in enumerate(sorted(service.runs(dag_id), key=lambda r: _first_start(service, dag_id, r))):
            for task in service.tasks(dag_id, run).values():
                tries = f", try {task['try_number']}" if task["try_number"] > 1 else ""
                if task["end_date"]:
                    lines.append(
                        (task["end_date"][11:19], f"{ds[number]}  {kind:<8}{task['task_id']:<13}{task['state']}{tries}")
                    )
    print("\nUTC       day         DAG     task         end")
    for when, event in sorted(lines):
        print(f"{when}  {event}")


def _first_start(service: Service, dag_id: str, run: str) -> str:
    return min(t["start_date"] or "9" for t in service.tasks(dag_id, run).values())


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=5)
    parser.add_argument("--publish", metavar="DS", help=argparse.SUPPRESS)
    parser.add_argument("--home", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.publish:
        with warehouse.serve(Warehouse(), Workspace(args.home / "warehouse")) as server:
            publish(server, args.publish, 100 + date.fromisoformat(args.publish).day)
        return 0
    ds = [(date(2026, 3, 1) + timedelta(days=k)).isoformat() for k in range(args.days)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with environment(folder, ds) as (service, reader):
            bad = ds[len(ds) // 2]
            stub.order(folder, "site", bad, "late", "")
            stub.order(folder, "site", bad, "train", "s600 s600 0")
            stub.order(folder, "site", bad, "gate", "3")
            for number, day in enumerate(ds, 1):
                service.trigger("headrace_site_retrain", {"ds": day}, f"day_{day}")
                if day == bad:
                    bad_day(service, folder, day)
                service.final_states("headrace_site_score", number)
            show(service, ds, reader)
    print(f"\n{reader.reads:,} reads of the newest day, {reader.faults} faults")
    return 1 if reader.faults else 0


if __name__ == "__main__":
    sys.exit(main())
