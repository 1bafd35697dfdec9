"""Refusals by the spec alone: a wrong name in each key that names something, in a shipped pipeline."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel
from typer.testing import CliRunner

from headrace.cli import app
from headrace.config import Spec, load_spec
from headrace.config.documentation import keys_of
from headrace.config.installation import checkout
from headrace.config.model_args import MODEL_ARGS
from headrace.errors import EXIT_USER_ERROR, UserError
from headrace.features.table_ops.sql import fault_without_spark
from headrace.jobs.check_specs import check_spec
from headrace.plugins import check_reference

_DATA = yaml.safe_load((Path(__file__).parent / "named_keys.yaml").read_text())


@dataclass(frozen=True)
class Case:
    """A key that names something, and an override of the pipeline clicks that gives it a name."""

    key: str
    #: With `@` in the place of the name.
    override: str
    #: A name that is there; empty: none without a package.
    right: str
    wrong: str
    settings: tuple[str, ...]
    #: How the message names the key.
    says: str

    def settings_with(self, name: str) -> list[str]:
        return [*self.settings, self.override.replace("@", name)]


def settings_of(names: Sequence[str]) -> tuple[str, ...]:
    """Overrides of the pipeline by the names of groups of them, or as they are."""
    return tuple(text for name in names for text in _DATA["settings"].get(name, [name]))


CASES = [
    Case(
        case["key"],
        case["set"],
        case["right"],
        case["wrong"],
        settings_of(case.get("in", ())),
        case.get("says", case["key"]),
    )
    for case in _DATA["cases"]
]
SMALL, TASKS = settings_of(["small"]), settings_of(["tasks"])


def test_each_key_with_a_text_is_tried_or_has_a_reason() -> None:
    """A key that is new is missing here: plant a wrong name in it, or say why there is none."""
    known = {case.key for case in CASES} | {key for group in _DATA["free"] for key in group["keys"]}
    # Named sources have the keys of the main one.
    paths = {path for path in _paths(Spec) if not path.startswith("sources.*.")}
    assert paths - known == set()
    assert known - paths == set()


_keys = cache(keys_of)


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the keys that take texts, and the mappings whose own keys are names."""
    for key in _keys(model):
        path, accepts = f"{prefix}{key.name}", key.accepts
        if "mapping of" in accepts:
            yield f"{path} (names)"
        if "text" in accepts or "any" in accepts.split():
            yield path
        for inner in key.models:
            yield from _paths(
                inner, path + (".*." if "mapping of" in accepts else "[]." if "list of" in accepts else ".")
            )


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.key}-{case.wrong}")
def test_a_wrong_name_ends_the_dry_run(case: Case, tmp_path: Path) -> None:
    """With the right name beside the same settings the spec is accepted, so it is the name that is refused."""
    if case.right:
        check_spec(load_spec("clicks", case.settings_with(case.right)))
    with pytest.raises(UserError) as refused:
        check_spec(load_spec("clicks", case.settings_with(case.wrong)))
    message = str(refused.value)
    assert case.says in message
    assert "\n" not in message


@pytest.mark.parametrize("case", CASES[::9], ids=lambda case: f"{case.key}-{case.wrong}")
def test_the_command_says_it_in_one_line(case: Case, tmp_path: Path) -> None:
    sets = [word for setting in case.settings_with(case.wrong) for word in ("--set", setting)]
    ran = CliRunner().invoke(app, ["run", "clicks", "--ds", "2026-01-08", "--dry-run", "--home", str(tmp_path), *sets])
    assert ran.exit_code == EXIT_USER_ERROR
    assert len([line for line in ran.output.splitlines() if case.says in line]) >= 1


@pytest.mark.parametrize("name", sorted(p.stem for p in (checkout() / "conf" / "pipelines").glob("*.yaml")))
def test_shipped_pipelines_are_accepted(name: str) -> None:
    check_spec(load_spec(name))


CONFLICTS = [
    (("train.negatives={column: item_id}",), "baseline: pipeline 'clicks' draws its negatives"),
    ((*SMALL, "model={class: matrix_factorization}"), "set train.negatives, such as"),
    (
        (*SMALL, "model={class: deepfm}", "train.tasks={click: {}, buy: {label: hour}}"),
        "train.tasks: the model 'deepfm'",
    ),
    ((*TASKS, "model={class: esmm}", "train.tasks={click: {}, buy: {label: hour}}"), "train.tasks has none: write"),
    (("model={class: dlrm, loss: bpr}",), "model.loss: bpr compares"),
    (("train.evaluation={full_ranking: {}}",), "train.evaluation.full_ranking is for models in retrieval form"),
    (("train.pretrained={gmf: other}",), "train.pretrained: 'dlrm' does not start from other models"),
    ((*SMALL, "model={class: final_mlp, args: {heads: 7}}"), "is no multiple of heads 7"),
    (("score.candidates={sources: {near: {kind: vectors}}}",), "score.candidates.sources.near is by vectors"),
    (("score.rerank={diversity: {by: vectors}}",), "score.rerank.diversity.by is by vectors"),
    (("publish.grants={select: [ann]}", "publish.warehouse={kind: duckdb}"), "publish.grants: a DuckDB file"),
    (("retrain={half_life_days: 3}", "features.carried=[event_id]"), "retrain.half_life_days"),
    (
        ("publish.warehouse={kind: postgres, password_env: A, password_file: /b}",),
        "give password_env or password_file, not both",
    ),
]


@pytest.mark.parametrize(("settings", "message"), CONFLICTS, ids=[m for _, m in CONFLICTS])
def test_keys_that_do_not_go_together(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as refused:
        check_spec(load_spec("clicks", list(settings)))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "expression",
    [
        "avg(score)",
        "count_if(rank = 1 AND `SCORE` < 0.01)",
        "datediff(DAY, ds, current_date)",
        "timestampadd(HOUR, 3, current_timestamp)",
        "transform(array(1), x -> x + score)",
        "score['a'] and score.b.c",
        "user = 'x' or current_user = 'y'",
        "concat('it\\'s', score)",
        "date '2026-01-01' < ds",
        "cast(score as decimal(10, 2)) > 1",
        "score like 'a%' escape '!'",
        "case score when 1 then 2 end",
        "count(distinct rank) filter (where rank > 1)",
        "extract(year from ds) = 2026",
        "_source_line > 1",
        "interval 1 day + ds",
        '"scor" = rank',
    ],
)
def test_what_only_spark_can_tell_is_left_to_spark(expression: str) -> None:
    assert fault_without_spark(expression, ["ds", "rank", "score"]) is None


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("avg(scor)", "there is no column 'scor'; did you mean 'score'?"),
        ("rank > 1 and (score", "a ')' is missing"),
        ("score >", "it ends too early"),
        ("", "it is empty"),
        ("case when score > 1 then `no` end", "there is no column 'no'"),
    ],
)
def test_what_spark_must_refuse_is_refused(expression: str, message: str) -> None:
    assert message in str(fault_without_spark(expression, ["ds", "rank", "score"]))


@pytest.mark.parametrize("name", sorted(MODEL_ARGS))
def test_what_specs_know_of_a_class_is_so(name: str) -> None:
    """The settings say of the network what torch's class says."""
    from headrace.models.classes import _NETWORKS

    network, args = _NETWORKS.find(name, "model.class"), MODEL_ARGS[name]
    assert args.has_vectors == hasattr(network, "queries") == hasattr(network, "loss")
    assert bool(args.starts_from) == hasattr(network, "start_from")


def test_a_reference_is_looked_up_without_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "half_made"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "nets.py").write_text("from torch import nn\nclass Net(nn.Module): pass\nif True:\n    Late = Net\n")
    (package / "open.py").write_text("from torch.nn import *\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for reference in ("half_made.nets:Net", "half_made.nets:Late", "half_made.open:Linear", "half_made.nets:Net.Inner"):
        check_reference(reference, "model.class", "model")
    with pytest.raises(UserError, match=r"No module named 'half_made\.net'"):
        check_reference("half_made.net:Net", "model.class", "model")
    with pytest.raises(UserError, match=r"module 'half_made\.nets' has no attribute 'Nte'"):
        check_reference("half_made.nets:Nte", "model.class", "model")


def test_the_check_imports_neither_spark_nor_torch() -> None:
    code = (
        "import sys; from headrace.config import load_spec; from headrace.jobs.check_specs import check_spec; "
        "check_spec(load_spec('clicks', ['train.negatives={column: item_id}', 'baseline=null', "
        "'gate={rules: {a: \"auc > 0.5\"}}', 'publish.audit={}', 'outcomes={slices: {a: device}}'])); "
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'pyspark', 'torch'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
