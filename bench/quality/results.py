"""Results of (case, seed) as files: each appears whole, and stands while the case's settings are the same."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.parts import checkout_version
from bench.quality.part import CaseResult, QualityCase
from headrace.manifest import fingerprint
from headrace.storage import local
from headrace.workspace import checkout

_FORM = 1


@dataclass(frozen=True)
class Results:
    """The files of one folder, by default build/quality/results."""

    folder: Path

    @staticmethod
    def default() -> Results:
        """Return the results below build/quality."""
        return Results(quality_folder() / "results")

    def path(self, part: str, case: QualityCase, seed: int) -> Path:
        """Return the file of a result."""
        name = re.sub(r"[^a-z0-9]+", "-", case.name.lower()).strip("-")
        return self.folder / part / f"{name}.{seed}.json"

    def load(self, part: str, case: QualityCase, seed: int) -> CaseResult | None:
        """Load the result of the case as it is now; None where there is none, or one of other settings."""
        try:
            record = json.loads(self.path(part, case, seed).read_text(encoding="utf-8"))
            if record["form"] != _FORM or record["settings"] != settings_key(case):
                return None
            return CaseResult(**record["result"])
        except (FileNotFoundError, KeyError, TypeError, ValueError):
            return None

    def save(self, part: str, case: QualityCase, seed: int, result: CaseResult) -> None:
        """Write a result, in one step."""
        record = {
            "form": _FORM,
            "part": part,
            "case": case.name,
            "seed": seed,
            "settings": settings_key(case),
            "code": checkout_version(),
            "machine": machine(),
            "result": asdict(result),
        }
        local(self.path(part, case, seed)).put_text(json.dumps(record, indent=1) + "\n")

    def machines(self) -> list[str]:
        """Return the machines, in words, that results come from."""
        files = sorted(self.folder.glob("*/*.json"))
        return sorted({json.loads(f.read_text(encoding="utf-8"))["machine"] for f in files})


def quality_folder() -> Path:
    """Return the folder of results and workspaces."""
    return checkout() / "build" / "quality"


def settings_key(case: QualityCase) -> str:
    """Return the fingerprint of what a result depends on besides the seed."""
    settings: Mapping[str, Any] = case.all_settings()
    return fingerprint(settings)


def machine() -> str:
    """Return this machine in words: processor, cores, memory."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = re.findall(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)
        model = names[0].strip() if names else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores ({model}), {memory:.0f} GiB"
