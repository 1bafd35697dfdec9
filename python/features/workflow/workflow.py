"""A workflow: chains of operators over declared columns, checked before any data is seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.config import Chain, Spec
from headrace.errors import UserError, nearest
from headrace.features.ops.selection import Chains, Selection, as_chains
from headrace.features.table_ops.preparation import Preparation, prepared_columns
from headrace.features.types import ValueType, declared
from headrace.features.vocabulary.codes import VocabularyRule
from headrace.features.workflow.binding import BoundChain, bind
from headrace.schema import MICROSECONDS, DatasetSchema, Feature, Kind, TableColumn

#: NumPy's names of the types that a carried column may have.
_CARRIED = {
    "string": "string",
    "int": "int32",
    "bigint": "int64",
    "float": "float32",
    "double": "float64",
    "boolean": "bool",
    "timestamp": "int64",
}


class Workflow:
    """The chains of a spec, checked."""

    def __init__(
        self,
        chains: Sequence[Chain | Selection] | Selection | Chains,
        columns: Sequence[TableColumn],
        label: str,
        carried: Sequence[str] = (),
        where: str = "features",
    ) -> None:
        """Check everything that can be known without data.

        Raises:
            UserError: an unknown operator or parameter, a column that an operator cannot take, two features of one
                name; with its place `features.workflow[i].ops[j]`.
        """
        self.spec_chains = as_chains(chains)
        self.declared, self.label_column = tuple(columns), label
        self.carried_columns, self._where = tuple(carried), where
        self._types = {c.name: declared(c) for c in columns}
        self.chains: tuple[BoundChain, ...] = tuple(
            bind(chain, self._types, label, f"{where}.workflow[{i}]") for i, chain in enumerate(self.spec_chains)
        )
        self.rules = self._rules()
        self._check_names()

    @staticmethod
    def from_spec(spec: Spec) -> Workflow:
        """The workflow of a pipeline. Raises UserError, see `Workflow`."""
        f = spec.features
        preparation = Preparation.from_spec(spec)
        for label in dict.fromkeys((f.label, *(task.label for task in spec.train.tasks.values() if task.label))):
            sources = preparation.sources_of(label)
            for i, chain in enumerate(f.workflow):
                for column in chain.columns:
                    if column in sources:
                        raise UserError(
                            f"features.workflow[{i}].columns: the label '{label}' is made of '{column}'; a feature "
                            f"made of it would leak the label"
                        )
        return Workflow(f.workflow, prepared_columns(spec), f.label, f.carried)

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Columns of the lake's table that the features are made of, each once; the label is not among them."""
        return tuple(dict.fromkeys(column for chain in self.chains for column in chain.columns))

    def input_type(self, column: str) -> ValueType:
        """The declared type of a column."""
        return self._types[column]

    @property
    def out_of_fold(self) -> bool:
        """Whether rows of the training range are transformed otherwise than others: they must bring IDENTITY."""
        return any(step.op.out_of_fold for chain in self.chains for step in chain.steps)

    def _check_names(self) -> None:
        seen: dict[str, int] = {}
        for i, chain in enumerate(self.chains):
            for name in chain.outputs:
                if name in seen:
                    raise UserError(
                        f"{self._where}.workflow[{i}]: '{name}' is already a feature of "
                        f"{self._where}.workflow[{seen[name]}]; rename one of them (rename: "
                        f"{{suffix: _2}}), or name its column in one chain"
                    )
                seen[name] = i
        for name, what in ((self.label_column, "label"), *((c, "carried") for c in self.carried_columns)):
            if name not in self._types:
                raise UserError(
                    f"{self._where}.{what}: column '{name}' is not declared in table.columns"
                    f"{nearest(name, self._types)}"
                )
        label = self._types[self.label_column]
        if not label.is_number or label.is_list:
            raise UserError(f"{self._where}.label: '{self.label_column}' is {label}; a label is a number, 0 or 1")
        for name in self.carried_columns:
            type_ = self._types[name]
            if type_.is_list or type_.element not in _CARRIED:
                raise UserError(
                    f"{self._where}.carried: column '{name}' is {type_}; one of {', '.join(_CARRIED)} can be carried"
                )
        if len(set(self.carried_columns)) < len(self.carried_columns):
            raise UserError(f"{self._where}.carried: names a column twice")
        physical = [column for feature in self.schema_of({}).features for column in feature.physical]
        for column in physical:
            if physical.count(column) > 1:
                raise UserError(f"{self._where}: two columns of the dataset would be named '{column}'; rename a column")

    def _rules(self) -> dict[str, VocabularyRule]:
        """Rules of all vocabularies, by name."""
        rules: dict[str, VocabularyRule] = {}
        unnamed: set[str] = set()
        for i, chain in enumerate(self.chains):
            for j, step in chain.named_steps():
                at = f"{self._where}.workflow[{i}].ops[{j}] ({step.op.name})"
                for name, rule in step.op.vocabularies(step.inputs).items():
                    if rules.setdefault(name, rule) != rule:
                        raise UserError(
                            f"{at}: vocabulary '{name}' is shared with a chain that has another "
                            f"min_count, max_size or oov_buckets; give both the same"
                        )
                    if getattr(step.op, "vocabulary", None) is None:
                        if name in unnamed:
                            raise UserError(
                                f"{at}: another chain makes the vocabulary '{name}' too; if they are to "
                                f"share it (its values are counted in both), say `vocabulary: {name}` in "
                                f"both; else rename the column before"
                            )
                        unnamed.add(name)
        return rules

    def schema_of(self, cardinalities: Mapping[str, int], sizes: Mapping[str, int] | None = None) -> DatasetSchema:
        """The dataset's schema: features in the chains' order, the label, the carried columns.

        A carried column that is a feature too is stored beside it as `<column>__carried`.

        Args:
            cardinalities: by vocabulary, its highest code and one.
            sizes: by vocabulary, how many values it has: features that drop_low_cardinality drops are left out.
        """
        features = []
        for chain in self.chains:
            for column, end in chain.outputs.items():
                code, raw = end.is_categorical, end.element == "id"
                if sizes is not None and end.vocabulary and sizes[end.vocabulary] < end.min_cardinality:
                    continue
                cardinality = cardinalities.get(end.vocabulary) if end.vocabulary else end.cardinality
                features.append(
                    Feature(
                        name=column,
                        kind=Kind.CATEGORICAL if code else Kind.CONTINUOUS,
                        dtype="int64" if raw else "int32" if code else "float32",
                        length=end.length or 1,
                        is_list=end.is_list,
                        cardinality=cardinality if code and not raw else None,
                        dynamic=raw,
                        vocabulary=end.vocabulary,
                        oov_buckets=self.rules[end.vocabulary].oov_buckets if end.vocabulary else 1,
                        tags=chain.tags,
                        metadata=chain.metadata,
                        sources=chain.sources[column],
                    )
                )
        features.append(Feature(name=self.label_column, kind=Kind.LABEL, dtype="float32"))
        fed = DatasetSchema(features=tuple(features))
        carried = tuple(
            Feature(
                name=fed.carried_name(c),
                kind=Kind.CARRIED,
                dtype=_CARRIED[self._types[c].element],
                metadata={"unit": MICROSECONDS} if self._types[c].element == "timestamp" else {},
            )
            for c in self.carried_columns
        )
        return DatasetSchema(features=(*features, *carried))
