"""Amazon Beauty: the next item of each user among all items."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import pyarrow.compute as pc
import pyarrow.dataset as pads

from bench.quality.part import Goal, PublishedResult, QualityCase, QualityPart
from bench.quality.pipeline import pipeline_case
from headrace.lake.delta.log import DeltaLog
from headrace.manifest import Manifest
from headrace.workspace import Workspace

_HR, _NDCG = "test_full.hr_at_10_full", "test_full.ndcg_at_10_full"
_HSTU = "model={class: hstu, embedding_dim: 64, args: {item: item_id, history: history, length: 50, dropout: 0.5}}"
_SOURCE = "Klenitskiy and Vasilev, RecSys 2023"


def target_hash(users: list[int], items: list[int]) -> str:
    """Return SHA-256 of the lines `user item` of the test targets, by user."""
    lines = "".join(f"{user} {item}\n" for user, item in sorted(zip(users, items, strict=True)))
    return hashlib.sha256(lines.encode()).hexdigest()


def _notes(manifest: Manifest, ws: Workspace) -> Mapping[str, str]:
    folder = ws.table(manifest.pipeline, "events")
    log = DeltaLog(folder)
    version = log.version
    files = (None if version is None else log.files(version)) or []
    table = pads.dataset([str((folder / f.path).local_path()) for f in files]).to_table(
        columns=["user_id", "item_id"], filter=pc.field("split") == "test"
    )
    digest = target_hash(table["user_id"].to_pylist(), table["item_id"].to_pylist())
    return {"test targets": f"{table.num_rows:,} users, SHA-256 of their sorted lines `user item`: {digest}"}


def _case(name: str, *overrides: str, goals: Mapping[str, Goal] | None = None) -> QualityCase:
    return pipeline_case(name, "beauty", overrides=overrides, goals=goals, metrics=(_HR, _NDCG), notes=_notes)


PART = QualityPart(
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
        _case(
            "SASRec, sampled softmax",
            goals={_HR: Goal(floor=0.0338, aim=0.0490), _NDCG: Goal(floor=0.0187, aim=0.0295)},
        ),
        _case("HSTU, sampled softmax", _HSTU),
    ),
    published=(
        PublishedResult("SASRec, BCE with one negative", {_HR: 0.0246, _NDCG: 0.0126}, _SOURCE),
        PublishedResult("BERT4Rec", {_HR: 0.0338, _NDCG: 0.0187}, _SOURCE),
        PublishedResult("SASRec, sampled softmax of 3,000 negatives", {_HR: 0.0490, _NDCG: 0.0295}, _SOURCE),
        PublishedResult("SASRec, softmax over all items", {_HR: 0.0533, _NDCG: 0.0327}, _SOURCE),
    ),
)
