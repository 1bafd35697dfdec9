"""`headrace init` on what people have: logs without a label, names, spellings and files, one test a rule."""

from __future__ import annotations

import gzip
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from headrace.cli import app
from headrace.cli.init import write_pipeline
from headrace.cli.scaffold import names
from headrace.cli.scaffold.columns import profile
from headrace.cli.scaffold.roles import Named
from headrace.cli.scaffold.spelled import find_marks, find_times
from headrace.config import LandingSource, Spec, load_spec
from headrace.errors import UserError
from headrace.features.workflow.workflow import Workflow
from headrace.score.columns import check_columns


def written(path: Path, target: Path, format_: str | None = None, **named: Any) -> Spec:
    """The pipeline of some data; its features and its scores bind, too."""
    write_pipeline(str(path), target, None, Named(**named), force=True, format_=format_)
    spec = load_spec(target)
    Workflow.from_spec(spec)
    if spec.score is not None:
        check_columns(spec, spec.score)
    return spec


def log(rows: int = 400, seed: int = 1) -> pd.DataFrame:
    """Users, items and times without a label."""
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "user_id": rng.integers(1, 40, rows),
            "item_id": rng.integers(1, 30, rows),
            "timestamp": 1_600_000_000 + np.sort(rng.integers(0, 10**6, rows)),
        }
    )


def csv_of(frame: pd.DataFrame, path: Path, **options: Any) -> Path:
    frame.to_csv(path, index=False, **options)
    return path


# --- implicit feedback ------------------------------------------------------------------------------------------------


def test_users_items_and_times_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = written(csv_of(log(), tmp_path / "log.csv"), tmp_path / "p.yaml")
    assert spec.model.kind == "matrix_factorization"
    assert [op.op for op in spec.features.prepare] == ["lambda", "last_events"]
    assert spec.features.prepare[1].params == {"user": "user_id", "valid": 1}
    assert (spec.features.split.by, spec.features.split.column) == ("column", "split")
    assert spec.train.negatives is not None
    assert (spec.train.negatives.form, spec.train.negatives.column) == ("candidates", "item_id")
    ranking = spec.train.evaluation.full_ranking
    assert ranking is not None
    assert {"hr_at_10_full", "ndcg_at_10_full", "recall_at_10_full"} <= set(ranking.metrics())
    assert (spec.train.monitor, ranking.seen) == ("ndcg_at_10_full", ("train",))
    assert spec.score is not None
    assert (spec.score.exclude_seen, spec.publish is not None, spec.baseline) == (True, True, None)
    assert spec.ds == "2020-09-25"
    assert "implicit feedback: no column says yes or no, so each row counts as something" in capsys.readouterr().out


def test_what_is_known_of_users_and_items_is_learned_from_and_the_rest_is_not(tmp_path: Path) -> None:
    data = log(2_000)
    data["country"] = np.array(["DE", "FR", "US"])[data["user_id"] % 3]
    data["brand"] = [f"b{i % 7}" for i in data["item_id"]]
    data["device"] = np.random.default_rng(2).choice(["phone", "desktop"], len(data))
    data["quantity"] = np.random.default_rng(3).integers(1, 30, len(data))
    data["session_id"] = np.arange(len(data)) // 3
    target = tmp_path / "p.yaml"
    spec = written(csv_of(data, tmp_path / "log.csv"), target)
    assert spec.model.kind == "two_tower"
    columns = {c for chain in spec.features.workflow for c in chain.columns}
    assert columns == {"user_id", "item_id", "country", "brand"}
    assert spec.score is not None
    assert (spec.score.user.columns, spec.score.item.columns, dict(spec.score.context)) == (
        ("country",),
        ("brand",),
        {},
    )
    text = target.read_text()
    assert "# - filter: {where: '`quantity` > 0'}" in text
    assert "sample_weight: quantity" in text


def test_ratings_are_positives_and_offered_as_a_threshold(tmp_path: Path) -> None:
    data = log().assign(rating=np.random.default_rng(5).integers(1, 6, 400))
    target = tmp_path / "p.yaml"
    spec = written(csv_of(data, tmp_path / "ratings.csv"), target)
    assert (spec.features.label, spec.features.prepare[0].op) == ("chosen", "lambda")
    assert "# - filter: {where: '`rating` >= 3'}" in target.read_text()
    # Named as the label it is one: high ratings mean 1.
    explicit = written(tmp_path / "ratings.csv", target, label="rating")
    assert "`rating` >= " in explicit.features.prepare[0].params["add"]["label"]["expression"]
    # Who rated it low has had it, too; of a click log only what was clicked is had.
    assert explicit.score is not None
    assert explicit.score.exclude_seen == "any_label"
    clicks = written(csv_of(log().assign(clicked=np.arange(400) % 2), tmp_path / "clicks.csv"), target)
    assert clicks.score is not None
    assert clicks.score.exclude_seen is True


def test_rows_of_nobody_are_dropped_and_ids_as_floats_are_integers(tmp_path: Path) -> None:
    data = log().rename(columns={"user_id": "CustomerID", "item_id": "StockCode"})
    data["CustomerID"] = data["CustomerID"].astype(float).where(data.index % 5 != 0)
    spec = written(csv_of(data, tmp_path / "log.csv"), tmp_path / "p.yaml")
    assert {c.name: c.type for c in spec.table.columns}["CustomerID"] == "bigint"
    assert spec.features.prepare[0].params == {"subset": ["CustomerID"]}
    (tmp_path / "log").mkdir()
    pq.write_table(pa.Table.from_pandas(data, preserve_index=False), tmp_path / "log" / "log.parquet")
    by_parquet = written(tmp_path / "log" / "log.parquet", tmp_path / "q.yaml")
    assert {c.name: c.type for c in by_parquet.table.columns}["CustomerID"] == "bigint"
    assert by_parquet.score is not None
    assert (by_parquet.score.user.key, by_parquet.score.item.key) == ("CustomerID", "StockCode")


def test_implicit_outranks_a_label_that_is_there(tmp_path: Path) -> None:
    data = log().assign(clicked=np.arange(400) % 2)
    path = csv_of(data, tmp_path / "log.csv")
    assert written(path, tmp_path / "p.yaml").features.label == "clicked"
    assert written(path, tmp_path / "p.yaml", implicit=True).features.label == "chosen"
    with pytest.raises(UserError, match="--implicit says that each row is a positive: leave --label"):
        written(path, tmp_path / "p.yaml", implicit=True, label="clicked")
    with pytest.raises(UserError, match="--implicit: no column looks like items; say which one it is: --item COLUMN"):
        written(csv_of(data.drop(columns="item_id"), path), tmp_path / "p.yaml", implicit=True)


@pytest.mark.parametrize("side", ["user", "item"])
def test_users_and_items_with_one_event_each_are_refused(tmp_path: Path, side: str) -> None:
    path = csv_of(log().assign(**{f"{side}_id": np.arange(400)}), tmp_path / "log.csv")
    with pytest.raises(UserError, match=f"'{side}_id' has another value in each of 400 rows: no {side} has a second"):
        written(path, tmp_path / "p.yaml", implicit=True)


@pytest.mark.parametrize("value", [1, 0, True, "ja"])
def test_a_label_of_one_class_is_refused_with_what_to_do(tmp_path: Path, value: object) -> None:
    data = log().assign(clicked=value)
    message = r"column 'clicked' looks like a label and is .* in all 400 rows that have it.*--implicit.*--label COLUMN"
    for number, named in enumerate(({}, {"label": "clicked"})):
        with pytest.raises(UserError, match=message):
            written(csv_of(data, tmp_path / "log.csv"), tmp_path / f"{number}.yaml", **named)
    assert not list(tmp_path.glob("*.yaml"))
    spec = written(tmp_path / "log.csv", tmp_path / "p.yaml", implicit=True)
    assert "clicked" not in {c for chain in spec.features.workflow for c in chain.columns}


def test_where_nothing_says_what_to_learn_the_columns_and_commands_are_printed(tmp_path: Path) -> None:
    frame = pd.DataFrame({"height": np.arange(60) / 7, "colour": ["red", "blue", "green"] * 20})
    path = csv_of(frame, tmp_path / "things.csv")
    result = CliRunner().invoke(app, ["init", str(path), "-o", str(tmp_path / "p.yaml")])
    assert result.exit_code == 2
    printed = " ".join(result.output.split())
    assert "colour string 3 red, blue, green" in printed
    for options in ("--label COLUMN #", "--label COLUMN --positive VALUE", "--implicit --user COLUMN --item COLUMN"):
        assert f"headrace init {path} {options}" in printed
    assert not (tmp_path / "p.yaml").exists()


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "side"),
    [
        *((n, "user") for n in ("userId", "user_id", "userid", "CustomerID", "Kunden-Nr.", "Kundennummer", "uid")),
        *((n, "user") for n in ("kundennr", "visitorid", "Nutzer ID", "member")),
        *((n, "item") for n in ("product_sku", "sku", "itemid", "StockCode", "Artikelnummer", "Artikel Nr", "asin")),
        *((n, "item") for n in ("movieId", "productid", "Produkt-Nr.")),
        *((n, None) for n in ("user_age", "item_price", "postcode", "quantity", "customers_per_day", "InvoiceNo")),
    ],
)
def test_names_of_users_and_items(name: str, side: str | None) -> None:
    assert (names.is_user(name), names.is_item(name)) == (side == "user", side == "item")


@pytest.mark.parametrize(
    ("name", "is_id"),
    [
        *((n, True) for n in ("zip_code", "InvoiceNo", "Kunden-Nr.", "storeId", "order_number", "ean", "PLZ")),
        *((n, False) for n in ("week_no", "number_of_rooms", "price", "num", "hour")),
    ],
)
def test_an_id_is_never_a_normalised_number(tmp_path: Path, name: str, is_id: bool) -> None:
    assert names.is_identifier(name) == is_id
    if is_id:
        rows = pd.DataFrame({name: np.arange(300) % 40 + 7, "x": np.arange(300) / 3, "label": np.arange(300) % 2})
        spec = written(csv_of(rows, tmp_path / "a.csv"), tmp_path / "p.yaml")
        ops = {c: [op.op for op in chain.ops] for chain in spec.features.workflow for c in chain.columns}
        assert ops[next(c for c in ops if c != "x")] == ["categorify"]
        assert "normalize" in ops["x"]


@settings(max_examples=60, deadline=None)
@given(st.integers(5, 9), st.integers(0, 2**31), st.booleans())
def test_codes_by_their_shape(digits: int, seed: int, as_float: bool) -> None:
    """Integers of as many digits each, drawn from few, are codes whatever their name; amounts are not."""
    rng = np.random.default_rng(seed)
    codes = rng.choice(rng.integers(10 ** (digits - 1), 10**digits, 60), 600)
    amounts = rng.lognormal(8, 1.5, 600).round().astype(int)
    frame = pd.DataFrame({"thing": codes, "amount": amounts, "label": np.arange(600) % 2})
    if as_float:
        frame["customer_no"] = codes.astype(float)
    columns = profile(pa.Table.from_pandas(frame.astype(str), preserve_index=False), copied=True)
    from headrace.cli.scaffold.roles import find_roles

    roles = find_roles(columns, Named())
    assert roles.features["thing"] == "category"
    assert roles.features["amount"] in ("number", "skewed")
    if as_float:
        assert roles.features["customer_no"] == "id"
        assert {c.name: c.type for c in columns}["customer_no"] == "bigint"


# --- times ------------------------------------------------------------------------------------------------------------

_FORMATS = st.tuples(
    st.sampled_from(
        [
            "%d.%m.%Y",
            "%m/%d/%Y",
            "%d/%m/%Y",
            "%d-%m-%Y",
            "%m-%d-%Y",
            "%d.%m.%y",
            "%m/%d/%y",
            "%Y/%m/%d",
            "%Y.%m.%d",
            "%d %b %Y",
            "%b %d, %Y",
            "%d-%b-%Y",
        ]
    ),
    st.sampled_from(["", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p"]),
)
_TIMES = st.lists(
    st.datetimes(datetime(1990, 1, 1), datetime(2040, 1, 1)).map(lambda t: t.replace(microsecond=0)),
    min_size=1,
    max_size=40,
)


@settings(max_examples=120, deadline=None)
@given(_FORMATS, _TIMES)
def test_times_of_a_format_are_recognised_or_said_to_be_ambiguous(form: tuple[str, str], times: list[datetime]) -> None:
    """Python's strftime writes them; the format that is spelled reads the same instants, or says that it may not."""
    text = "".join(form)
    spelled = find_times(pa.array([t.strftime(text) for t in times]))
    assert spelled is not None, text
    read = [t.replace(tzinfo=None) if isinstance(t, datetime) else t for t in spelled.values.to_pylist()]
    parts = ["%Y", "%m", "%d"] + [p for p in ("%H", "%M", "%S") if p in text or (p == "%H" and "%I" in text)]
    key = " ".join(parts)
    same = [datetime.strptime(t.strftime(key), key) for t in times] == [
        datetime(r.year, r.month, r.day) if not isinstance(r, datetime) else r for r in read
    ]
    assert same or spelled.is_ambiguous
    if spelled.is_ambiguous:
        assert max(t.day for t in times) <= 12, "a day above 12 tells the order"
        assert "ambiguous" in spelled.evidence


@pytest.mark.parametrize(
    ("texts", "form", "evidence"),
    [
        (["12/1/2010 8:26", "12/13/2010 9:02"], "%m/%d/%Y %H:%M", "month first: the first number goes up to 12"),
        (["01.12.2025 00:00", "31.12.2025 23:00"], "%d.%m.%Y %H:%M", "day first: the first number goes up to 31"),
        (["20250131", "20250201"], "%Y%m%d", ""),
        (["Jan 5, 2026", "Dec 31, 2025"], "%b %d, %Y", ""),
    ],
)
def test_the_order_of_day_and_month_is_said_with_evidence(texts: list[str], form: str, evidence: str) -> None:
    spelled = find_times(pa.array(texts))
    assert spelled is not None
    assert (spelled.format, spelled.is_ambiguous) == (form, False)
    assert evidence in spelled.evidence


def test_an_ambiguous_order_is_that_in_which_rows_follow_each_other(tmp_path: Path) -> None:
    """Twelve months of days up to the twelfth, in the order of time, fit both orders."""
    days = [datetime(2025, month, day) for month in range(1, 13) for day in range(1, 13, 2)]
    for form, alternative in (("%d/%m/%Y", "month first"), ("%m.%d.%Y", "day first")):
        spelled = find_times(pa.array([d.strftime(form) for d in days]))
        assert spelled is not None
        assert (spelled.format, spelled.is_ambiguous) == (form, True)
        assert "no number is above 12" in spelled.evidence
        assert f"with the {alternative}" in spelled.evidence
    rows = log(72).assign(timestamp=[d.strftime("%d/%m/%Y") for d in days])
    target = tmp_path / "p.yaml"
    spec = written(csv_of(rows, tmp_path / "a.csv"), target)
    assert dict(spec.source.timestamps) == {"timestamp": "%d/%m/%Y"}
    assert "# timestamp: ambiguous: no number is above 12" in target.read_text()


@pytest.mark.parametrize(("unit", "per"), [("seconds", 1), ("milliseconds", 10**3), ("microseconds", 10**6)])
def test_epochs(tmp_path: Path, unit: str, per: int) -> None:
    data = log().assign(timestamp=lambda d: d["timestamp"] * per)
    spec = written(csv_of(data, tmp_path / "a.csv"), tmp_path / "p.yaml")
    assert dict(spec.source.timestamps) == {"timestamp": f"epoch_{unit}"}
    # Of nanoseconds too; and with a fraction.
    columns = profile(pa.table({"ts": ["1600000000000000000"], "time": ["1600000000.25"]}), copied=True)
    assert [c.epoch for c in columns] == ["epoch_nanoseconds", "epoch_seconds"]
    assert columns[1].values.to_pylist()[0].microsecond == 250_000


def test_a_date_and_a_time_of_day_in_two_columns(tmp_path: Path) -> None:
    data = log()
    start = datetime(2025, 3, 1)
    moments = [start + timedelta(minutes=17 * k) for k in range(len(data))]
    data = data.drop(columns="timestamp").assign(
        Datum=[m.strftime("%d.%m.%Y") for m in moments], Uhrzeit=[f"{m.hour}:{m.minute:02d}" for m in moments]
    )
    spec = written(csv_of(data, tmp_path / "a.csv", sep=";"), tmp_path / "p.yaml")
    assert (spec.table.event_time, dict(spec.source.timestamps)) == ("Datum", {"Datum": "%d.%m.%Y"})
    added, split = spec.features.prepare
    assert added.params["add"]["event_moment"]["type"] == "timestamp"
    assert split.params["order"] == ["event_moment"]
    # With a label the hour is a feature, and the column of times of day is none.
    labelled = written(
        csv_of(data.assign(clicked=np.arange(400) % 2), tmp_path / "a.csv", sep=";"), tmp_path / "q.yaml"
    )
    ops = {c: [op.op for op in chain.ops] for chain in labelled.features.workflow for c in chain.columns}
    assert ops["event_moment"] == ["cyclic"]
    assert "Uhrzeit" not in ops
    assert labelled.score is not None
    assert "event_moment" in labelled.score.context


# --- numbers and null texts -------------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from([(".", ""), (",", ""), (",", "."), (".", ","), (",", " "), (".", "'")]),
    st.lists(st.integers(-(10**9), 10**9), min_size=1, max_size=30),
    st.integers(0, 4),
    st.sampled_from([";", "\t", ","]),
)
def test_numbers_of_a_style_are_recognised_or_said_to_be_ambiguous(
    style: tuple[str, str], units: list[int], digits: int, separator: str
) -> None:
    decimal, thousands = style
    values = [u / 10**digits for u in units]
    texts = [f"{v:,.{digits}f}".replace(",", "t").replace(".", decimal).replace("t", thousands) for v in values]
    marks = find_marks({"x": pa.array(texts)}, separator)
    plain = marks.plain(pa.array(texts)).to_pylist()
    read = None if None in plain else [float(p) for p in plain]
    assert read == pytest.approx(values) or any("ambiguous" in note for note in marks.notes)


def test_decimal_commas_and_several_null_texts(tmp_path: Path) -> None:
    data = log()
    data["Preis"] = [f"{1_000 + k:,}".replace(",", ".") + f",{k % 100:02d}" for k in range(len(data))]
    data["Gewicht"] = ["-" if k % 9 == 0 else "NULL" if k % 7 == 0 else f"{k % 50},5" for k in range(len(data))]
    data["gekauft"] = np.where(np.arange(len(data)) % 3, "nein", "ja")
    spec = written(csv_of(data, tmp_path / "a.csv", sep=";"), tmp_path / "p.yaml")
    assert isinstance(spec.source, LandingSource)
    assert (spec.source.decimal, spec.source.thousands) == (",", ".")
    assert set(spec.source.null_texts) == {"-", "NULL"}
    assert {c.name: c.type for c in spec.table.columns}.items() >= {"Preis": "double", "Gewicht": "double"}.items()
    assert spec.features.prepare[0].params["add"]["label"]["expression"] == "`gekauft` = 'ja'"


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_of_recbole(tmp_path: Path) -> None:
    data = log().assign(rating=4.0)
    data.columns = ["user_id:token", "item_id:token", "timestamp:float", "rating:float"]
    spec = written(csv_of(data, tmp_path / "ml.inter", sep="\t"), tmp_path / "p.yaml")
    assert {c.name: c.path for c in spec.table.columns} == {n.split(":")[0]: n for n in data.columns}
    assert spec.score is not None
    assert (spec.score.user.key, spec.score.item.key, spec.table.event_time) == ("user_id", "item_id", "timestamp")


def test_ratings_between_two_colons_without_names(tmp_path: Path) -> None:
    data = log().assign(rating=np.arange(400) % 5 + 1)[["user_id", "item_id", "rating", "timestamp"]]
    lines = ["::".join(map(str, row)) for row in data.itertuples(index=False)]
    path = tmp_path / "ratings.dat"
    path.write_text("\n".join(lines) + "\n")
    target = tmp_path / "p.yaml"
    spec = written(path, target)
    assert isinstance(spec.source, LandingSource)
    assert (spec.source.separator, spec.source.header) == (":", False)
    assert spec.score is not None
    assert (spec.score.user.key, spec.score.item.key, spec.table.event_time) == ("column0", "column2", "column6")
    assert [c.name for c in spec.table.columns] == [f"column{k}" for k in range(7)]
    assert "by its place in a file without names; check it" in target.read_text()


@pytest.mark.parametrize("name", ["events", "events.log", "events.jsonl.zst", "events.txt"])
def test_json_lines_by_their_content(tmp_path: Path, name: str) -> None:
    text = log().to_json(orient="records", lines=True).encode()
    path = tmp_path / name
    path.write_bytes(pa.compress(text, "zstd", asbytes=True) if name.endswith(".zst") else text)
    spec = written(path, tmp_path / "p.yaml")
    assert isinstance(spec.source, LandingSource)
    assert (spec.source.format, spec.source.path) == ("jsonl", str(path))


def test_a_format_that_is_said_outranks_the_content(tmp_path: Path) -> None:
    path = csv_of(log(), tmp_path / "events")
    assert written(path, tmp_path / "p.yaml").source.model_dump()["format"] == "csv"
    with pytest.raises(UserError, match="not JSON lines"):
        written(path, tmp_path / "p.yaml", format_="jsonl")
    with pytest.raises(UserError, match=r"--format json: formats of files: csv, jsonl, .*did you mean 'jsonl'"):
        written(path, tmp_path / "p.yaml", format_="json")
    (tmp_path / "noise").write_bytes(bytes(range(256)) * 20)
    with pytest.raises(UserError, match=r"its content is no text and of no known format. Say which"):
        written(tmp_path / "noise", tmp_path / "p.yaml")


def test_libfm(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    rows = [[f"{f * 100 + rng.integers(9)}:1" for f in range(3)] for _ in range(200)]
    path = tmp_path / "x.libfm"
    path.write_text("".join(f"{1 if k % 3 else -1} {' '.join(row)}\n" for k, row in enumerate(rows)))
    spec = written(path, tmp_path / "p.yaml")
    assert spec.features.prepare[0].params["add"]["label"]["expression"] == "`column0` = 1"
    assert {c for chain in spec.features.workflow for c in chain.columns} == {"column1", "column2", "column3"}
    assert "'column0', by its place, the first or the last, and its two values" in (tmp_path / "p.yaml").read_text()
    path.write_text("1 5:1\n" + path.read_text())
    with pytest.raises(UserError, match=r"lines of libSVM or libFM with 1 to 3 features.*awk.*features\.jsonl"):
        written(path, tmp_path / "p.yaml")


@pytest.mark.parametrize(
    ("folder", "pattern"), [("{:%Y/%m/%d}", "{ds:%Y/%m/%d}"), ("{:%Y-%m-%d}", "{ds}"), ("{:%Y%m%d}", "{ds:%Y%m%d}")]
)
def test_parquet_with_a_folder_a_day(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str, pattern: str
) -> None:
    data = log()
    for k in range(3):
        target = tmp_path / "events" / folder.format(datetime(2026, 1, 5) + timedelta(days=k))
        target.mkdir(parents=True)
        rows = data.iloc[k::3].assign(timestamp=lambda d, k=k: pd.Timestamp(f"2026-01-0{5 + k}", tz="UTC"))
        rows.to_parquet(target / "part.parquet", index=False)
    spec = written(tmp_path / "events", tmp_path / "p.yaml")
    assert spec.source.model_dump(exclude_defaults=True)["day"] == {"path": pattern}
    assert "--ds 2026-01-07 --dry-run" in capsys.readouterr().out


def test_compressed_text_without_a_known_ending(tmp_path: Path) -> None:
    path = tmp_path / "events.inter.gz"
    path.write_bytes(gzip.compress(log().to_csv(index=False, sep="\t").encode()))
    assert isinstance(source := written(path, tmp_path / "p.yaml").source, LandingSource)
    assert (source.format, source.separator) == ("csv", "\t")
