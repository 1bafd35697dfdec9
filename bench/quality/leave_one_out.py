"""Amazon Beauty as files of the form `*.train.rating`, `*.test.rating`, `*.test.negative`: not MovieLens-1M's.

Nothing of the pipeline differs but `source.path`; the settings are MovieLens's, or those that `headrace tune` finds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bench.quality.part import CaseResult, QualityCase, QualityPart, data_folder
from bench.quality.pipeline import pipeline_case, run_headrace
from headrace.config import load_overlay, load_spec
from headrace.storage import local
from headrace.workspace import checkout

#: What the search may take: seconds of its trials, of one process with as many threads as the spec says.
SEARCH_SECONDS = 1200
_NEGATIVES = 99
_METRICS = ("hr_at_k", "ndcg_at_k")
_NEUMF = ("neumf.yaml",)


def write_split(sequences: Path, folder: Path, stem: str, seed: int = 1) -> None:
    """Leave the last item of each user out, beside 99 items that the user never had, drawn uniformly without repeats.

    Args:
        sequences: lines `user item`, a user's in the order of time.
        folder: of the three files.
        stem: their names' first part.
        seed: of the draw.
    """
    pairs = np.loadtxt(sequences, dtype=np.int64)
    items = int(pairs[:, 1].max()) + 1
    rng = np.random.default_rng(seed)
    train, test, negatives = [], [], []
    order = np.argsort(pairs[:, 0], kind="stable")
    users, starts = np.unique(pairs[order, 0], return_index=True)
    for user, had in zip(users.tolist(), np.split(pairs[order, 1], starts[1:]), strict=True):
        train += [f"{user}\t{item}\t1\n" for item in had[:-1].tolist()]
        test.append(f"{user}\t{had[-1]}\t1\n")
        drawn = rng.choice(items, size=_NEGATIVES + len(had), replace=False)
        never = drawn[~np.isin(drawn, had)][:_NEGATIVES]
        negatives.append("\t".join([f"({user},{had[-1]})", *map(str, never.tolist())]) + "\n")
    for name, lines in (("train.rating", train), ("test.rating", test), ("test.negative", negatives)):
        local(folder / f"{stem}.{name}").put_text("".join(lines))


def popularity(folder: Path, stem: str, k: int = 10) -> tuple[float, float]:
    """Return HR@k and NDCG@k of items by their training rows; of equal counts the left-out item stands last."""
    train = np.loadtxt(folder / f"{stem}.train.rating", dtype=np.int64)
    lines = (folder / f"{stem}.test.negative").read_text(encoding="utf-8").splitlines()
    counts = np.bincount(train[:, 1], minlength=int(1e6))
    places = []
    for line in lines:
        first, *negatives = line.split("\t")
        positive = int(first.strip("()").split(",")[1])
        places.append(int((counts[[int(item) for item in negatives]] >= counts[positive]).sum()))
    place = np.array(places)
    return float((place < k).mean()), float(np.where(place < k, 1 / np.log2(place + 2), 0).mean())


def _source() -> str:
    return f"source.path={_split_folder() / 'beauty.t*'}"


def _split_folder() -> Path:
    return checkout() / "build" / "quality" / "work" / "leave_one_out" / "split"


def _prepared_folder() -> Path:
    """Return the folder of the three files; they are written where they are missing."""
    folder = _split_folder()
    if not (folder / "beauty.test.negative").is_file():  # written last
        folder.mkdir(parents=True, exist_ok=True)
        write_split(data_folder() / "beauty" / "beauty.txt", folder, "beauty")
    return folder


def _as_movielens(seed: int, folder: Path) -> CaseResult:
    split = _prepared_folder()
    result = pipeline_case("", "movielens", overlays=_NEUMF, overrides=(_source(),), metrics=_METRICS).run(seed, folder)
    hr, ndcg = popularity(split, "beauty")
    popularity_metrics = f"HR@10 {hr:.4f}, NDCG@10 {ndcg:.4f}"
    return CaseResult(
        result.metrics,
        result.seconds,
        result.peak_mib,
        result.intervals,
        {"items by their number of training rows": popularity_metrics},
    )


def _tuned(seed: int, folder: Path) -> CaseResult:
    """Search once (a search that is there goes on or is taken as it is), then train with what was found."""
    _prepared_folder()
    neumf, search = (checkout() / "conf" / "overlays" / f"{name}.yaml" for name in ("neumf", "neumf_search"))
    spec = load_spec("movielens", [*load_overlay(neumf), _source()])
    assert spec.ds is not None
    best = folder / "best.yaml"
    words = ["movielens", "--home", str(folder / "home"), "--ds", spec.ds, "--overlay", str(neumf), "--set", _source()]
    run_headrace("run", *words, "--to", "features")
    run_headrace("tune", *words, "--overlay", str(search), "--seconds", str(SEARCH_SECONDS), "--out", str(best))
    # As long as the trials were: what was chosen was chosen for that many epochs.
    epochs = load_spec("movielens", [*load_overlay(neumf), *load_overlay(search)]).train.search.epochs
    chosen = [*load_overlay(best), f"train.epochs={epochs}"] if best.is_file() else []
    overrides = [*load_overlay(neumf), _source(), *chosen]
    result = pipeline_case("", "movielens", overrides=overrides, metrics=_METRICS).run(seed, folder)
    note = {"settings found": ", ".join(chosen) or "none better than those given"}
    return CaseResult(result.metrics, result.seconds, result.peak_mib, result.intervals, note)


def _settings(tuned: bool) -> dict[str, Any]:
    neumf = checkout() / "conf" / "overlays" / "neumf.yaml"
    spec = load_spec("movielens", [*load_overlay(neumf), "source.path=beauty.t*"])
    left_out = {"train": {"ranks", "threads", "seed", "search"}, "description": True}
    settings = spec.model_dump(mode="json", exclude=left_out, exclude_defaults=True)
    return {
        "spec": settings,
        "split": 1,
        **({"search_seconds": SEARCH_SECONDS, "epochs": "of the search"} if tuned else {}),
    }


PART = QualityPart(
    title="Amazon Beauty, one item left out among 99",
    data=("beauty",),
    protocol="""
A split of the same form as that of MovieLens-1M above. The last item of each of 40,226 users is ranked among 99 items
that the user never had, drawn uniformly (seed 1, `bench.quality.leave_one_out.write_split`). There are 54,542 items and
313,736 training rows. HR@10 and NDCG@10 are as above.

The pipeline is `movielens` with another `source.path`, in two settings:

- those that were chosen for MovieLens-1M;
- those that `headrace tune` finds within 1,200 seconds, by one held-out training item of each user
  (`conf/overlays/neumf_search.yaml`).

Neither sees a left-out item before its model is finished.
""",
    cases=(
        QualityCase("NeuMF, settings of MovieLens-1M", _as_movielens, lambda: _settings(tuned=False), metrics=_METRICS),
        QualityCase("NeuMF, settings of `headrace tune`", _tuned, lambda: _settings(tuned=True), metrics=_METRICS),
    ),
)
