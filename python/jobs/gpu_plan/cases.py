"""One or more uses of every operator, whose plans `make gpu-check` looks at.

An operator without a case fails the gate, so that none comes in unseen. Cases cover what changes the plan: types,
lists, options. They are written as in a pipeline's YAML; the columns are those of `COLUMNS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.config.schema import TableColumn

LABEL, TIME = "label", "ts"

COLUMNS: tuple[TableColumn, ...] = (
    TableColumn(name="x", type="double"),
    TableColumn(name="y", type="double"),
    TableColumn(name="f", type="float"),
    TableColumn(name="i", type="int"),
    TableColumn(name="b", type="bigint"),
    TableColumn(name="flag", type="boolean"),
    TableColumn(name="s", type="string"),
    TableColumn(name="t", type="string"),
    TableColumn(name="ts", type="timestamp"),
    TableColumn(name="since", type="timestamp"),
    TableColumn(name="d", type="date"),
    TableColumn(name="ss", type="array<string>"),
    TableColumn(name="st", type="array<string>"),
    TableColumn(name="bs", type="array<bigint>"),
    TableColumn(name="xs", type="array<double>"),
    TableColumn(name="user", type="bigint"),
    TableColumn(name="item", type="bigint"),
    TableColumn(name="label", type="int"),
)

Chain = Mapping[str, Any]


def _chain(columns: str, *ops: Any) -> Chain:
    return {"columns": columns.split(), "ops": list(ops)}


_PAD: Any = {"pad": {"length": 2}}

#: By row operator: chains, each a workflow of its own.
ROW_CASES: Mapping[str, Sequence[Chain]] = {
    "fill_missing": [
        _chain("x f i flag", "fill_missing"),
        _chain("x i", {"fill_missing": {"value": -1, "indicator": True}}),
        _chain("s", {"fill_missing": {"value": "none"}}, "categorify"),
        _chain("xs", {"fill_missing": {"value": 2}}, _PAD),
    ],
    "clip": [_chain("x f i b", {"clip": {"min": 0, "max": 9.5}}), _chain("xs", {"clip": {"min": 0}}, _PAD)],
    "log": [_chain("x i", "log"), _chain("xs", "log", _PAD)],
    "normalize": [_chain("x f i b", "normalize")],
    "normalize_minmax": [_chain("x f i b", "normalize_minmax")],
    "fill_median": [_chain("x i", "fill_median")],
    "bucketize": [
        _chain("x i", {"bucketize": {"boundaries": [0, 1.5, 10]}}),
        _chain("xs", {"bucketize": {"boundaries": [0, 1]}}, _PAD),
    ],
    "quantile_bin": [_chain("x i", {"quantile_bin": {"bins": 4}})],
    "reduce_dtype": [
        _chain("b i", {"reduce_dtype": {"min": 0, "max": 1000}}),
        _chain("x", {"reduce_dtype": {"min": -1e30, "max": 1e30}}),
    ],
    "categorify": [
        _chain("s i b flag", {"categorify": {"min_count": 2, "max_size": 100}}),
        _chain("ss bs", "categorify", _PAD),
        _chain("s t", {"categorify": {"vocabulary": "both"}}),
        _chain("s i", {"categorify": {"oov_buckets": 8}}),
        _chain("ss", {"categorify": {"oov_buckets": 8}}, _PAD),
    ],
    "hash_bucket": [
        _chain("s i b flag", {"hash_bucket": {"buckets": 100}}),
        _chain("ss bs", {"hash_bucket": {"buckets": 100}}, _PAD),
    ],
    "raw_id": [_chain("s i b", "raw_id"), _chain("i", {"raw_id": {"hash": True}}), _chain("ss bs", "raw_id", _PAD)],
    "hashed_cross": [_chain("s i flag b", {"hashed_cross": {"buckets": 100}})],
    "text_ngrams": [
        _chain("s t", {"text_ngrams": {"n": 3, "buckets": 100}}, _PAD),
        _chain("s", {"text_ngrams": {"n": 2, "buckets": 9, "most": 5}}, {"pad": {"length": 3, "keep": "last"}}),
    ],
    "feature_cross": [
        _chain("ss bs i", {"feature_cross": {"buckets": 100, "most": 9}}, _PAD),
        _chain("s flag bs", {"feature_cross": {"buckets": 100}}, _PAD),
    ],
    "minhash": [_chain("ss bs", {"minhash": {"length": 4, "buckets": 100}})],
    "cyclic": [
        _chain("ts", {"cyclic": {"of": ["hour", "weekday", "day", "month"]}}),
        _chain("d", {"cyclic": {"of": ["weekday", "day", "month"]}}),
        _chain("i", {"cyclic": {"period": 24}}),
    ],
    "age": [_chain("ts since d", {"age": {"event": "ts", "unit": "hours"}})],
    "list_slice": [
        _chain("ss", {"list_slice": {"start": 1, "length": 2}}, "categorify", _PAD),
        _chain("xs", {"list_slice": {"length": 2, "keep": "last"}}, _PAD),
    ],
    "column_similarity": [
        _chain("ss st", {"column_similarity": {"metric": metric}}) for metric in ("jaccard", "cosine", "overlap")
    ],
    "pad": [
        _chain("xs", {"pad": {"length": 3}}),
        _chain("bs", {"hash_bucket": {"buckets": 9}}, {"pad": {"length": 2, "keep": "last"}}),
    ],
    "rename": [_chain("x", {"rename": {"to": "z"}}, "fill_missing"), _chain("x i", {"rename": {"suffix": "_2"}})],
    "drop_low_cardinality": [_chain("s i", "categorify", {"drop_low_cardinality": {"min_cardinality": 2}})],
    "join_groupby": [
        _chain("s x i", {"join_groupby": {"by": "s", "stats": ["count", "sum", "mean", "std", "min", "max"]}}),
        _chain("s i x", {"join_groupby": {"by": ["s", "i"], "stats": ["mean"]}}),
    ],
    "target_encoding": [
        _chain("s i", "target_encoding"),
        _chain("s i", {"target_encoding": {"together": True, "folds": 3}}),
    ],
    "value_count": [_chain("s i", "value_count"), _chain("b", {"value_count": {"log": True}})],
}

#: By table operator: its parameters. The named source that some read is `other`.
TABLE_CASES: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "filter": [
        {"where": "label = 1 and (s in ('a', 'b') or x is not null) and not i between 90 and 99"},
        {"where": "ts >= '2026-01-01' and d < '2027-01-01' and x > 0"},
    ],
    "dropna": [{"subset": ["x", "s", "ss"]}, {"subset": ["x", "i"], "how": "all"}],
    "rename": [{"to": {"x": "z"}}],
    "lambda": [
        {
            "add": {
                "ratio": {"expression": "x / (1 + abs(y))", "type": "double"},
                "both": {"expression": "concat(s, '-', t)", "type": "string"},
            }
        }
    ],
    "join_external": [
        {"path": "external", "keys": {"item": "key"}, "add": {"brand": "string", "stock": "bigint"}},
        {
            "path": "external",
            "keys": {"item": "key"},
            "add": {"stock": "bigint"},
            "prefix": "first_",
            "on_duplicate": "first",
            "order": ["-stock"],
        },
    ],
    "join_asof": [
        {
            "path": "external",
            "keys": {"item": "key"},
            "valid_from": "since",
            "add": {"price": "double"},
            "tolerance_days": 30,
        },
        {"from": "other", "keys": {"item": "key"}, "add": ["brand", "price"], "tolerance_days": 30},
    ],
    "trailing": [
        {"from": "other", "keys": {"item": "key"}, "windows": [7], "values": ["price"], "stats": ["count", "sum"]},
        {"keys": ["user"], "windows": [1, 7, "all"], "values": ["x"], "stats": ["count", "sum", "mean"]},
        {
            "keys": ["user", "item"],
            "windows": [7],
            "values": ["label"],
            "stats": ["rate"],
            "delay_hours": 24,
            "where": "i > 0",
        },
    ],
    "lag": [{"keys": ["user"], "values": ["x", "i"], "since": "hours", "shift": shift} for shift in (1, 3)],
    "last_events": [{"user": "user"}, {"user": "user", "valid": 2, "rank": 1, "test": 1, "order": ["i"], "to": "part"}],
    "history": [
        {"keys": ["user"], "values": ["item", "s", "x"], "length": 4},
        {
            "keys": ["user"],
            "values": ["item"],
            "length": 4,
            "newest": "first",
            "where": "label = 1",
            "delay_hours": 24,
            "suffix": "clicked",
        },
        {"keys": ["user"], "values": ["item"], "length": 70},
        {"from": "other", "keys": {"item": "key"}, "values": ["brand"], "length": 4, "delay_hours": 24},
    ],
    "sessions": [{"keys": ["user"], "gap_minutes": 30}],
    "target_encoding_past": [
        {"from": "other", "keys": {"item": "key"}, "target": "stock", "delay_hours": 24},
        {"keys": ["item"], "delay_hours": 24},
        {"keys": ["user", "s"], "delay_hours": 0, "prior": 0.1, "smoothing": 5},
    ],
    "attribution": [
        {"from": "other", "keys": {"item": "key"}, "within": "7 days", "add": "label", "credit": credit}
        for credit in ("every", "last", "first")
    ],
    "negatives": [
        {"item": "item", "item_columns": ["s"], "per_positive": 2},
        {"item": "item", "user": "user", "exclude_seen": True, "method": "popularity", "per_positive": 1},
        {"item": "item", "method": "in_batch", "per_positive": 1, "batch": 64},
    ],
}
