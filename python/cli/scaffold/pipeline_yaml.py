"""A pipeline as YAML for people: each choice with its reason beside it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from headrace.cli.scaffold.columns import ColumnProfile
from headrace.cli.scaffold.label import Label
from headrace.cli.scaffold.roles import Roles, Treatment, window_days
from headrace.cli.scaffold.sample import Sample
from headrace.config.load import flow
from headrace.config.schema import quoted_names

_WIDTH = 118
#: Rows that a split by position leaves for validation.
_VALID_SHARE = 0.2
#: Values from which on those seen once get no code of their own.
_MANY = 50
#: Candidate items of a score.
_ITEMS = 1_000
#: Treatment -> operators, without what missing values ask for.
_OPS: dict[Treatment, list[Any]] = {
    "number": ["fill_missing", "normalize"],
    "skewed": ["fill_missing", "log", "normalize"],
    "category": ["categorify"],
    "id": [{"categorify": {"min_count": 2}}],
}


def pipeline_yaml(sample: Sample, columns: Sequence[ColumnProfile], roles: Roles, name: str) -> str:
    """Return the text of a pipeline's file."""
    daily = "{ds" in str(sample.source) or partition_day(sample, columns) is not None
    all_columns = [*columns, *roles.added]
    lines: list[str] = []
    seen = f"all {sample.total_rows:,} rows" if sample.is_complete else f"{sample.rows.num_rows:,} rows"
    lines += _comment(f"Written by `headrace init` from {seen} ({sample.description}).", 0)
    lines += _comment("Each choice has its reason beside it; change what you know better.", 0)
    lines += [f"pipeline: {name}"]
    lines += _day(sample, roles, daily)
    lines += ["", *_source(sample, columns), "", *_table(sample, columns, roles, daily)]
    lines += ["", *_features(sample, all_columns, roles, daily)]
    lines += ["", *(_model(sample) if roles.label is not None else _implicit_model(sample, roles))]
    if roles.scores:
        lines += ["", *_score(all_columns, roles)]
    else:
        gap = "no column names users" if roles.user is None and not roles.segment else "no column names items"
        lines += ["", *_comment(f"No `score` and `publish`: {gap} (--user, --item). The day ends with its report.", 0)]
    return "\n".join(lines) + "\n"


def _comment(text: str, indent: int) -> list[str]:
    return [" " * indent + f"# {line}" for line in textwrap.wrap(text, _WIDTH - indent - 2)]


def _flow(value: Any) -> str:
    """Return a value as YAML within a flow sequence or mapping, or after a key."""
    return flow([value])[1:-1]


def _list(key: str, values: Sequence[Any], indent: int) -> list[str]:
    """`key: [a, b, ...]`, over several lines where it is long."""
    head = " " * indent + f"{key}: ["
    return textwrap.wrap(
        head + ", ".join(_flow(v) for v in values) + "]",
        _WIDTH,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _day(sample: Sample, roles: Roles, daily: bool) -> list[str]:
    if daily:
        return []
    if roles.days is not None and (roles.split_by_time or roles.label is None):
        days, reason = roles.days, "the last day of its events"
        if not sample.is_complete:
            reason += " in the rows looked at: see that there are none after it"
        ds = days[1]
    else:
        ds, reason = sample.modified, "when the files were written"
    return [*_comment(f"All of it is one snapshot, loaded as this day: {reason}.", 0), f"ds: {ds}"]


def partition_day(sample: Sample, columns: Sequence[ColumnProfile]) -> str | None:
    """Return the name of the partition column of a table that is a day; None where there is none."""
    for c in columns:
        if c.name in sample.partitions and not c.fault and c.type == "date":
            return c.name
    return None


def _source(sample: Sample, columns: Sequence[ColumnProfile]) -> list[str]:
    reasons = {
        "separator": "it splits most lines into equally many fields",
        "header": "the first line has no names",
        "null_value": "this text stands for no value",
        "null_values": "these texts stand for no value",
        "decimal": "before the fraction of a number",
        "thousands": "between groups of three digits",
        "trim": "there are blanks around the fields",
    }
    lines = ["source:"]
    for note in sample.notes:
        lines += _comment(note, 2)
    for key, value in sample.source.items():
        if key == "path" and "{ds" not in str(value) and sample.source["format"] in ("csv", "jsonl"):
            lines += _comment("A glob. With {ds} in it, each day has files of its own: landing/{ds}/*.csv", 2)
        comment = f"  # {reasons[key]}" if key in reasons else ""
        lines.append(f"  {key}: {_flow(value)}{comment}")
    if (day := partition_day(sample, columns)) is not None:
        lines += [*_comment("Each partition is a day; nothing is copied.", 2), f"  day: {{partition: {_flow(day)}}}"]
    elif sample.source["format"] not in ("csv", "jsonl") and "day" not in sample.source:
        lines += _comment(
            "Read where it is, whole, as one snapshot. A day by its time: `day: {time: COLUMN}`; by what was committed "
            "on it: `day: {changes: true}` (Delta with a change data feed).",
            2,
        )
    spelled = {c.name: c.epoch or c.time_format for c in columns if c.epoch or c.time_format}
    if spelled:
        if any(c.epoch for c in columns):
            lines += _comment("Numbers since 1970, by name and size.", 2)
        for c in columns:
            if c.evidence:
                lines += _comment(f"{c.name}: {c.evidence}", 2)
        lines.append(f"  timestamps: {_plain(spelled)}")
    return lines


def _table(sample: Sample, columns: Sequence[ColumnProfile], roles: Roles, daily: bool) -> list[str]:
    lines = ["table:"]
    if roles.key is not None:
        lines += _comment(f"Rows with the same value are one event. {roles.reasons[roles.key.name]}.", 2)
        lines.append(f"  keys: {_flow([roles.key.name])}")
    elif sample.source["format"] in ("orc", "avro"):
        lines += _comment("No column identifies a row, and such files have no positions: say which columns do.", 2)
        lines += _comment("keys: [event_id]", 2)
    else:
        lines += _comment("No column identifies a row, so equal rows all stay. If one does: keys: [event_id]", 2)
    if roles.time is not None:
        lines.append(f"  event_time: {_flow(roles.time.name)}  # {roles.reasons[roles.time.name]}")
        if daily:
            lines.append("  late_days: 3  # later events go to quarantine")
    lines.append("  columns:")
    label = None if roles.label is None else roles.label.column
    needed = [c.name for c in (label, roles.time, roles.key, roles.user, roles.item) if c is not None]
    for c in columns:
        # A partition column is declared where something is made of it.
        if c.fault or (c.name in sample.partitions and c.name not in needed):
            continue
        entry: dict[str, Any] = {"name": c.name, "type": c.type}
        if c.path is not None:
            entry["path"] = c.path
        if c.name in needed and not c.nulls:
            entry["required"] = True
        nulls = f", {c.null_rate:.1%} null" if c.nulls else ""
        if c.far_times:
            nulls += f" ({c.far_times:,} times before year 1 or after year 9999: such rows go to quarantine)"
        lines.append(f"    - {_plain(entry)}  # {c.distinct:,} values{nulls}")
    for c in columns:
        if c.fault:
            lines += _comment(f"not declared: {c.name!r}: {c.fault}", 4)
    lines += ["  expectations:", f"    min_rows: {max(1, sample.total_rows // 2) if not daily else 1}"]
    lines += ["    max_bad_rate: 0.05  # more rows that break the declaration stop the day"]
    if roles.label is not None and roles.label.expression is None and roles.label.column.is_number:
        lines.append(f"    ranges: {_flow({roles.label.column.name: [0, 1]})}")
    return lines


def _plain(entry: Mapping[str, Any]) -> str:
    """Return a flow mapping in the given order."""
    return "{" + ", ".join(f"{k}: {_flow(v)}" for k, v in entry.items()) + "}"


def label_name(columns: Sequence[ColumnProfile], roles: Roles) -> str:
    """Return the label as `features` names it: the column, or the one that `prepare` makes of it."""
    if roles.label is not None and roles.label.expression is None:
        return roles.label.column.name
    names = ("chosen", "is_chosen", "chosen_0_1") if roles.label is None else ("label", "is_positive", "label_0_1")
    return _free(columns, names)


def _free(columns: Sequence[ColumnProfile], names: Sequence[str]) -> str:
    """Return the first name that no column has."""
    taken = {c.name.lower() for c in columns}
    numbered = (f"{names[0]}_{k}" for k in range(2, len(taken) + 3))
    return next(n for n in chain(names, numbered) if n not in taken)


def _features(sample: Sample, columns: Sequence[ColumnProfile], roles: Roles, daily: bool) -> list[str]:
    label, name = roles.label, label_name(columns, roles)
    lines, carried = ["features:"], list(roles.carried)
    if label is None:
        assert roles.user is not None
        carried = list(dict.fromkeys([roles.user.name, *carried]))
        lines += _comment(f"Implicit feedback: {roles.implicit}. The model learns to tell these items from others.", 2)
        lines.append(f"  label: {_flow(name)}")
        lines += _prepare_implicit(columns, roles, name)
    else:
        alternatives = f" Also possible: {', '.join(label.alternatives)}." if label.alternatives else ""
        lines += _comment(
            f"{label.column.name!r}, {label.reason}; {label.rate:.2%} of the rows are positive.{alternatives}", 2
        )
        lines.append(f"  label: {_flow(name)}")
        lines += [*_prepare(label, roles, name), *_split(sample, roles, daily)]
    if carried:
        lines += [*_comment("For evaluation; the model does not see them.", 2), *_list("carried", carried, 2)]
    lines.append("  workflow:")
    for chain_lines in _chains(columns, roles):
        lines += chain_lines
    if roles.left_out:
        lines += _comment("No features of:", 2)
        for column, why_not in roles.left_out.items():
            lines += _comment(f"  {column}: {why_not}", 2)
    return lines


def _prepare_implicit(columns: Sequence[ColumnProfile], roles: Roles, name: str) -> list[str]:
    """Return `prepare` and `split` of rows that are all positives: each user's last events are held out."""
    assert roles.user is not None
    assert roles.item is not None
    user, split = roles.user.name, _free(columns, ["split", "split_of_user"])
    lines = _comment(
        f"Before the features: each row is a positive ({name} is 1), and each user's last row validates.", 2
    )
    lines.append("  prepare:")
    thresholds: list[str] = []
    for amount, kind in roles.amounts.items():
        column = next(c for c in columns if c.name == amount)
        known = column.numbers[~np.isnan(column.numbers)]
        low = 0.0 if kind != "rating" else float(np.median(known))
        sign = ">=" if kind == "rating" else ">"
        (quoted,) = quoted_names([amount])
        share = float((known >= low).mean() if kind == "rating" else (known > low).mean())
        negative = float((known < 0).mean())
        returns = f"; {negative:.1%} are below 0, as of returns: without it they are events, too" if negative else ""
        thresholds += _comment(f"{amount!r} ({kind}) as a threshold, which keeps {share:.1%} of the rows{returns}:", 4)
        thresholds += [f"    # - filter: {{where: {_flow(f'{quoted} {sign} {low:g}')}}}"]
        if not negative:
            thresholds += _comment(
                f"or as a weight: add it to `carried`, and write `sample_weight: {_flow(amount)}` in `train`.", 4
            )
    if missing := [c.name for c in (roles.user, roles.item) if c.nulls]:
        lines += [*_comment("Rows of nobody, or of nothing.", 4), f"    - dropna: {{subset: {_flow(missing)}}}"]
    settings: dict[str, Any] = {"user": user, "valid": 1}
    if roles.moment is not None:
        settings["order"] = [roles.moment.name]
    if split != "split":
        settings["to"] = split
    lines += [*_lambda(roles, {name: {"expression": "1", "type": "int"}}), *thresholds]
    lines.append(f"    - last_events: {_plain(settings)}")
    return [
        *lines,
        *_comment("The model is to find each user's newest event among all items, as it must tomorrow.", 2),
        f"  split: {{by: column, column: {split}}}",
    ]


def _lambda(roles: Roles, created: Mapping[str, Any]) -> list[str]:
    """Return the operator that adds columns: those of the roles and others; with a reason for each of the roles'."""
    lines: list[str] = []
    for column in roles.added:
        lines += _comment(f"{column.name}: {column.origin}", 4)
    added = {c.name: {"expression": c.expression, "type": c.type} for c in roles.added}
    return [
        *lines,
        "    - lambda:",
        "        add:",
        *(f"          {_flow(n)}: {_plain(m)}" for n, m in {**added, **created}.items()),
    ]


def _prepare(label: Label, roles: Roles, name: str) -> list[str]:
    """Rows without a label dropped; label, users and further columns made where no column is them."""
    reasons: list[str] = []
    ops: list[str] = []
    if label.column.nulls:
        reasons.append(f"rows without a label are dropped ({label.column.null_rate:.1%})")
        ops.append(f"    - dropna: {{subset: [{_flow(label.column.name)}]}}")
    created: dict[str, Any] = {}
    if label.expression is not None:
        reasons.append("the label as 0 and 1")
        created[name] = {"expression": label.expression, "type": "int"}
    if roles.segment and roles.user is None:
        reasons.append("no column names users, so those who look alike are one, a segment")
        parts = ", ".join(f"`{c}`" for c in roles.segment)
        created["user_segment"] = {"expression": f"concat_ws('|', {parts})", "type": "string"}
    if roles.added:
        reasons.append("columns that others say together or in another spelling")
    if created or roles.added:
        ops += _lambda(roles, created)
    return [*_comment(f"Before the features: {'; '.join(reasons)}.", 2), "  prepare:", *ops] if ops else []


def _split(sample: Sample, roles: Roles, daily: bool) -> list[str]:
    if roles.split_by_time:
        assert roles.days is not None
        days = 14 if daily else window_days(roles.days)
        return [
            *_comment("The last day validates, as tomorrow will: `by: time` never trains on what came later.", 2),
            "  split: {by: time, valid_days: 1}",
            f"  window_days: {days}  # days before it that train",
        ]
    reason = "there is no time" if roles.time is None else "there is one day alone"
    return [
        *_comment(
            f"The last rows validate, as {reason}: rows sorted by the label or by users are to be shuffled first.", 2
        ),
        f"  split: {{by: position, valid_fraction: {_VALID_SHARE}}}",
    ]


def _chains(columns: Sequence[ColumnProfile], roles: Roles) -> Iterator[list[str]]:
    """Yield a chain for all columns with the same operators."""
    by_name = {c.name: c for c in columns}
    groups: dict[str, tuple[str, list[Any], list[str], list[str]]] = {}
    for name, treatment in roles.features.items():
        column, tags = by_name[name], []
        if roles.user is not None and name == roles.user.name:
            tags = ["user", "id"]
        elif roles.item is not None and name == roles.item.name:
            tags = ["item", "id"]
        elif name in roles.user_columns or name in roles.item_columns:
            tags = ["user" if name in roles.user_columns else "item"]
        if treatment == "time":
            assert roles.days is not None
            parts = ["hour"] if roles.scores or roles.days[0] == roles.days[1] else ["hour", "weekday"]
            ops: list[Any] = [{"cyclic": {"of": parts}}]
            reason = "the time of day, as points on a circle"
        elif treatment == "list":
            ops = ["categorify", {"pad": {"length": _list_length(column)}}]
            reason = roles.reasons[name]
        elif treatment == "category":
            rare = column.distinct > _MANY
            ops = [{"categorify": {"min_count": 2}}] if rare else ["categorify"]
            reason = "many values; those seen once share a code" if rare else "few values: a code each"
        elif treatment == "id" and roles.label is None:
            ops, reason = ["categorify"], roles.reasons[name]
        elif treatment == "id":
            ops, reason = _OPS[treatment], roles.reasons[name] + "; values seen once share a code"
        else:
            missing = column.null_rate > 0.01
            ops = [{"fill_missing": {"indicator": True}}, *_OPS[treatment][1:]] if missing else _OPS[treatment]
            reason = "numbers" if treatment == "number" else roles.reasons[name].partition(":")[0]
            if treatment == "skewed":
                reason = "not negative, with a long tail: log first"
            reason += "; that one is missing says something itself" if missing else ""
        own_chain = name if treatment == "id" else ""
        entry = groups.setdefault(f"{own_chain}{reason}{ops}{tags}", (reason, ops, tags, []))
        entry[3].append(name)
    if roles.segment and roles.user is None:
        groups["segment"] = ("the segment itself", [{"categorify": {"min_count": 2}}], ["user", "id"], ["user_segment"])
    for reason, ops, tags, names in groups.values():
        lines = [
            *_comment(reason, 4),
            *_list("- columns", names, 4),
            "      ops: [" + ", ".join(_op(o) for o in ops) + "]",
        ]
        if tags:
            lines.append(f"      tags: {_flow(tags)}")
        yield lines


def _op(op: Any) -> str:
    if isinstance(op, str):
        return op
    ((name, params),) = op.items()
    return f"{name}: {_plain(params)}"


def _list_length(column: ColumnProfile) -> int:
    lengths = list(column.uniques.to_pylist())
    weights = column.counts
    order = np.argsort(lengths)
    reached = np.cumsum(weights[order]) / max(int(weights.sum()), 1)
    return int(min(max(1, lengths[int(order[int(np.searchsorted(reached, 0.95))])]), 50))


def _implicit_model(sample: Sample, roles: Roles) -> list[str]:
    """Return `model` and `train` of positives and drawn negatives, measured by rankings of all items."""
    assert roles.user is not None
    assert roles.item is not None
    user, item = roles.user.name, roles.item.name
    rows = sample.total_rows
    batch = int(min(max(2 ** round(math.log2(max(rows / 100, 1))), 64), 4_096))
    epochs = 10 if rows >= 1_000_000 else 20
    if roles.user_columns or roles.item_columns:
        lines = _comment(
            f"Two towers: a vector of the user and one of the item, from ids and what else is known of them. Each "
            f"positive is compared with the items of its step's other positives, of {batch} rows: the drawn negatives.",
            0,
        )
        args: dict[str, Any] = {"item": item, "user_mlp": [64], "item_mlp": [64]}
        lines += [f"model: {{class: two_tower, embedding_dim: 32, args: {_plain(args)}}}", "", "train:"]
        negatives: list[str] = []
    else:
        drawn = int(min(max(2 ** round(math.log2(max(roles.item.distinct / 4, 1))), 32), 1_024))
        lines = _comment(
            "Users and items are all there is: a vector of each (matrix factorisation). Each positive is compared with "
            f"{drawn} drawn items, the negatives. A sequence model needs times that order each user's events, and far "
            "more work: docs/implicit-feedback.md.",
            0,
        )
        args = {"user": user, "item": item, "loss": "softmax", "similarity": "cosine", "temperature": 0.1}
        lines += [f"model: {{class: matrix_factorization, embedding_dim: 32, args: {_plain(args)}}}", "", "train:"]
        negatives = [f"  negatives: {{column: {_flow(item)}, as: candidates, per_positive: {drawn}, shared: true}}"]
    ranking = {"k": 10, "user": user, "seen": ["train"]}
    return [
        *lines,
        f"  ranks: 2\n  batch_size: {batch}\n  streams: 4\n  epochs: {epochs}",
        *negatives,
        "  embeddings: {kind: adam, learning_rate: 0.005}",
        *_comment(
            "HR, NDCG, Recall, MRR and MAP at 10: each user's last item among all that the user has not had. There are "
            "no negatives in the data, so an AUC or a log loss would say nothing.",
            2,
        ),
        "  evaluation:",
        f"    full_ranking: {_plain(ranking)}",
        *_comment("Ends when NDCG no longer rises.", 2),
        "  monitor: ndcg_at_10_full",
        "  patience: 2",
    ]


def _model(sample: Sample) -> list[str]:
    rows = sample.total_rows * (1 - _VALID_SHARE)
    batch = 2 ** round(math.log2(max(rows / 150, 1)))
    batch = int(min(max(batch, 128), 8_192))
    epochs = 3 if rows >= 1_000_000 else 5 if rows >= 100_000 else 10
    width = 16 if rows >= 100_000 else 8
    return [
        *_comment(f"Sizes for about {sample.total_rows:,} rows; `headrace tune` searches for better ones.", 0),
        f"model: {{kind: dlrm, embedding_dim: {width}, bottom_mlp: [32], top_mlp: [64, 32]}}",
        "",
        *_comment("Ends before the last epoch when the validation loss no longer falls (patience: 1).", 0),
        f"train: {{ranks: 2, batch_size: {batch}, streams: 4, epochs: {epochs}}}",
        "",
        *_comment("XGBoost on the same rows, to compare with; leave it out to save its time.", 0),
        "baseline: {rounds: 60, max_depth: 6}",
    ]


def _score(columns: Sequence[ColumnProfile], roles: Roles) -> list[str]:
    by_name = {c.name: c for c in columns}
    assert roles.item is not None
    user = roles.user.name if roles.user is not None else "user_segment"
    limit = f", limit: {_ITEMS}" if roles.item.distinct > _ITEMS else ""
    lines = [
        *_comment(
            "Each user's best items. A column is the user's or the item's by its name, or as it follows from that key.",
            0,
        ),
        "score:",
        *_entity("user", user, roles.user_columns, ""),
        *_entity("item", roles.item.name, roles.item_columns, limit),
    ]
    if roles.context:
        lines += _comment("Columns of neither: one value for all lists, here the most usual.", 2)
        lines.append("  context:")
        lines += [f"    {_flow(n)}: {_constant(by_name[n], roles)}" for n in roles.context]
    lines.append("  top_k: 10")
    if roles.user is not None and roles.label is not None and roles.label.is_verdict:
        amount = roles.label.column.name
        lines += [f"  exclude_seen: any_label  # no list has an item that the user has had, whatever its {amount!r}"]
    elif roles.user is not None:
        lines += ["  exclude_seen: true  # no list has an item that the user has had (label 1)"]
    lines += ["", *_comment("To the embedded PostgreSQL; publish.warehouse names another.", 0), "publish: {}"]
    return lines


def _entity(side: str, key: str, own_columns: Sequence[str], limit: str) -> list[str]:
    text = f"  {side}: {{key: {_flow(key)}, columns: [{', '.join(_flow(c) for c in own_columns)}]{limit}}}"
    return textwrap.wrap(
        text, _WIDTH, subsequent_indent=" " * (len(side) + 5), break_long_words=False, break_on_hyphens=False
    )


def _constant(column: ColumnProfile, roles: Roles) -> str:
    if column.type == "timestamp":
        assert roles.days is not None
        return f"{roles.days[1]}T12:00:00Z"
    if column.is_list:
        return "[]"
    if column.is_number and roles.features.get(column.name) in ("number", "skewed"):
        middle = float(np.nanmedian(column.numbers))
        return _flow(middle if column.type in ("float", "double") else round(middle))
    return _flow(column.top)
