"""What another value of each key of `train` and `model` makes anew, derived from the schema."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel, Field

from headrace.config import Model, Spec, Train, load_spec
from headrace.config.effects import Effect, TrainedSection, keys_with
from headrace.config.section import Section
from headrace.manifest import Manifest, fingerprint
from headrace.train.job import Job
from headrace.train.stage import Train as TrainStage

OTHER = 12345

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")


def section_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a key's value is made of, itself or by name."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, Annotated, Mapping) or get_origin(annotation) is not None:
        return next((found for inner in get_args(annotation) if (found := section_in(inner)) is not None), None)
    return None


def changed(section: BaseModel, effect: Effect | None = None) -> Iterator[tuple[str, Effect, BaseModel]]:
    """(path, effect, the section with another value) of each key, those of sections below it, too."""
    for name, info in type(section).model_fields.items():
        own = effect or next(entry for entry in info.metadata if isinstance(entry, Effect))
        below = section_in(info.annotation)
        if below is None:
            yield name, own, section.model_copy(update={name: OTHER})
            continue
        value, inherited = getattr(section, name), None if own is Effect.BY_KEY else own
        is_mapping = isinstance(value, Mapping)
        base = value if isinstance(value, BaseModel) else below.model_construct(**required(below))
        for path, of, other in changed(base, inherited):
            yield f"{name}.{path}", of, section.model_copy(update={name: {"x": other} if is_mapping else other})


def required(section: type[BaseModel]) -> dict[str, Any]:
    return {name: "x" for name, info in section.model_fields.items() if info.is_required()}


def job_of(spec: Spec) -> Job:
    features = Manifest(stage="features", pipeline="clicks", ds="2026-01-03", key="f", spec_hash="s", outputs=())
    common: dict[str, Any] = {"home": "/x", "pipeline": "clicks", "ds": "2026-01-03", "key": "k", "features": features}
    return Job.model_construct(**common, model=spec.model, train=spec.train)


def keys(spec: Spec) -> tuple[str, str]:
    """The stage's, and the fingerprint of its checkpoints."""
    return fingerprint(TrainStage().spec_part(spec)), job_of(spec).config_fingerprint


SPEC = load_spec("clicks", ["publish=null"])
#: `model.args` is of every class but a DLRM, whose settings stand beside it.
OF_ARGS = load_spec("clicks", ["publish=null", "model.class=deepfm"])
CHANGES = [
    (f"{name}.{path}", effect, base, base.model_copy(update={name: other}))
    for name in ("train", "model")
    for path, effect, _ in changed(getattr(SPEC, name))
    for base in [OF_ARGS if path == "args" else SPEC]
    for other in [next(o for p, _, o in changed(getattr(base, name)) if p == path)]
]


def test_every_key_of_the_schema_is_looked_at() -> None:
    paths = {path for path, *_ in CHANGES}
    assert {"train.sharding.storage", "train.sharding.wire", "train.sharding.tables.storage", "train.ranks"} <= paths
    assert {"train.dense.schedule.factor", "train.tasks.loss.kind", "model.embedding_dim", "model.loss.gamma"} <= paths
    of = {path.split(".")[1] for path in paths if path.startswith("train.")}
    assert of == set(Train.model_fields)
    assert {path.split(".")[1] for path in paths if path.startswith("model.")} == set(Model.model_fields)


@pytest.mark.parametrize(("path", "effect", "base", "other"), CHANGES, ids=[path for path, *_ in CHANGES])
def test_another_value_makes_a_run_anew_by_its_effect(path: str, effect: Effect, base: Spec, other: Spec) -> None:
    stage, checkpoint = (mine != others for mine, others in zip(keys(base), keys(other), strict=True))
    assert stage == (effect is not Effect.SPEED)
    assert checkpoint == (effect in (Effect.WEIGHTS, Effect.STORAGE))


@pytest.mark.parametrize(
    "text",
    [
        "train.sharding.storage=int8",
        "train.sharding.wire=bf16",
        'train.sharding.tables={"user_id": {"storage": "fp16"}}',
        "train.precision=bf16",
        "train.seed=2",
    ],
)
def test_what_was_seen(text: str) -> None:
    """After a finished run, `--set` of a key that changes weights is something to do."""
    before, after = keys(SPEC), keys(load_spec("clicks", ["publish=null", text]))
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_an_exception_for_a_table_that_changes_no_weight_makes_nothing_anew() -> None:
    tables = 'train.sharding.tables={"user_id": {"kind": "table_wise"}}'
    assert keys(SPEC) == keys(load_spec("clicks", ["publish=null", "train.sharding.kind=auto", tables]))


def test_the_order_of_tasks_counts_and_that_of_other_mappings_does_not() -> None:
    def parts(*names: str) -> dict[str, Any]:
        tasks = {name: {} if name == "click" else {"label": name} for name in names}
        rates = dict.fromkeys(reversed(names), 0.1)
        return keys_with(Train.model_validate({"tasks": tasks, "unknown_rate": rates}), [Effect.WEIGHTS])

    one, other = parts("click", "buy", "like"), parts("click", "like", "buy")
    assert fingerprint({**one, "tasks": None}) == fingerprint({**other, "tasks": None})
    assert fingerprint(one) != fingerprint(other)


def test_a_key_without_an_effect_is_refused() -> None:
    with pytest.raises(TypeError, match=r"New\.forgotten must say what it changes"):

        class New(TrainedSection):
            said: Annotated[int, Effect.SPEED] = 1
            forgotten: int = Field(default=1, ge=1)

    with pytest.raises(TypeError, match=r"More\.forgotten must say what it changes"):

        class More(Train):
            forgotten: bool = False


def test_sections_whose_keys_differ_say_so_by_key() -> None:
    """Else a key below would have its section's effect, whatever it says."""
    for section in (Train, Model):
        for info in section.model_fields.values():
            below = section_in(info.annotation)
            if below is not None and issubclass(below, TrainedSection):
                assert Effect.BY_KEY in info.metadata
            elif below is not None:
                assert Effect.BY_KEY not in info.metadata
                assert issubclass(below, Section)
