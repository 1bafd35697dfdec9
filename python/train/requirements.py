"""Requirements of the sections `model` and `train`: of a dataset's schema, and of each other.

It imports neither torch nor Spark. A dry run checks them with the schema that the spec implies, and the stage `train`
with the schema of the dataset.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.config import Evaluation, Model, Sharding, Spec, Train
from headrace.config.embeddings import EmbeddingOptimizer
from headrace.config.model_args import MODEL_ARGS, FeatureRole, ModelArgs
from headrace.config.schema import DatasetSchema, Feature, Kind
from headrace.errors import UserError, nearest
from headrace.train.carried_columns import DayDecay, ListColumn, SampleWeights, TaskLabels

#: Key in a categorical feature's metadata that names another feature, the segment of its ids.
SEGMENT = "segment"


def check_requirements(
    model: Model, train: Train, schema: DatasetSchema, ds: str, decay: DayDecay | None, new_rows: str = "mean"
) -> list[str]:
    """Check that a dataset has the columns and features that the sections name, and that their keys are compatible.

    Args:
        model: the section `model`.
        train: the section `train`.
        schema: schema of the dataset; cardinalities may be upper bounds.
        ds: the day.
        decay: decay of the rows' weights by days; None: all days have the same weight.
        new_rows: `retrain.new_rows`.

    Returns:
        the carried columns of training rows that are read, by their names in the dataset.

    Raises:
        UserError: the dataset lacks a name, a column or feature has another kind, or keys are not compatible.
    """
    labels, lists = TaskLabels(train, schema, ds), ListColumn.from_spec(model, train, schema)
    carried = [*SampleWeights(train, schema, decay).carried, *([] if lists is None else [lists.column])]
    # The following checks import libraries that read batches and measure predictions: only if they are needed.
    if train.negatives is not None:
        from headrace.dataset.negatives import NegativeSampler

        NegativeSampler.from_config(schema, train.negatives)
        if train.negatives.form == "candidates":
            from headrace.dataset.candidates import CandidateSampler

            CandidateSampler.from_config(schema, train.negatives, train.seed)
    if train.unknown_rate:
        from headrace.dataset.negatives import UnknownIds

        UnknownIds.from_rates(schema, train.unknown_rate)
    if train.evaluation != Evaluation():
        from headrace.train.evaluation.request import Request

        Request(train, schema)
    check_tables(train.embeddings, train.sharding, schema)
    _check_model(model, train, schema)
    if new_rows == "segment":
        for feature in schema.of(Kind.CATEGORICAL):
            if SEGMENT in feature.metadata:
                segment_feature(feature, schema)
    return labels.with_label_columns(carried)


def check_tables(embeddings: EmbeddingOptimizer, sharding: Sharding, schema: DatasetSchema) -> None:
    """Check that settings of single tables name tables: a vocabulary, else a feature, or `<vocabulary>.<table>`.

    Raises:
        UserError: a name is not a table, or settings of raw ids name a feature without them.
    """
    features = schema.of(Kind.CATEGORICAL)
    raw = [f.name for f in features if f.dynamic]
    coded = list(dict.fromkeys(f.vocabulary or f.name for f in features if not f.dynamic))
    if embeddings.dynamic:
        from headrace.embeddings.dynamic.spec import check_known

        check_known("train.embeddings.dynamic", embeddings.dynamic, raw)
    for key, names, known in (
        ("train.embeddings.tables", embeddings.tables, [*coded, *raw]),
        ("train.sharding.tables", sharding.tables, coded),
    ):
        for name in names:
            if name not in known and not any(name.startswith(f"{table}.") for table in coded):
                raise UserError(
                    f"{key}: the model has no table '{name}'{nearest(name, known)} (there are: "
                    f"{', '.join(known) or 'none'})"
                )


def segment_feature(feature: Feature, schema: DatasetSchema) -> Feature:
    """Return the feature that the metadata of another one names as its segment.

    Raises:
        UserError: the dataset has no feature of that name, or one of the two has several values a row.
    """
    features = {f.name: f for f in schema.of(Kind.CATEGORICAL) if not (f.is_list or f.dynamic)}
    name = feature.metadata[SEGMENT]
    if name not in features or feature.is_list:
        known = ", ".join(f for f in features if f != feature.name) or "none"
        hint = f"'{feature.name}' is a list" if feature.is_list else f"there are: {known}"
        raise UserError(
            f"the metadata of feature '{feature.name}' names the segment '{name}': it is a categorical feature of one "
            f"value a row, of a feature of one value{nearest(str(name), list(features))}; {hint}"
        )
    return features[name]


def settings_of_class(model: Model) -> ModelArgs | None:
    """Return the settings of one of headrace's own classes; None for another class, whose settings are unknown.

    The settings of a DLRM are keys of the section itself, so its own are empty.
    """
    if model.kind == "dlrm":
        return ModelArgs()
    kind = MODEL_ARGS.get(model.kind)
    return None if kind is None else kind.model_validate(dict(model.args))


def has_vectors(model: Model) -> bool:
    """Return whether a model may have a retrieval form; a class of another package may."""
    args = settings_of_class(model)
    return args is None or args.has_vectors


def _check_model(model: Model, train: Train, schema: DatasetSchema) -> None:
    """Check one of headrace's own classes against the dataset, the tasks and the drawn negatives."""
    args = settings_of_class(model)
    if args is None:
        return
    features = {f.name: f for f in (*schema.of(Kind.CONTINUOUS), *schema.of(Kind.CATEGORICAL))}
    named = args.named_features()
    for key, name, role in named:
        known = [f.name for f in features.values() if _has_role(f, role)]
        if name not in known:
            raise UserError(
                f"model.args.{key}: '{name}' is no {_ROLES[role]}{nearest(name, known)}; there are: "
                f"{', '.join(known) or 'none'}"
            )
    feature_of = {key: features[name] for key, name, _ in named}
    shared = [feature_of[key] for key in args.share_vocabulary]
    if len({f.vocabulary or f.name for f in shared}) > 1:
        raise UserError(
            f"model.args: {' and '.join(repr(f.name) for f in shared)} have vocabularies of their own, whose codes "
            f"mean other items: let both be of one, categorify: {{vocabulary: NAME}}"
        )
    if (fault := args.fault_of_widths(model.embedding_dim)) is not None:
        raise UserError(f"model.args: {fault}")
    has_user = "user_features" in feature_of or any("user" in f.tags for f in features.values())
    if model.kind == "two_tower" and not has_user:
        raise UserError(
            "two_tower: no feature is a user's; tag them (`tags: [user]` in features.workflow), or name them in "
            "model.args.user_features"
        )
    _check_outputs(model, args, train)
    if args.compares_drawn_items:
        _check_drawn(feature_of["item"], train, schema)
    if train.evaluation.full_ranking is not None:
        if not args.has_vectors:
            raise UserError(
                f"train.evaluation.full_ranking is for models in retrieval form, and '{model.kind}' is none "
                f"(docs/retrieval.md)"
            )
        _check_full_ranking(train.evaluation, feature_of["item"], features)


_ROLES: dict[FeatureRole, str] = {
    "id": "categorical feature of one id a row",
    "ids": "categorical feature of a list of ids",
    "categorical": "categorical feature",
    "number": "feature of numbers",
    "any": "feature",
}


def _has_role(feature: Feature, role: FeatureRole) -> bool:
    is_categorical = feature.kind is Kind.CATEGORICAL
    return {
        "id": is_categorical and not feature.is_list,
        "ids": is_categorical and feature.is_list,
        "categorical": is_categorical,
        "number": not is_categorical,
        "any": True,
    }[role]


def _check_outputs(model: Model, args: ModelArgs, train: Train) -> None:
    """Check that a class has an output for each task and a loss, and supports pretrained models if they are set."""
    if train.tasks and not args.has_task_outputs:
        classes = ", ".join(name for name, kind in MODEL_ARGS.items() if kind.has_task_outputs)
        raise UserError(
            f"train.tasks: the model '{model.kind}' gives one output; choose a model.class of several tasks ({classes})"
        )
    if model.kind == "esmm" and not any(task.product for task in train.tasks.values()):
        raise UserError(
            "model.class 'esmm' learns a conversion from a product of tasks, and train.tasks has none: write "
            "click_and_purchase: {product: [click, purchase]} beside both, and weight: 0 for the purchase"
        )
    if model.loss is not None and (train.tasks or args.has_vectors):
        whose = "train.tasks say the losses" if train.tasks else f"'{model.kind}' has a loss of its own"
        raise UserError(f"model.loss: {whose}; leave it out")
    if model.loss is not None and not model.loss.is_of_rows and model.loss.group is None:
        raise UserError(
            f"model.loss: {model.loss.kind} compares a row's item with others, and '{model.kind}' gives none to "
            f"compare with; take a class that scores train.negatives, or a loss of rows"
        )
    for part in train.pretrained:
        if not args.starts_from:
            raise UserError(f"train.pretrained: '{model.kind}' does not start from other models; leave it out")
        if part not in args.starts_from:
            raise UserError(
                f"train.pretrained: '{part}' is no part of '{model.kind}'{nearest(part, args.starts_from)}; there "
                f"are: {', '.join(args.starts_from)}"
            )


def _check_drawn(item: Feature, train: Train, schema: DatasetSchema) -> None:
    """Check that negatives are drawn from the feature that a class compares with a row's item."""
    negatives = train.negatives
    if negatives is None or negatives.form != "candidates":
        raise UserError(
            f"the model compares '{item.name}' with items that are drawn for each row: set train.negatives, such as "
            f"{{column: {item.name}, as: candidates, per_positive: 4}}"
        )
    from headrace.dataset.negatives import drawn_column

    drawn, _ = drawn_column(schema, negatives)
    if (drawn.vocabulary or drawn.name) != (item.vocabulary or item.name):
        raise UserError(
            f"the model compares '{item.name}' with items that are drawn, but train.negatives.column is "
            f"'{negatives.column}', whose codes are others'"
        )


def _check_full_ranking(evaluation: Evaluation, item: Feature, features: Mapping[str, Feature]) -> None:
    """Check that the features that full rankings name refer to the model's items."""
    if evaluation.item not in (None, item.name):
        raise UserError(
            f"train.evaluation.item is '{evaluation.item}', but the model's items are '{item.name}': name that one"
        )
    lists = [f.name for f in features.values() if f.is_list and f.vocabulary == item.vocabulary]
    excluded = None if evaluation.full_ranking is None else evaluation.full_ranking.exclude
    if excluded is not None and excluded not in lists:
        raise UserError(
            f"train.evaluation.full_ranking.exclude: '{excluded}' is no list of codes of '{item.name}'; features of "
            f"its vocabulary are: {', '.join(lists) or 'none'}"
        )


def refuse_drawn_negatives(spec: Spec, name: str) -> None:
    """Check that the dataset has negatives of its own.

    Raises:
        UserError: negatives are drawn while the neural model trains.
    """
    if spec.train.negatives is not None:
        raise UserError(
            f"{name}: pipeline '{spec.pipeline}' draws its negatives batch by batch while the neural model trains "
            f"(train.negatives), so its dataset has nothing for XGBoost to tell clicks from; remove the section "
            f"`{name}`"
        )
