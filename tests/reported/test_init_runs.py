"""Pipelines that `headrace init` writes for generated inputs: they run as far as features, with all rows that another
reader sees.
"""

from __future__ import annotations

import shutil
import traceback
from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from headrace.cli import app
from headrace.cli.init import write_pipeline
from headrace.cli.scaffold.roles import Named
from headrace.config import load_spec
from headrace.config.workspace import Workspace
from headrace.errors import UserError
from tests.reported.init_inputs import FORMS, Form, GeneratedInput, generate
from tests.reported.support import build_features, ingest

#: Inputs of each form that may be refused in words: of none fewer than this share must run to their features.
_MUST_RUN = 0.7


def run_to_features(generated: GeneratedInput, ws: Workspace, folder: Path) -> str:
    """Write a pipeline for an input and run it; return "features", or the refusal's message.

    Raises:
        Exception: anything but a refusal in words.
    """
    file = folder / "pipeline.yaml"
    try:
        write_pipeline(str(generated.path), file, None, Named(), force=False)
    except UserError as e:
        return f"init: {e}"
    try:
        spec = load_spec(file, ["features.min_row_groups=1"])
        ds = spec.ds or max(generated.rows)
        dry = CliRunner().invoke(app, ["run", str(file), "--ds", ds, "--dry-run", "--home", str(ws.home)])
        assert dry.exit_code in (0, 2), dry.output
        if dry.exit_code == 2:
            return f"dry run: {dry.output}"
        loaded = ingest(spec, ws, ds).manifest
        assert loaded.rows["read"] == sum(generated.rows.values()), loaded.rows
        assert (
            loaded.rows["kept"] + loaded.rows["quarantined"] + loaded.rows.get("duplicates", 0) == loaded.rows["read"]
        )
        built = build_features(spec, ws, ds).manifest
        assert sum(built.rows.values()) <= loaded.rows["kept"]
    except UserError as e:
        return f"run: {e}"
    return "features"


def check(seeds: range, form: Form, folder: Path) -> str:
    """Run the inputs of seeds, and return a summary of what was refused; fail on traces and on too many refusals."""
    refusals: Counter[str] = Counter()
    traces: list[str] = []
    for seed in seeds:
        place = folder / str(seed)
        place.mkdir()
        generated = generate(seed, form, place)
        try:
            outcome = run_to_features(generated, Workspace(place / "home"), place)
        except Exception:
            traces.append(f"{generated.drawn}\n{traceback.format_exc(limit=-4)}")
            continue
        if outcome != "features":
            refusals[f"{generated.drawn}\n    {outcome}"] += 1
        shutil.rmtree(place)
    assert not traces, f"{len(traces)} of {len(seeds)} inputs\n" + "\n\n".join(traces)
    assert sum(refusals.values()) <= (1 - _MUST_RUN) * len(seeds), "\n".join(refusals)
    return "\n  ".join([f"{form}, {seeds}: {sum(refusals.values())} refused in words", *refusals])


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_it_runs_as_it_was_written(
    spark: SparkSession, tmp_path: Path, form: Form, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = check(range(7), form, tmp_path)
    capsys.readouterr()
    print(summary)


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_many_run_as_they_were_written(
    spark: SparkSession, tmp_path: Path, form: Form, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = check(range(1_000, 1_040), form, tmp_path)
    with capsys.disabled():
        print(summary)
