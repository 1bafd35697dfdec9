"""A whole pipeline: the sections together, and what must agree between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import date, timedelta
from typing import Any

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from headrace.config.baseline import Baseline, Trees
from headrace.config.candidate_checks import check_score_sources
from headrace.config.compare import Compare, ModelVariant, with_keys
from headrace.config.drift import Drift
from headrace.config.experiment_checks import check_experiments
from headrace.config.experiments import Experiment
from headrace.config.features import Features
from headrace.config.gate import Gate
from headrace.config.gate_checks import check_gate
from headrace.config.generate import Generate
from headrace.config.housekeeping import Housekeeping, check_table_days
from headrace.config.model import Model
from headrace.config.named_source import NamedSource, check_name
from headrace.config.observe import Observe
from headrace.config.outcome_checks import check_outcomes, days_until_ripe
from headrace.config.outcomes import Outcomes
from headrace.config.paths import leaves
from headrace.config.publish import Publish
from headrace.config.retrain import Challenger, Replay, Retrain
from headrace.config.score import Score
from headrace.config.search import SEARCHABLE, Parameter, Search, parameter_type
from headrace.config.second_stage import SecondStage
from headrace.config.section import NAME, Section, parse_ds
from headrace.config.source import LandingSource, Source
from headrace.config.spark import Spark
from headrace.config.table import Table
from headrace.config.train import Train
from headrace.errors import nearest


class Spec(Section):
    """A whole pipeline."""

    #: Its name: of its folders below the workspace, its tables, its registered model.
    pipeline: str
    #: For people: in the report and in the registry.
    description: str = ""
    #: The day that is run when none is given (snapshots).
    ds: str | None = None
    #: The click-log generator; only for `headrace generate`.
    generate: Generate | None = None
    #: Where rows come from.
    source: Source
    #: What a row is, and what must hold for a day of them.
    table: Table
    #: Other sources: users, items, events of another kind. `from: NAME` reads one.
    sources: Mapping[str, NamedSource] = Field(default_factory=dict)
    #: From rows to the dataset.
    features: Features
    #: What users did with the lists of earlier days; without it there is no stage `outcomes`.
    outcomes: Outcomes | None = None
    #: Models beside each other for parts of the users; without it there is no stage `experiments`.
    experiments: Mapping[str, Experiment] | None = Field(default=None, min_length=1)
    #: Counts columns by day and judges them; without it there is no stage `drift`.
    drift: Drift | None = None
    #: The neural model.
    model: Model = Model()
    #: How it is trained.
    train: Train = Train()
    #: A day that learns from the days before it; without it a warm start is as `train` says.
    retrain: Retrain | None = None
    #: A model trained from nothing every few days, beside it; without it there is no stage `challenger`.
    challenger: Challenger | None = None
    #: XGBoost beside it; without it there is no stage `baseline`.
    baseline: Baseline | None = None
    #: XGBoost behind it; without it there is no stage `second_stage`.
    second_stage: SecondStage | None = None
    #: Models over this dataset, tested against each other; without it there is no stage `compare`.
    compare: Compare | None = None
    #: What a day's model must be to become the champion; without it each one does, and there is no stage `gate`.
    gate: Gate | None = None
    #: Scores of users x items; without it there is no stage `score`.
    score: Score | None = None
    #: Scores to a warehouse; without it there is no stage `publish`.
    publish: Publish | None = None
    #: What `headrace gc` keeps.
    housekeeping: Housekeeping = Housekeeping()
    #: Who else hears of what the stages do.
    observe: Observe = Observe()
    #: The Spark applications of the stages.
    spark: Spark = Spark()

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

    @field_validator("sources")
    @classmethod
    def _source_names(cls, value: Mapping[str, NamedSource]) -> Mapping[str, NamedSource]:
        for name in value:
            check_name(name)
        return value

    def named_columns(self) -> dict[str, Sequence[str]]:
        """The columns that carried columns, split and scoring name, by the key that names them."""
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
        wanted = {"features.label": [self.features.label], **self.named_columns()}
        for where, columns in wanted.items():
            for column in columns:
                # What `prepare` adds, headrace.features knows.
                if column not in names and not self.features.prepare:
                    hint = nearest(column, names)
                    raise ValueError(f"{where}: column '{column}' is not declared in table.columns{hint}")
        _check_timestamps(self.source, self.table, "")
        for name, named in self.sources.items():
            _check_timestamps(named.source, named.table, f"sources.{name}.")
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
            where = "train.evaluation.off_policy"
            carried |= {f"{where}.propensity": policy.propensity, f"{where}.reward": policy.reward}
        for name, trees in (("baseline", self.baseline), ("second_stage", self.second_stage)):
            if trees:
                carried |= {f"{name}.label": trees.column, f"{name}.group": trees.group}
        if ranking := self.train.evaluation.full_ranking:
            carried |= {f"train.evaluation.full_ranking.{k}": getattr(ranking, k) for k in ("user", "order_by")}
        for key, asked in carried.items():
            if asked and asked not in self.features.carried:
                raise ValueError(f"{key}: '{asked}' must be in features.carried")
        self._check_tasks()
        self._check_loss()
        if self.retrain:
            self._check_retrain(self.retrain)
        if self.challenger:
            try:
                self.of_challenger()
            except ValueError as e:
                raise ValueError(f"challenger.train.{e}") from None
        if self.score:
            own = None if self.features.prepare else names
            check_score_sources(self.score, self.sources, self.table.event_time, own)
        if self.publish and not self.score:
            raise ValueError("publish needs a score section")
        if self.baseline:
            self._check_baseline(self.baseline)
        if self.second_stage:
            self._check_second_stage(self.second_stage)
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
            self._check_search(self.train.search)
        if self.outcomes:
            main = NamedSource(source=self.source, table=self.table)
            check_outcomes(self.outcomes, self.score, main, self.sources, self.features.label, self.train.tasks)
        if self.experiments is not None:
            check_experiments(self.experiments, self.score, self.outcomes)
            self._check_models_of_arms(self.experiments)
        window = self.features.window_days if self.features.split.by == "time" else 0
        sources = {name: (named.source, named.table) for name, named in self.sources.items()}
        served = self.served_days_read if self.outcomes else 0
        check_table_days(self.housekeeping, {"events": (self.source, self.table), **sources}, window, served)
        return self

    def _check_retrain(self, retrain: Retrain) -> None:
        """Days are there and carried, and a day that starts warm is a training like any other."""
        if retrain.half_life_days is not None:
            time = self.table.event_time
            if self.features.split.by != "time" or time not in self.features.carried:
                raise ValueError(
                    "retrain.half_life_days weighs rows by the days of their events: set features.split.by to 'time', "
                    "and name table.event_time in features.carried"
                )
        if retrain.warm:
            try:
                self.train_of_warm_start()
            except ValueError as e:
                raise ValueError(f"retrain.warm.{e}") from None
        if retrain.replay is not None:
            self._check_replay(retrain.replay)

    def _check_replay(self, replay: Replay) -> None:
        """Rows have days, a step has some of both kinds, and nothing looks at the rows of a step together."""
        if self.features.split.by != "time":
            raise ValueError("retrain.replay draws rows of the days before the window: set features.split.by to 'time'")
        if self.train.negatives is not None or (self.model.loss is not None and self.model.loss.group is not None):
            raise ValueError("retrain.replay: not with train.negatives or model.loss.group, which are of a step's rows")
        for train in (self.train, self.train_of_warm_start()):
            rows = replay.rows(train.batch_size, train.streams)
            if not 0 < rows < train.batch_size:
                raise ValueError(
                    f"retrain.replay.share: {replay.share:g} of train.batch_size ({train.batch_size}) is {rows} rows "
                    f"(a multiple of train.streams, {train.streams}): some must be of either kind"
                )

    def train_of_warm_start(self) -> Train:
        """The section `train` of a day that starts from an earlier day's model.

        Raises:
            ValueError: the section does not take what `retrain.warm` says.
        """
        warm = self.retrain.warm if self.retrain else {}
        return with_keys(self.train, warm, over_defaults=True) if warm else self.train

    def of_challenger(self) -> Spec:
        """The pipeline whose model is trained from nothing, as `challenger` says.

        Raises:
            ValueError: the section train does not take what it says.
        """
        assert self.challenger is not None
        train = self.train.model_copy(update={"warm_start": False, "search": None})
        if self.challenger.train:
            train = with_keys(train, self.challenger.train, over_defaults=True)
        return self.model_copy(update={"train": train})

    def _check_models_of_arms(self, experiments: Mapping[str, Experiment]) -> None:
        """Each arm's model could score the pipeline alone."""
        for name, experiment in experiments.items():
            for arm, given in experiment.arms.items():
                if given.model is not None:
                    try:
                        self.scored_by(given.model)
                    except ValueError as e:
                        raise ValueError(f"experiments.{name}.arms.{arm}.model: {e}") from None

    def scored_by(self, model: str) -> Spec:
        """The pipeline whose scores are all of one model, as `score.model` names it.

        Raises:
            ValueError: the pipeline has no such model.
        """
        assert self.score is not None
        sections = {name: getattr(self, name) for name in self.model_fields_set - {"experiments"}}
        try:
            return Spec.model_validate(sections | {"score": with_keys(self.score, {"model": model})})
        except ValidationError as e:
            raise ValueError("; ".join(str(f["msg"]).removeprefix("Value error, ") for f in e.errors())) from None

    def _check_search(self, search: Search) -> None:
        _check_parameters(search.parameters, "train.search.parameters", self.model.kind)
        for name, model in search.models.items():
            where = f"train.search.models.{name}"
            try:
                kind = self.with_variant(model).model.kind
            except ValueError as e:
                raise ValueError(f"{where}: {e}") from None
            _check_parameters(model.parameters, f"{where}.parameters", kind)
        if search.of_lists and self.train.rank_group is None:
            raise ValueError(f"train.search.objective is '{search.objective}', but train.rank_group is not set")
        if search.objective not in (known := self.train.objectives()):
            hint = nearest(search.objective, known)
            raise ValueError(f"train.search.objective: '{search.objective}' is none of {', '.join(known)}{hint}")

    def _check_baseline(self, baseline: Baseline) -> None:
        """Its lists have a column, its labels are what it learns, and what is published are probabilities."""
        self._check_trees("baseline", baseline)
        if baseline.label is not None and self.score and self.score.model == "best":
            raise ValueError(
                f"score.model is 'best', but the baseline learns '{baseline.label}' (baseline.label) and is measured "
                f"by it: no metric says which model is better; set score.model to 'neural' or 'baseline'"
            )
        if baseline.objective != "classification" and self.score and self.score.model in ("baseline", "best"):
            self._refuse_to_publish("baseline", baseline)

    def _check_second_stage(self, trees: SecondStage) -> None:
        """There are rows of which the first model has learned nothing, to learn from and to measure by."""
        self._check_trees("second_stage", trees)
        split = self.features.split
        if split.by == "position" or (split.by == "time" and not split.test_days):
            raise ValueError(
                "second_stage learns from the split valid and is evaluated on the split test, of which there is none: "
                "set features.split.test_days (by time), or split by a column"
            )
        if self.train.pretrained:
            raise ValueError(
                "second_stage learns from rows of which the neural model has learned nothing, and what the models of "
                "train.pretrained learned from is not known; leave one of the two out"
            )
        if trees.objective != "classification" and self.score and self.score.model == "second_stage":
            self._refuse_to_publish("second_stage", trees)

    def _check_trees(self, name: str, trees: Trees) -> None:
        """Lists have a column, and labels are what is learned."""
        if trees.objective == "ranking" and not (trees.group or self.train.rank_group):
            raise ValueError(f"{name}.objective is 'ranking': name the carried column of its lists, {name}.group")
        if trees.objective == "classification" and self.features.label_type == "number" and trees.column is None:
            another = ", or name a carried column of 0 and 1, baseline.label" if name == "baseline" else ""
            raise ValueError(
                f"features.label_type is 'number', and {name}.objective is 'classification': set it to "
                f"'regression'{another}"
            )

    def _refuse_to_publish(self, name: str, trees: Trees) -> None:
        if self.publish:
            raise ValueError(
                f"publish takes probabilities, and the scores of a {name} for {trees.objective} are none: set "
                f"score.model to 'neural', or leave publish out"
            )

    def _check_loss(self) -> None:
        """Labels and loss fit each other, and a list's column is carried."""
        loss, kind = self.model.loss, self.model.kind
        if loss is not None and loss.group and loss.group not in self.features.carried:
            raise ValueError(f"model.loss.group: '{loss.group}' must be in features.carried")
        is_number = loss is not None and loss.predicts == "number"
        if self.features.label_type == "number" and not is_number and (loss is not None or ":" not in kind):
            raise ValueError(
                f"features.label_type is 'number', and model.loss is {loss.kind if loss else 'bce'}: set model.loss to "
                f"squared_error, or take a class of your own with a loss of such labels"
            )
        if is_number and self.train.evaluation.off_policy:
            raise ValueError(
                "train.evaluation.off_policy takes probabilities, and model.loss squared_error predicts numbers: leave "
                "it out"
            )
        if self.publish and is_number and self.score and self.score.model != "baseline":
            raise ValueError("publish takes probabilities, and model.loss squared_error predicts numbers: leave it out")

    def _check_tasks(self) -> None:
        """Labels of tasks are carried, no feature is made of one, and what is scored is one."""
        for name, task in self.train.tasks.items():
            asked = {"label": task.label}
            if task.known_after is not None:
                asked["known_after.event_time"] = task.known_after.event_time
            for key, column in asked.items():
                if column is not None and column not in self.features.carried:
                    raise ValueError(f"train.tasks.{name}.{key}: '{column}' must be in features.carried")
            for i, chain in enumerate(self.features.workflow):
                if task.label in chain.columns:
                    raise ValueError(
                        f"features.workflow[{i}].columns: '{task.label}' is the label of train.tasks.{name}; a feature "
                        f"made of it would leak it"
                    )

        if self.score is None or (output := self.score.output) is None:
            return
        if output not in self.train.tasks:
            known = ", ".join(self.train.tasks) or "there are none"
            raise ValueError(f"score.output: '{output}' is no task of train.tasks ({known})")
        if self.score.model not in ("neural", "today"):
            raise ValueError(f"score.output is of the neural model, and score.model is '{self.score.model}'")
        if self.publish and not self.train.tasks[output].is_probability:
            raise ValueError(f"score.output: publish takes probabilities, and '{output}' has loss: squared_error")

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

    @model_serializer(mode="wrap")
    def _without_later_sections(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Fingerprints of specs without these sections are those from before there were any."""
        dumped: dict[str, Any] = serialize(self)
        for name in ("compare", "second_stage", "gate", "retrain", "challenger", "outcomes", "experiments"):
            if getattr(self, name) is None:
                dumped.pop(name, None)
        for name, default in (("housekeeping", Housekeeping()), ("observe", Observe())):
            if getattr(self, name) == default:
                dumped.pop(name, None)
        return dumped

    def with_variant(self, variant: ModelVariant) -> Spec:
        """The pipeline with another model, which nothing judges, and nothing to compare or to search for.

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
        """Days from a served day to the run that knows a label of `outcomes` for good.

        Raises:
            KeyError: there is no such label.
        """
        assert self.outcomes is not None
        main = NamedSource(source=self.source, table=self.table)
        return days_until_ripe(self.outcomes, label, main, self.sources)

    @property
    def served_days_read(self) -> int:
        """Days before a run whose lists its stage `outcomes` reads, and one."""
        assert self.outcomes is not None
        return max(self.days_until_ripe(name) for name in self.outcomes.labels) + self.outcomes.history_days

    def last_ripe_day(self, label: str, ds: str) -> str:
        """The newest served day whose label is known for good by the end of landing day `ds`.

        The label of an event of that UTC day, or of an earlier one, is known for good, too: what evaluates, trains or
        decides by days asks this. Training by rows waits as long with `train.tasks.NAME.known_after`.
        """
        return (date.fromisoformat(ds) - timedelta(days=self.days_until_ripe(label))).isoformat()

    @property
    def compare_slots(self) -> int:
        """Tasks of Spark that a model of `compare` runs at once, at most."""
        specs = [self.with_variant(variant) for variant in (self.compare.models if self.compare else {}).values()]
        return max([self.train.ranks, *(s.baseline.workers for s in specs if s.baseline is not None)])

    def first_landing_day(self, day: str) -> str:
        """The first landing day on which an event of the UTC day `day`, or of a later one, can have landed.

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


def _check_timestamps(source: Source, table: Table, where: str) -> None:
    types = {c.name: c.type for c in table.columns}
    for column in source.timestamps:
        if types.get(column) != "timestamp":
            found = f"is {types[column]}" if column in types else f"is not declared in {where}table.columns"
            raise ValueError(f"{where}source.timestamps: column '{column}' {found}; declare it timestamp")
    if isinstance(source, LandingSource) and source.timestamps and source.has_own_times:
        raise ValueError(f"{where}source.timestamps: format '{source.format}' has times of its own; leave it out")


def _check_parameters(parameters: Mapping[str, Parameter], key: str, kind: str) -> None:
    """See that parameters of a search are fields of the spec that can be searched, of the model class `kind`."""
    known = [p for p in leaves(Spec) if _is_searchable(p)]
    for path, parameter in parameters.items():
        where = f"{key}: '{path}'"
        try:
            number = parameter_type(Spec, path, parameter, kind)
        except KeyError:
            hint = nearest(path, known) or f"; fields that can be searched: {', '.join(known)}"
            raise ValueError(f"{where} is no field of the spec{hint}") from None
        if not _is_searchable(path):
            raise ValueError(
                f"{where} changes nothing that a trial could tell; below these all can be searched: "
                f"{', '.join(SEARCHABLE)}"
            )
        if parameter.choices is None and number is None:
            raise ValueError(f"{where} takes no numbers, so it has no low and high: write {{choices: [...]}}")
        bounds = (parameter.low, parameter.high, parameter.step)
        if number is int and any(b is not None and b != int(b) for b in bounds):
            raise ValueError(f"{where} takes whole numbers: low, high and step must be such")


def _is_searchable(path: str) -> bool:
    return any(path == s or path.startswith(f"{s}.") for s in SEARCHABLE)
