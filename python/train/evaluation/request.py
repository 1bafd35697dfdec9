"""What the spec asks of an evaluation, found in the dataset's schema: without torch, for those who only check."""

from __future__ import annotations

from headrace import config
from headrace.errors import UserError
from headrace.features.table_ops.row_expression import RowExpression
from headrace.schema import DatasetSchema, Feature, Kind
from headrace.train.carried_columns import carried_types, columns_of, parse_carried


class Request:
    """What is measured, of which columns.

    Args:
        train: with `evaluation`, `rank_group` and `rank_k`.
        schema: the dataset's.

    Raises:
        UserError: a slice, the user or the item is nothing that the dataset has.
    """

    def __init__(self, train: config.Train, schema: DatasetSchema) -> None:
        settings, where = train.evaluation, "train.evaluation"
        self.settings, self.schema, self.k = settings, schema, train.rank_k
        #: The tasks besides the first, which have metrics of their own.
        self.tasks = dict(list(train.tasks.items())[1:])
        #: Names of the carried columns that say which list a row is of, and which user.
        self.group = None if train.rank_group is None else schema.carried_name(train.rank_group)
        self.user = None if settings.user is None else schema.carried_name(settings.user)
        self.item = None if settings.item is None else coded_feature(schema, settings.item, f"{where}.item")
        #: By slice: its expression, or the feature whose codes in training it asks for.
        self.expressions = {
            name: parse_slice(name, slice_.expression, schema)
            for name, slice_ in settings.slices.items()
            if slice_.expression is not None
        }
        self.ranked_by()
        self.seen = {
            name: coded_feature(schema, slice_.seen, f"{where}.slices.{name}.seen").name
            for name, slice_ in settings.slices.items()
            if slice_.seen is not None
        }

        self.policy = settings.off_policy
        #: What the model chooses among, and the features that follow from it.
        self.action: Feature | None = None
        self.action_features: tuple[Feature, ...] = ()
        if self.policy is not None:
            where = f"{where}.off_policy"
            for key, column in (("propensity", self.policy.propensity), ("reward", self.policy.reward)):
                if column is not None:
                    check_number(schema, column, f"{where}.{key}")
            self.action = coded_feature(schema, self.policy.action, f"{where}.action")
            self.action_features = tuple(
                scalar_feature(schema, name, f"{where}.action_features") for name in self.policy.action_features
            )

    @property
    def is_basic(self) -> bool:
        """Whether nothing is asked for besides the basic metrics."""
        return self.settings == config.Evaluation() and not self.tasks

    def carried(self, lists: bool = False) -> list[str]:
        """Carried columns that predictions need; `lists`: of the split `rank`."""
        key = self.group if lists else self.user
        columns = self.sliced_by()
        if self.policy is not None and not lists:
            asked = (self.policy.propensity, self.policy.reward)
            columns += [self.schema.carried_name(c) for c in asked if c is not None]
        return list(dict.fromkeys([*([] if key is None else [key]), *columns]))

    def sliced_by(self) -> list[str]:
        """Carried columns that slices look at."""
        return [self.schema.carried_name(c) for c in columns_of(self.expressions.values())]

    def ranked_by(self) -> tuple[str | None, str | None]:
        """The carried columns `user` and `order_by` of full rankings, by their names in the dataset.

        Raises:
            UserError: `order_by` is not carried, or is no number.
        """
        asked = self.settings.full_ranking
        if asked is None:
            return None, None
        user, order_by = (None if c is None else self.schema.carried_name(c) for c in (asked.user, asked.order_by))
        if asked.order_by is not None:
            check_number(self.schema, asked.order_by, "train.evaluation.full_ranking.order_by")
        return user, order_by

    def codes(self, lists: bool = False) -> list[str]:
        """Features whose codes predictions need."""
        item = [self.item.name] if lists and self.item is not None else []
        action = [self.action.name] if not lists and self.action is not None else []
        return list(dict.fromkeys([*item, *action, *self.seen.values()]))


def parse_slice(name: str, text: str, schema: DatasetSchema) -> RowExpression:
    """An expression over carried columns, its value as text.

    Raises:
        UserError: a column that is not carried, or an expression that is not known here.
    """
    where = f"train.evaluation.slices.{name}: '{text}'"
    # A number alone is not cast to text by the parser as a column is: real numbers would make a slice each.
    found = parse_carried(text, schema, "string")
    if found is None:
        known = ", ".join(carried_types(schema)) or "there are none"
        raise UserError(
            f"{where} is no expression over the carried columns ({known}); write a column "
            f"of features.carried, or such as `age < 30`, `case when ... then 'a' else 'b' end` "
            f"(headrace reference: lambda)"
        )
    return found


def check_number(schema: DatasetSchema, column: str, where: str) -> None:
    """Check that a column of the lake's table is carried, and is not text.

    Args:
        where: the key of the spec that names it.

    Raises:
        UserError: it is not.
    """
    numbers = [c for c, f in schema.carried_columns.items() if f.dtype != "string"]
    if column not in numbers:
        raise UserError(
            f"{where}: '{column}' is no carried column of numbers; there are: {', '.join(numbers) or 'none'}"
        )


def scalar_feature(schema: DatasetSchema, name: str, where: str) -> Feature:
    """A feature of one number or code a row.

    Args:
        where: the key of the spec that names it.

    Raises:
        UserError: there is none of this name, or it is a list or of raw ids.
    """
    features = [*schema.of(Kind.CONTINUOUS), *schema.of(Kind.CATEGORICAL)]
    known = {f.name: f for f in features if not f.is_list and not f.dynamic}
    if name not in known:
        raise UserError(
            f"{where}: '{name}' is no feature with one value a row; there are: {', '.join(known) or 'none'}"
        )
    return known[name]


def coded_feature(schema: DatasetSchema, name: str, where: str) -> Feature:
    """A categorical feature of one code a row.

    Args:
        where: the key of the spec that names it.

    Raises:
        UserError: there is none of this name, or it is a list or of raw ids.
    """
    known = {f.name: f for f in schema.of(Kind.CATEGORICAL) if not f.is_list and not f.dynamic}
    if name not in known:
        raise UserError(
            f"{where}: '{name}' is no categorical feature with one code a row; there are: {', '.join(known) or 'none'}"
        )
    return known[name]
