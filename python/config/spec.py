"""A pipeline: all sections together, and the checks between them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import date, timedelta
from functools import cached_property
from typing import Any

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from headrace.config.baseline import Baseline, SecondStage, check_baseline, check_second_stage
from headrace.config.experiments import (
    Experiment,
    Outcomes,
    check_alerts,
    check_experiments,
    check_outcomes,
    days_until_ripe,
)
from headrace.config.features import Features, OpSpec
from headrace.config.gate import Gate, check_gate
from headrace.config.model import Model
from headrace.config.operations import Drift, Generate, Housekeeping, Observe, Spark, check_table_days
from headrace.config.score import Score, check_score_sources, score_entries, score_keys
from headrace.config.section import NAME, LocationText, PathText, Section, ServerText, parse_ds
from headrace.config.source import LandingSource, Source
from headrace.config.stages import STAGES
from headrace.config.table import NamedSource, Table, check_name
from headrace.config.train import Challenger, Retrain, Train, check_labels_of_tasks, check_loss, check_retrain
from headrace.config.variants import Compare, ModelVariant, check_search, with_keys
from headrace.config.warehouse import Publish
from headrace.errors import nearest
from headrace.storage import is_uri, names_store


class StageSettings(Section):
    """A stage of another package in a pipeline's day (docs/plugins.md)."""

    model_config = ConfigDict(populate_by_name=True)

    #: `module:Class`; null: the class that an installed package offers under the stage's name.
    kind: str | None = Field(default=None, alias="class")
    #: Settings of the class.
    args: Mapping[str, Any] = Field(default_factory=dict)
    #: Days whose output files `headrace gc` retains; null: as the class says, else all.
    keep_days: int | None = Field(default=None, ge=1)


class Spec(Section):
    """A whole pipeline."""

    #: The pipeline's name, which its folders in the workspace, its tables and its registered model have.
    pipeline: str
    #: A description for people, in the report and in the registry.
    description: str = ""
    #: The day of a run without `--ds` (snapshots).
    ds: str | None = None
    #: The click-log generator; only for `headrace generate`.
    generate: Generate | None = None
    #: Root of landing files and tables: a folder, or a URI (`s3://BUCKET/FOLDER`, `gs:`, `abfss:`). Default: `--home`.
    lake: LocationText | None = None
    #: Root of datasets, models, manifests and reports: as `lake`.
    store: LocationText | None = None
    #: A folder of each host for temporary files. Default: `--home`.
    scratch: PathText | None = None
    #: MLflow's tracking server, `http://HOST:PORT`; credentials are read from MLflow's own variables. Else an SQLite
    #: file below `--home`.
    registry: ServerText | None = None
    #: The source of the rows.
    source: Source
    #: The columns of a row, and the expectations of a day.
    table: Table
    #: Other sources: users, items, events of another kind. `from: NAME` reads one.
    sources: Mapping[str, NamedSource] = Field(default_factory=dict)
    #: The dataset that is made of the rows.
    features: Features
    #: Measures the events that followed the lists of earlier days; without it there is no stage `outcomes`.
    outcomes: Outcomes | None = None
    #: Experiments: parts of the users get lists of different models; without it there is no stage `experiments`.
    experiments: Mapping[str, Experiment] | None = Field(default=None, min_length=1)
    #: Compares the newest rows with the training range, column by column; without it there is no stage `drift`.
    drift: Drift | None = None
    #: The neural model.
    model: Model = Model()
    #: The training of the neural model.
    train: Train = Train()
    #: Daily training on top of earlier days; without it a warm start is as `train` says.
    retrain: Retrain | None = None
    #: A model that is trained from scratch every few days, beside the daily one; without it there is no stage
    #: `challenger`.
    challenger: Challenger | None = None
    #: XGBoost beside the neural model; without it there is no stage `baseline`.
    baseline: Baseline | None = None
    #: XGBoost as a second stage behind the neural model; without it there is no stage `second_stage`.
    second_stage: SecondStage | None = None
    #: Models that are trained on this dataset and tested against each other; without it there is no stage `compare`.
    compare: Compare | None = None
    #: Conditions for a day's model to become the champion; without it each one does, and there is no stage `gate`.
    gate: Gate | None = None
    #: Scores of users x items; without it there is no stage `score`.
    score: Score | None = None
    #: Scores to a warehouse; without it there is no stage `publish`.
    publish: Publish | None = None
    #: Stages of other packages, by name; each comes behind the stages that it needs.
    stages: Mapping[str, StageSettings] = Field(default_factory=dict)
    #: How long `headrace gc` retains each kind of file.
    housekeeping: Housekeeping = Housekeeping()
    #: Events and metrics of runs for other systems.
    observe: Observe = Observe()
    #: The Spark applications of the stages.
    spark: Spark = Spark()

    @cached_property
    def argument(self) -> str:
        """Return the pipeline's name or path as a word of a command line that a message advises."""
        return shlex.quote(self.pipeline)

    def given_as(self, argument: str | None) -> Spec:
        """Return the same spec with this `argument`. (No field: specs of one file are equal, whatever their names.)"""
        if argument is not None:
            self.__dict__["argument"] = shlex.quote(argument)
        return self

    @field_validator("pipeline")
    @classmethod
    def _pipeline_name(cls, value: str) -> str:
        if not NAME.fullmatch(value):
            raise ValueError(f"'{value}' must match {NAME.pattern}")
        return value

    @field_validator("ds", mode="before")
    @classmethod
    def _ds_text(cls, value: Any) -> Any:
        # YAML reads 2026-01-01 as a date.
        return None if value is None else parse_ds(str(value))

    @field_validator("stages")
    @classmethod
    def _stage_names(cls, value: Mapping[str, StageSettings]) -> Mapping[str, StageSettings]:
        for name in value:
            if not NAME.fullmatch(name):
                raise ValueError(f"'{name}' must match {NAME.pattern}")
            if name in STAGES:
                raise ValueError(f"'{name}' is a stage of headrace's own: give yours another name")
        return value

    @field_validator("sources")
    @classmethod
    def _source_names(cls, value: Mapping[str, NamedSource]) -> Mapping[str, NamedSource]:
        for name in value:
            check_name(name)
        return value

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the URIs that stages read besides lake and store."""
        sources = [self.source, *(named.source for named in self.sources.values())]
        paths: list[Any] = [place for source in sources for place in source.places]
        # Of operators of others `path` may name what is in no store.
        paths += [path for op in self.features.prepare if names_store(str(path := op.params.get("path")))]
        if self.score:
            candidates = self.score.candidates.sources.values() if self.score.candidates else ()
            paths += [entry.path for entry in (*candidates, *self.score.filters) if entry.kind == "table"]
        return tuple(dict.fromkeys(path for path in paths if isinstance(path, str) and is_uri(path)))

    def named_columns(self) -> dict[str, Sequence[str]]:
        """Return the columns that `features.carried`, the split and scoring name, by the key that names them."""
        named: dict[str, Sequence[str]] = {"features.carried": self.features.carried}
        if self.features.split.column:
            named["features.split.column"] = [self.features.split.column]
        if self.score:
            for side_name, side in (("user", self.score.user), ("item", self.score.item)):
                named[f"score.{side_name}"] = [side.key, *side.columns]
            named["score.context"] = list(self.score.context)
        return named

    @model_validator(mode="after")
    def _names_meet(self) -> Spec:
        names = [c.name for c in self.table.columns]
        named = {"features.label": [self.features.label], **self.named_columns()}
        for key, columns in named.items():
            for column in columns:
                # What `prepare` adds, headrace.features knows.
                if column not in names and not self.features.prepare:
                    hint = nearest(column, names)
                    raise ValueError(f"{key}: column '{column}' is not declared in table.columns{hint}")
        _check_timestamps(self.source, self.table, "")
        for name, source in self.sources.items():
            _check_timestamps(source.source, source.table, f"sources.{name}.")
        if self.features.split.by == "time" and not self.table.event_time:
            raise ValueError("features.split.by is 'time', but table.event_time is not set")
        if self.features.append is not None and not self.source.daily:
            raise ValueError(
                "features.append is for sources that bring a day's events each day, and source.daily is false: leave "
                "append out"
            )
        if self.train.rank_group and self.train.rank_group not in self.features.carried:
            raise ValueError(f"train.rank_group: '{self.train.rank_group}' must be in features.carried")
        carried = {"train.evaluation.user": self.train.evaluation.user, "train.sample_weight": self.train.sample_weight}
        if policy := self.train.evaluation.off_policy:
            path = "train.evaluation.off_policy"
            carried |= {f"{path}.propensity": policy.propensity, f"{path}.reward": policy.reward}
        for name, trees in (("baseline", self.baseline), ("second_stage", self.second_stage)):
            if trees:
                carried |= {f"{name}.label": trees.column, f"{name}.group": trees.group}
        if ranking := self.train.evaluation.full_ranking:
            carried |= {f"train.evaluation.full_ranking.{k}": getattr(ranking, k) for k in ("user", "order_by")}
        for key, carried_column in carried.items():
            if carried_column and carried_column not in self.features.carried:
                raise ValueError(f"{key}: '{carried_column}' must be in features.carried")
        check_labels_of_tasks(self.train, self.features, self.score, self.publish)
        check_loss(self.model, self.train, self.features, self.score, self.publish)
        if self.retrain:
            check_retrain(self.retrain, self.table, self.features, self.train, self.train_of_warm_start, self.model)
        if self.challenger:
            try:
                self.of_challenger()
            except ValueError as e:
                raise ValueError(f"challenger.train.{e}") from None
        if self.score:
            columns_of_events = None if self.features.prepare else names
            check_score_sources(self.score, self.sources, self.table.event_time, columns_of_events)
        if self.publish and not self.score:
            raise ValueError("publish needs a score section")
        if self.publish:
            try:
                self.publish.warehouse.known.check(self.publish, self.spark)
            except ValueError as e:
                raise ValueError(f"publish.{e}") from None
        if self.baseline:
            check_baseline(self.baseline, self.train, self.features, self.score, self.publish)
        if self.second_stage:
            check_second_stage(self.second_stage, self.train, self.features, self.score, self.publish)
        elif self.score and self.score.model == "second_stage":
            raise ValueError("score.model is 'second_stage', and there is no such section")
        if self.gate:
            check_gate(
                self.gate,
                {"baseline": self.baseline, "second_stage": self.second_stage},
                self.score,
                self.train,
                self.features,
                has_drift=self.drift is not None,
                has_challenger=self.challenger is not None,
                predicts_numbers=self.model.loss is not None and self.model.loss.predicts == "number",
            )
        if self.train.search:
            check_search(
                Spec,
                self.train.search,
                self.train.objectives(),
                self.model.kind,
                lambda model: self.with_variant(model).model.kind,
                has_lists=self.train.rank_group is not None,
            )
        if self.outcomes:
            main = NamedSource(source=self.source, table=self.table)
            check_outcomes(self.outcomes, self.score, main, self.sources, self.features.label, self.train.tasks)
            check_alerts(self.outcomes, self.experiments or {})
        if self.experiments is not None:
            check_experiments(self.experiments, self.score, self.outcomes)
            self._check_models_of_arms(self.experiments)
        window = self.features.window_days if self.features.split.by == "time" else 0
        sources = {name: (named.source, named.table) for name, named in self.sources.items()}
        served = self.served_days_read if self.outcomes else 0
        check_table_days(self.housekeeping, {"events": (self.source, self.table), **sources}, window, served)
        return self

    def train_of_warm_start(self) -> Train:
        """Return the section `train` of a day that starts from an earlier day's model.

        Raises:
            ValueError: the section does not take what `retrain.warm` says.
        """
        warm = self.retrain.warm if self.retrain else {}
        return with_keys(self.train, warm, over_defaults=True) if warm else self.train

    def of_challenger(self) -> Spec:
        """Return the pipeline whose model is trained from nothing, as `challenger` says.

        Raises:
            ValueError: the section train does not take what it says.
        """
        assert self.challenger is not None
        train = self.train.model_copy(update={"warm_start": False, "search": None})
        if self.challenger.train:
            train = with_keys(train, self.challenger.train, over_defaults=True)
        return self.model_copy(update={"train": train})

    def _check_models_of_arms(self, experiments: Mapping[str, Experiment]) -> None:
        """Check that each arm's model could score the pipeline alone."""
        for name, experiment in experiments.items():
            for arm, settings in experiment.arms.items():
                if settings.model is not None:
                    try:
                        self.scored_by(settings.model)
                    except ValueError as e:
                        raise ValueError(f"experiments.{name}.arms.{arm}.model: {e}") from None

    def scored_by(self, model: str) -> Spec:
        """Return the pipeline whose scores are all of one model, as `score.model` names it.

        Raises:
            ValueError: the pipeline has no such model.
        """
        assert self.score is not None
        sections = {name: getattr(self, name) for name in self.model_fields_set - {"experiments"}}
        try:
            return Spec.model_validate(sections | {"score": with_keys(self.score, {"model": model})})
        except ValidationError as e:
            raise ValueError("; ".join(str(f["msg"]).removeprefix("Value error, ") for f in e.errors())) from None

    @model_validator(mode="after")
    def _models_to_compare(self) -> Spec:
        labels = set()
        for name, variant in self.compare.models.items() if self.compare else ():
            try:
                spec = self.with_variant(variant)
            except ValueError as e:
                raise ValueError(f"compare.models.{name}: {e}") from None
            trees = None if variant.baseline is None else spec.baseline
            labels.add(self.features.label if trees is None or trees.label is None else trees.label)
        if len(labels) > 1:
            raise ValueError(
                f"compare.models: they learn {' and '.join(sorted(labels))} (baseline.label), and metrics of several "
                f"labels cannot be compared"
            )
        return self

    def with_variant(self, variant: ModelVariant) -> Spec:
        """Return the pipeline with another model, without the sections that judge, compare or search for models.

        Raises:
            ValueError: a section does not take what the variant says.
        """
        sections: dict[str, Any] = {name: getattr(self, name) for name in self.model_fields_set - {"compare", "gate"}}
        if variant.baseline is not None:
            sections["baseline"] = _section(
                "baseline", lambda: with_keys(self.baseline or Baseline(), variant.baseline or {})
            )
        if variant.model:
            sections["model"] = _section("model", lambda: with_keys(self.model, variant.model))
        train = self.train.model_copy(update={"search": None})
        sections["train"] = _section("train", lambda: with_keys(train, variant.train)) if variant.train else train
        return Spec.model_validate(sections)

    def days_until_ripe(self, label: str) -> int:
        """Return the days from a served day to the run that knows a label of `outcomes` for good.

        Raises:
            KeyError: there is no such label.
        """
        assert self.outcomes is not None
        main = NamedSource(source=self.source, table=self.table)
        return days_until_ripe(self.outcomes, label, main, self.sources)

    @property
    def served_days_read(self) -> int:
        """Return the days before a run whose lists its stage `outcomes` reads, and one."""
        assert self.outcomes is not None
        return max(self.days_until_ripe(name) for name in self.outcomes.labels) + self.outcomes.history_days

    def last_ripe_day(self, label: str, ds: str) -> str:
        """Return the newest served day whose label is final by the end of landing day `ds`.

        The label of an event of that UTC day, or of an earlier one, is final, too. Evaluation, training and decisions
        by days use this. Training by rows waits as long with `train.tasks.NAME.known_after`.
        """
        return (date.fromisoformat(ds) - timedelta(days=self.days_until_ripe(label))).isoformat()

    @property
    def compare_slots(self) -> int:
        """Return the most tasks of Spark that a model of `compare` runs at once."""
        specs = [self.with_variant(variant) for variant in (self.compare.models if self.compare else {}).values()]
        return max([self.train.ranks, *(s.baseline.workers for s in specs if s.baseline is not None)])

    def first_landing_day(self, day: str) -> str:
        """Return the first landing day on which an event of the UTC day `day`, or of a later one, can have landed.

        That day itself, unless landing days end later than UTC's: west of Greenwich, or for clocks that are ahead.
        """
        if self.source.timezone == "UTC" and not self.table.clock_skew_seconds:
            return day
        return (date.fromisoformat(day) - timedelta(days=1)).isoformat()


def _section(name: str, make: Callable[[], Section]) -> Section:
    try:
        return make()
    except ValueError as e:
        raise ValueError(f"{name}.{e}") from None


def _check_timestamps(source: Source, table: Table, prefix: str) -> None:
    """Refuse columns of times that are declared as something else. `where`: what stands before `source` in a key."""
    types = {c.name: c.type for c in table.columns}

    def check(key: str, column: str, allowed: Sequence[str]) -> None:
        if types.get(column) not in allowed:
            declaration = f"is {types[column]}" if column in types else f"is not declared in {prefix}table.columns"
            raise ValueError(f"{prefix}{key}: column '{column}' {declaration}; declare it {' or '.join(allowed)}")

    for column in source.timestamps:
        form = source.time_format(column)
        check("source.timestamps", column, ["timestamp"] if form is None else ["timestamp", "timestamp_ntz", "date"])
        if form is None:
            continue
        key = f"{prefix}source.timestamps.{column}"
        if not isinstance(source, LandingSource):
            raise ValueError(f"{key}: formats are of landing files; times of a table are timestamps or ISO 8601")
        if types[column] == "date" and form.has_time:
            raise ValueError(f"{key}: '{form.text}' has an hour, and a date has none; declare the column timestamp")
        if types[column] == "timestamp_ntz" and form.has_zone:
            raise ValueError(f"{key}: '{form.text}' has a zone, and timestamp_ntz has none; declare it timestamp")
    if source.complete is not None and source.complete.watermark is not None:
        check("source.complete.watermark", source.complete.watermark.column, ["timestamp", "date"])
    if isinstance(source, LandingSource) and source.timestamps and source.file_format.own_times:
        raise ValueError(f"{prefix}source.timestamps: format '{source.format}' has times of its own; leave it out")


def id_columns(spec: Spec) -> dict[str | None, frozenset[str]]:
    """Return the declared text columns of each source whose values are ids.

    These are the keys of each table (`table.keys`), the columns that become `score.user.key` and `score.item.key`, and
    those that candidates and filters read as a user's or an item's key.

    Args:
        spec: the pipeline.

    Returns:
        names of columns by source; None is the pipeline's own events.
    """
    tables: dict[str | None, Table] = {None: spec.table, **{name: s.table for name, s in spec.sources.items()}}
    ids: dict[str | None, set[str]] = {name: set(table.keys) for name, table in tables.items()}
    if spec.score is not None:
        # Labels of `outcomes` are joined by these keys, whichever source they are of.
        for columns in ids.values():
            columns |= {spec.score.user.key, spec.score.item.key}
        for _, entry in score_entries(spec.score):
            if getattr(entry, "path", None) is not None:
                continue  # a table of somebody else's, which ingest does not read
            ids[getattr(entry, "from_", None)] |= {
                column for key, column in score_keys(entry, spec.score) if key in ("key", "user", "item")
            }
        ids[None] = {_before_renames(spec.features.prepare, column) for column in ids[None]} | set(spec.table.keys)
    texts = {name: {c.name for c in table.columns if c.type == "string"} for name, table in tables.items()}
    return {name: frozenset(columns & texts[name]) for name, columns in ids.items()}


def _before_renames(prepare: Sequence[OpSpec], column: str) -> str:
    """Return the name that a column has before `features.prepare` renames it."""
    for op in reversed(prepare):
        to = op.params.get("to")
        if op.op == "rename" and isinstance(to, Mapping):
            column = next((str(old) for old, new in to.items() if new == column), column)
    return column
