"""A folder of Parquet files as the warehouse. `manifest.json` says which files are the table's: read that first.

    TABLE/manifest.json                   {"current": "2026-01-10", "days": {"2026-01-10": {"files": [...], ...}}, ...}
    TABLE/ds=2026-01-10/4f2a91c3/*.parquet

Files are never changed. A day's new files come under a name of their own, then the manifest is replaced in one step.
The files of the version before stay until the table is published to once more: readers may have read that manifest.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.config import Spec
from headrace.config.workspace import Workspace
from headrace.errors import BusyError, UserError
from headrace.publish.files import FilesTarget, Record, StagedFiles
from headrace.publish.tables.spark_table import TYPES, first_rows, rows_having, without_keys
from headrace.publish.target import Key, Publication, Target, table_name
from headrace.stage import RunLock
from headrace.storage import Location, local
from headrace.storage.lease import Held
from headrace.storage.location import put_fenced

MANIFEST = "manifest.json"


class ParquetTarget(FilesTarget):
    """A folder `<table>` of files and their manifest."""

    def __init__(self, spec: Spec, ws: Workspace, root: Location, lock: RunLock | None = None) -> None:
        self.folder = root / table_name(spec)
        super().__init__(spec, ws, "parquet", str(self.folder), "files", lock)

    def manifest(self) -> dict[str, Any]:
        """Return the content of `manifest.json`; without days where there is no file."""
        file = self.folder / MANIFEST
        manifest: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"days": {}}
        return manifest

    def claim(self) -> None:
        if self.fence is not None:
            # Before the table exists, too: a paused run may be about to make the first publication.
            with self._alone():
                self._save(self.manifest())

    def create_table(self) -> None:
        """Nothing: a file says itself which columns it has."""

    @property
    def types(self) -> Mapping[str, str]:
        return TYPES

    def publish_files(self, staged: StagedFiles, record: Record) -> None:
        with self._alone():
            manifest = self.manifest()
            folder = f"ds={staged.ds}/{staged.folder.name.rpartition('_')[2]}"
            self._discard(manifest)
            for file in staged.files:
                (self.folder / folder / file.name).copy_from(local(file), share=True)
            names = [f"{folder}/{file.name}" for file in staged.files]
            manifest["days"][staged.ds] = asdict(record) | {"folder": folder, "files": names}
            self._save(manifest)

    def _discard(self, manifest: Mapping[str, Any]) -> None:
        """Remove the folders that the manifest does not name: of versions before, of dropped days, of killed runs."""
        for version in self._unnamed(manifest):
            self.check_lease()
            version.remove()

    def _unnamed(self, manifest: Mapping[str, Any]) -> Iterator[Location]:
        named = {str(day["folder"]) for day in manifest["days"].values()}
        for day in self.folder.entries() if self.folder.is_dir() else []:
            if day.name.startswith("ds="):
                yield from (v for v in day.entries() if f"{day.name}/{v.name}" not in named)

    def _save(self, manifest: dict[str, Any]) -> None:
        manifest["days"] = dict(sorted(manifest["days"].items()))
        manifest["current"] = max(manifest["days"], default=None)
        fences = () if self.fence is None else (self.fence,)
        if fences:  # those of other leases stay: pipelines may share a table
            manifest["fences"] = {**manifest.get("fences", {}), **{f.lease: f.token for f in fences}}
        text = json.dumps(manifest, indent=1) + "\n"
        put_fenced(
            self.folder / MANIFEST, text, fences, lambda current_text: json.loads(current_text).get("fences", {})
        )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self.folder.make_dir()
        try:
            with (self.folder / "publish.lock").lease():
                yield
        except Held as e:
            raise BusyError(f"another process is publishing to {self.folder} ({e}): wait for it or stop it") from None

    def published(self, ds: str) -> Publication | None:
        day = self.manifest()["days"].get(ds)
        return None if day is None else Publication(day["key"], int(day["rows"]), day["audit"])

    def rows_by_day(self) -> dict[str, int]:
        return {ds: int(day["rows"]) for ds, day in self.manifest()["days"].items()}

    def count(self, ds: str) -> int:
        import pyarrow.parquet as pq

        return sum(pq.read_metadata(f).num_rows for f in self._files(ds) if f.is_file())

    def _files(self, ds: str) -> list[Path]:
        return [(self.folder / name).local_path() for name in self.manifest()["days"].get(ds, {"files": []})["files"]]

    def sample(self, ds: str, rows: int) -> list[dict[str, Any]]:
        if not self.manifest()["days"]:
            raise UserError(f"there is no table {self.label} yet")
        return first_rows(self._files(ds), ds, self.user, rows)

    def drop_days(self, days: Sequence[str]) -> None:
        if not days:
            return
        with self._alone():
            manifest = self.manifest()
            for ds in days:
                manifest["days"].pop(ds, None)
            self._save(manifest)

    def rows_with(self, column: str, keys: Sequence[Key]) -> dict[str, int]:
        return {ds: n for ds in self.days() if (n := rows_having(self._files(ds), column, keys))}

    def leftovers(self, column: str, keys: Sequence[Key]) -> int:
        # Including unfinished files of a killed process.
        files = (file for folder in self._unnamed(self.manifest()) for file in folder.local_path().rglob("*"))
        return sum(_may_have(file, column, keys) for file in files if file.is_file())

    def erase(self, column: str, keys: Sequence[Key]) -> str:
        import pyarrow.parquet as pq

        with self._alone():
            manifest = self.manifest()
            for ds, rows in self.rows_with(column, keys).items():
                day, folder = manifest["days"][ds], f"ds={ds}/{uuid.uuid4().hex[:8]}"
                names = []
                for old in day["files"]:
                    remaining, _ = without_keys(column, keys, pq.read_table(self.folder / old, partitioning=None))
                    names.append(f"{folder}/{old.rpartition('/')[2]}")
                    with (self.folder / names[-1]).new_file() as path:
                        pq.write_table(remaining, path)
                manifest["days"][ds] = day | {"folder": folder, "files": names, "rows": day["rows"] - rows}
            self._save(manifest)
            # At once: readers of the manifest before find their files gone, and read it anew.
            self._discard(manifest)
        return ""

    def grant(self, grants: Mapping[str, Sequence[str]]) -> None:
        if grants:
            raise UserError("publish.grants: a folder of Parquet files has no roles: give them to its storage")


def _may_have(file: Path, column: str, keys: Sequence[Key]) -> bool:
    """Return whether a file may have such rows; an incomplete file may."""
    import pyarrow as pa

    try:
        return rows_having([file], column, keys) > 0
    except pa.ArrowInvalid:
        return True


@contextmanager
def open_parquet(spec: Spec, ws: Workspace, lock: RunLock | None = None) -> Iterator[Target]:
    """See `headrace.publish.opening.open_target`."""
    assert spec.publish is not None
    path = spec.publish.warehouse.path
    yield ParquetTarget(spec, ws, local(path) if path else ws.lake / "warehouse", lock)
