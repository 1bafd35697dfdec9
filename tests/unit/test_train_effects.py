"""Effects of another value of each key of `train` and `model`, derived from the schema."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel, Field

from headrace.config import Gate, Model, ModelVariant, Retrain, Spec, Train, load_spec
from headrace.config.section import Effect, Section, TrainedSection, keys_with
from headrace.config.variants import SEARCHABLE
from headrace.quality.gate.day_evaluation import evaluation_settings
from headrace.stage.manifest import Manifest, fingerprint
from headrace.train.baseline.stage import TrainBaseline
from headrace.train.job import Job
from headrace.train.setup.earlier_days import model_misfit
from headrace.train.stage import Train as TrainStage

OTHER_NUMBER = 12345

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")


def section_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a key's value is made of, itself or by name."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, Annotated, Mapping) or get_origin(annotation) is not None:
        return next((nested for inner in get_args(annotation) if (nested := section_in(inner)) is not None), None)
    return None


def changed(section: BaseModel, effect: Effect | None = None) -> Iterator[tuple[str, Effect, BaseModel]]:
    """(path, effect, the section with another value) of each key, those of sections below it, too."""
    for name, info in type(section).model_fields.items():
        own_effect = effect or next(entry for entry in info.metadata if isinstance(entry, Effect))
        below = section_in(info.annotation)
        if below is None:
            yield name, own_effect, section.model_copy(update={name: OTHER_NUMBER})
            continue
        value, inherited = getattr(section, name), None if own_effect is Effect.BY_KEY else own_effect
        is_mapping = isinstance(value, Mapping)
        base = value if isinstance(value, BaseModel) else below.model_construct(**required(below))
        for path, inner_effect, variant in changed(base, inherited):
            yield (
                f"{name}.{path}",
                inner_effect,
                section.model_copy(update={name: {"x": variant} if is_mapping else variant}),
            )


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
    (f"{name}.{path}", effect, base, base.model_copy(update={name: variant}))
    for name in ("train", "model")
    for path, effect, _ in changed(getattr(SPEC, name))
    for base in [OF_ARGS if path == "args" else SPEC]
    for variant in [next(o for p, _, o in changed(getattr(base, name)) if p == path)]
]


def test_every_key_of_the_schema_is_looked_at() -> None:
    paths = {path for path, *_ in CHANGES}
    assert {"train.sharding.storage", "train.sharding.wire", "train.sharding.tables.storage", "train.ranks"} <= paths
    assert {"train.dense.schedule.factor", "train.tasks.loss.kind", "model.embedding_dim", "model.loss.gamma"} <= paths
    covered = {path.split(".")[1] for path in paths if path.startswith("train.")}
    assert covered == set(Train.model_fields)
    assert {path.split(".")[1] for path in paths if path.startswith("model.")} == set(Model.model_fields)


@pytest.mark.parametrize(("path", "effect", "base", "variant"), CHANGES, ids=[path for path, *_ in CHANGES])
def test_another_value_makes_a_run_anew_by_its_effect(path: str, effect: Effect, base: Spec, variant: Spec) -> None:
    stage, checkpoint = (base_key != other_key for base_key, other_key in zip(keys(base), keys(variant), strict=True))
    assert stage == (effect is not Effect.SPEED)
    assert checkpoint == (effect in (Effect.WEIGHTS, Effect.STORAGE))


@pytest.mark.parametrize(("path", "effect", "base", "variant"), CHANGES, ids=[path for path, *_ in CHANGES])
def test_trees_and_the_gate_look_at_what_is_measured(path: str, effect: Effect, base: Spec, variant: Spec) -> None:
    if effect is not Effect.METRICS or path in ("train.rank_group", "train.rank_k"):
        parts = [evaluation_settings(spec, Gate()) for spec in (base, variant)]
        assert (parts[0] != parts[1]) == (effect is Effect.METRICS)
    trees = [TrainBaseline().spec_part(spec) for spec in (base, variant)]
    assert (trees[0] != trees[1]) == (effect is Effect.METRICS or path in ("train.seed", "train.sample_weight"))


@pytest.mark.parametrize(
    ("path", "base", "variant"),
    [(path, base, variant) for path, _, base, variant in CHANGES if path.startswith("model.")],
)
def test_a_day_starts_from_no_model_of_other_settings(path: str, base: Spec, variant: Spec) -> None:
    saved = {"model": base.model.model_dump(mode="json", by_alias=True)}
    key = path.split(".")[1].replace("kind", "class")
    schema: Any = None  # looked at after the settings
    assert str(model_misfit(saved, variant, schema)).startswith(f"its model.{key} is ")


def test_sections_of_one_model_say_nothing_of_what_is_measured() -> None:
    """A model, a day that starts warm and a challenger are measured as all others are."""
    measured = [name for name, info in Train.model_fields.items() if Effect.METRICS in info.metadata]
    assert measured
    for name in measured:
        with pytest.raises(ValueError, match=f"'{name}' is of all models"):
            ModelVariant.model_validate({"train": {name: OTHER_NUMBER}})
        with pytest.raises(ValueError, match=f"'{name}' is of all days"):
            Retrain.model_validate({"warm": {name: OTHER_NUMBER}})


def test_what_a_search_changes_changes_weights() -> None:
    effects = {name: effect for path, effect, *_ in CHANGES for name in SEARCHABLE if f"{path}.".startswith(f"{name}.")}
    assert effects == dict.fromkeys(SEARCHABLE, Effect.WEIGHTS)


def sections(section: type[BaseModel], known: dict[type[BaseModel], None]) -> dict[type[BaseModel], None]:
    """A section and all below it."""
    if section not in known:
        known[section] = None
        for info in section.model_fields.values():
            for inner in sections_in(info.annotation):
                sections(inner, known)
    return known


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from sections_in(inner)


ALL = sections(Spec, {})


@pytest.mark.parametrize("section", ALL, ids=[section.__name__ for section in ALL])
def test_keys_of_stages_see_each_key_of_a_section(section: type[BaseModel]) -> None:
    """Keys are made of sections as they are written: no key is left out, not even at its default."""
    plain = section.model_construct(**required(section))
    hidden = {"args"} if section is Model else set()
    assert set(section.model_fields) - set(plain.model_dump(warnings=False)) == hidden


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
    """A `--set` of a key that changes weights is something to do after a finished run."""
    keys_before, keys_after = keys(SPEC), keys(load_spec("clicks", ["publish=null", text]))
    assert keys_before[0] != keys_after[0]
    assert keys_before[1] != keys_after[1]


def test_an_exception_for_a_table_that_changes_no_weight_makes_nothing_anew() -> None:
    tables = 'train.sharding.tables={"user_id": {"kind": "table_wise"}}'
    assert keys(SPEC) == keys(load_spec("clicks", ["publish=null", "train.sharding.kind=auto", tables]))


def test_the_order_of_tasks_counts_and_that_of_other_mappings_does_not() -> None:
    def parts(*names: str) -> dict[str, Any]:
        tasks = {name: {} if name == "click" else {"label": name} for name in names}
        rates = dict.fromkeys(reversed(names), 0.1)
        return keys_with(Train.model_validate({"tasks": tasks, "unknown_rate": rates}), [Effect.WEIGHTS])

    first, second = parts("click", "buy", "like"), parts("click", "like", "buy")
    assert fingerprint({**first, "tasks": None}) == fingerprint({**second, "tasks": None})
    assert fingerprint(first) != fingerprint(second)


def test_a_key_without_an_effect_is_refused() -> None:
    with pytest.raises(TypeError, match=r"New\.forgotten must say what it changes"):

        class New(TrainedSection):
            declared: Annotated[int, Effect.SPEED] = 1
            forgotten: int = Field(default=1, ge=1)

    with pytest.raises(TypeError, match=r"More\.forgotten must say what it changes"):

        class More(Train):
            forgotten: bool = False


def test_sections_whose_keys_differ_say_so_by_key() -> None:
    """A key below would have its section's effect otherwise, whatever it says."""
    for section in (Train, Model):
        for info in section.model_fields.values():
            below = section_in(info.annotation)
            if below is not None and issubclass(below, TrainedSection):
                assert Effect.BY_KEY in info.metadata
            elif below is not None:
                assert Effect.BY_KEY not in info.metadata
                assert issubclass(below, Section)
