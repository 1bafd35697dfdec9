"""Files that trip readers, drawn by a seed, each with what pandas makes of it, or how it must be refused."""

from __future__ import annotations

import gzip
import io
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd


@dataclass(frozen=True)
class StrangeInput:
    """An input of `headrace init`."""

    path: Path
    #: Values as pandas reads them, by the declared name of the column; empty where the input must be refused.
    expected: pd.DataFrame
    #: What the refusal says; empty where the input must be read.
    refusal: str = ""
    #: Whether the refusal has a command after which the input is read.
    is_mended: bool = True


def log(rng: np.random.Generator) -> pd.DataFrame:
    """Clicks of users on items, in the order of time."""
    rows = int(rng.integers(60, 200))
    seconds = np.sort(rng.integers(0, 5 * 86_400, rows))
    clicked = (rng.random(rows) < 0.4).astype(int)
    clicked[:2] = (0, 1)
    return pd.DataFrame(
        {
            "user_id": rng.integers(1, 20, rows),
            "item_id": rng.integers(1, 9, rows),
            "ts": (pd.Timestamp("2026-03-01") + pd.to_timedelta(seconds, unit="s")).strftime("%Y-%m-%d %H:%M:%S"),
            "weight": rng.normal(10, 3, rows).round(2),
            "clicked": clicked,
        }
    )


def _csv(folder: Path, text: str | bytes, name: str = "log.csv") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def _read(text: str, **options: object) -> pd.DataFrame:
    """Read text by pandas; times are instants."""
    frame = pd.read_csv(io.StringIO(text), **options)  # type: ignore[call-overload]
    return frame.assign(ts=pd.to_datetime(frame["ts"], utc=True)) if "ts" in frame else frame


_NO_ROWS = pd.DataFrame()


def header_again(rng: np.random.Generator, folder: Path) -> StrangeInput:
    """Files that were joined with their headers."""
    text = log(rng).to_csv(index=False)
    header, *lines = text.splitlines()
    for place in sorted(rng.choice(len(lines), 3, replace=False), reverse=True):
        lines.insert(int(place), header)
    return StrangeInput(_csv(folder, "\n".join([header, *lines]) + "\n"), _read(text))


def units_below_the_header(rng: np.random.Generator, folder: Path) -> StrangeInput:
    text = log(rng).to_csv(index=False)
    header, _, body = text.partition("\n")
    return StrangeInput(_csv(folder, f"{header}\n[1],[1],[UTC],[kg],[1]\n{body}"), _read(text))


def separators_at_all_ends(rng: np.random.Generator, folder: Path) -> StrangeInput:
    text = log(rng).to_csv(index=False, sep=";").replace("\n", ";\n")
    return StrangeInput(_csv(folder, text), _read(text, sep=";").drop(columns="Unnamed: 5"))


def separators_at_the_ends_of_lines(rng: np.random.Generator, folder: Path) -> StrangeInput:
    separator = str(rng.choice([";", ",", "\t", "|"]))
    header, _, body = log(rng).to_csv(index=False, sep=separator).partition("\n")
    end = str(rng.choice(["\n", "\r\n"]))
    body = body.replace("\n", separator + end)
    return StrangeInput(_csv(folder, header + end + body), _NO_ROWS, "each line but the header ends in a separator")


def separator_at_the_end_of_the_header(rng: np.random.Generator, folder: Path) -> StrangeInput:
    header, _, body = log(rng).to_csv(index=False).partition("\n")
    return StrangeInput(_csv(folder, f"{header},\n{body}"), _NO_ROWS, "the header ends in a separator, and the lines")


def all_quoted(rng: np.random.Generator, folder: Path) -> StrangeInput:
    text = log(rng).to_csv(index=False, quoting=1)
    return StrangeInput(_csv(folder, text), _read(text))


def percent(rng: np.random.Generator, folder: Path) -> StrangeInput:
    frame = log(rng)
    rates = rng.uniform(-3, 90, len(frame)).round(1)
    text = frame.assign(rate=[f"{r}%" for r in rates]).to_csv(index=False)
    return StrangeInput(_csv(folder, text), _read(text).drop(columns="rate").assign(rate_value=rates))


def currency(rng: np.random.Generator, folder: Path) -> StrangeInput:
    frame = log(rng)
    amounts = rng.uniform(1, 20_000, len(frame)).round(2)
    texts = [f"{a:,.2f}" for a in amounts]
    form = int(rng.integers(3))
    if form == 0:
        frame = frame.assign(price=[f"${t}" for t in texts])
    else:
        german = [t.translate(str.maketrans(",.", ".,")) for t in texts]
        frame = frame.assign(price=[f"{t} €" if form == 1 else f"EUR {t}" for t in german])
        frame["weight"] = [f"{w:.2f}".replace(".", ",") for w in frame["weight"]]
    text = frame.to_csv(index=False, sep="," if form == 0 else ";")
    read = _read(text, sep="," if form == 0 else ";", decimal="." if form == 0 else ",")
    return StrangeInput(_csv(folder, text), read.drop(columns="price").assign(price_value=amounts))


def returns(rng: np.random.Generator, folder: Path) -> StrangeInput:
    frame = log(rng).drop(columns="clicked")
    frame["quantity"] = np.where(rng.random(len(frame)) < 0.1, -1, rng.integers(1, 9, len(frame)))
    text = frame.to_csv(index=False)
    return StrangeInput(_csv(folder, text), _read(text))


def mixed_line_ends(rng: np.random.Generator, folder: Path) -> StrangeInput:
    text = log(rng).to_csv(index=False)
    ends = rng.choice(["\n", "\r\n"], text.count("\n"))
    lines = zip(text.splitlines(), ends, strict=True)
    return StrangeInput(_csv(folder, "".join(line + end for line, end in lines)), _read(text))


def old_mac(rng: np.random.Generator, folder: Path) -> StrangeInput:
    text = log(rng).to_csv(index=False).replace("\n", "\r")
    return StrangeInput(_csv(folder, text), _NO_ROWS, "end in a carriage return alone")


def utf_16(rng: np.random.Generator, folder: Path) -> StrangeInput:
    text = log(rng).assign(city="Zürich").to_csv(index=False, sep="\t")
    name = str(rng.choice(["log.csv", "log.tsv", "log", "log.txt"]))
    return StrangeInput(_csv(folder, text.encode("utf-16"), name), _NO_ROWS, "is UTF-16 text")


def latin_1(rng: np.random.Generator, folder: Path) -> StrangeInput:
    frame = log(rng)
    cities = np.array(["Bern", "Zürich", "Köln"])[rng.integers(0, 3, len(frame))]
    cities[-1] = "Zürich"
    text = frame.assign(city=cities).to_csv(index=False, sep=";")
    return StrangeInput(_csv(folder, text.encode("latin-1")), _NO_ROWS, r"is not UTF-8 text \(line \d+\)")


def excels_line(rng: np.random.Generator, folder: Path) -> StrangeInput:
    text = "sep=;\r\n" + log(rng).to_csv(index=False, sep=";", lineterminator="\r\n")
    mark = b"\xef\xbb\xbf" if rng.random() < 0.5 else b""
    return StrangeInput(_csv(folder, mark + text.encode()), _NO_ROWS, "the first line is no header, as Excel writes")


def lines_before_the_header(rng: np.random.Generator, folder: Path) -> StrangeInput:
    begin = "# exported 2026-03-06\n# by: the shop\n\n"
    packed = bool(rng.random() < 0.5)
    body = (begin + log(rng).to_csv(index=False)).encode()
    path = _csv(folder, gzip.compress(body) if packed else body, "log.csv.gz" if packed else "log.csv")
    return StrangeInput(path, _NO_ROWS, "the first 3 lines are no header")


def milliseconds_as_floats(rng: np.random.Generator, folder: Path) -> StrangeInput:
    frame = log(rng)
    millis = pd.to_datetime(frame["ts"], utc=True).astype("int64") // 10**6
    frame["ts"] = [f"{m:.9e}" if rng.random() < 0.5 else f"{m}.0" for m in millis]
    text = frame.to_csv(index=False)
    read = pd.read_csv(io.StringIO(text))
    read["ts"] = pd.to_datetime(read["ts"].round().astype("int64"), unit="ms", utc=True)
    return StrangeInput(_csv(folder, text), read)


def leading_zeros(rng: np.random.Generator, folder: Path) -> StrangeInput:
    frame = log(rng)
    frame["item_id"] = [f"{i:06d}" for i in frame["item_id"]]
    text = frame.to_csv(index=False)
    return StrangeInput(_csv(folder, text), _read(text, dtype={"item_id": str}))


def booleans(rng: np.random.Generator, folder: Path) -> StrangeInput:
    frame = log(rng)
    pairs = (("Y", "N"), ("yes", "no"), ("TRUE", "FALSE"), ("t", "f"))
    true, false = pairs[int(rng.integers(len(pairs)))]
    is_clicked, is_new = frame["clicked"] == 1, rng.random(len(frame)) < 0.5
    is_new[:2] = (True, False)
    words = {"is_new": np.where(is_new, true, false), "gelesen": np.where(is_new, "wahr", "falsch")}
    text = frame.assign(clicked=np.where(is_clicked, true, false), **words).to_csv(index=False)
    read = _read(text, true_values=[true], false_values=[false])
    return StrangeInput(_csv(folder, text), read)


def many_columns(rng: np.random.Generator, folder: Path) -> StrangeInput:
    frame = log(rng)
    wide = pd.DataFrame(rng.normal(0, 1, (len(frame), 200)).round(3)).add_prefix("f")
    text = pd.concat([frame, wide], axis=1).to_csv(index=False)
    return StrangeInput(_csv(folder, text), _read(text))


def one_column(rng: np.random.Generator, folder: Path) -> StrangeInput:
    return StrangeInput(
        _csv(folder, log(rng)[["clicked"]].to_csv(index=False)), _NO_ROWS, "'clicked' is the only column", False
    )


def empty(rng: np.random.Generator, folder: Path) -> StrangeInput:
    return StrangeInput(_csv(folder, str(rng.choice(["", "\n\n"]))), _NO_ROWS, "is empty", False)


def header_alone(rng: np.random.Generator, folder: Path) -> StrangeInput:
    return StrangeInput(_csv(folder, log(rng).head(0).to_csv(index=False)), _NO_ROWS, "no rows to look at", False)


def readme_beside_the_data(rng: np.random.Generator, folder: Path) -> StrangeInput:
    text = log(rng).to_csv(index=False)
    header, *lines = text.splitlines()
    for k in range(2):
        _csv(folder, "\n".join([header, *lines[k::2]]) + "\n", f"in/part-{k}.csv")
    _csv(folder, "These are clicks, of users.\nSee the shop.\n", f"in/README{rng.choice(['', '.txt', '.md', '.csv'])}")
    frame = _read(text)
    if (folder / "in" / "README.csv").exists():
        return StrangeInput(folder / "in", _NO_ROWS, r"README\.csv would be read with the 2 files of data", False)
    return StrangeInput(folder / "in", pd.concat([frame[0::2], frame[1::2]], ignore_index=True))


def several_tables(rng: np.random.Generator, folder: Path) -> StrangeInput:
    """Write a folder as the sets of MovieLens are packed."""
    frame = log(rng)
    has_names = bool(rng.random() < 0.5)
    for name, table in {
        "movies": pd.DataFrame({"item_id": range(1, 9), "title": "T", "genres": "G"}),
        "ratings": frame[["user_id", "item_id", "clicked", "ts"]],
        "users": pd.DataFrame({"user_id": range(1, 20), "age": 30, "sex": "F", "zip": "1"}),
    }.items():
        body = table.to_csv(index=False, header=has_names, sep="," if has_names else "|")
        _csv(folder, body, f"in/{name}.{'csv' if has_names else 'dat'}")
    return StrangeInput(folder / "in", _NO_ROWS, "files of several tables: movies")


def dates_of_zeros(rng: np.random.Generator, folder: Path) -> StrangeInput:
    """Write times that are not known as MySQL does."""
    frame = log(rng)
    frame["seen_at"] = frame["ts"].where(rng.random(len(frame)) < 0.8, "0000-00-00 00:00:00")
    text = frame.to_csv(index=False)
    read = _read(text)
    return StrangeInput(
        _csv(folder, text), read.assign(seen_at=pd.to_datetime(read["seen_at"], utc=True, errors="coerce"))
    )


def array_of_objects(rng: np.random.Generator, folder: Path) -> StrangeInput:
    text = log(rng).to_json(orient="records", indent=int(rng.choice([0, 1])))
    return StrangeInput(_csv(folder, text, "log.json"), _NO_ROWS, "not JSON lines .*jq -c", False)


def workbook(rng: np.random.Generator, folder: Path) -> StrangeInput:
    with zipfile.ZipFile(folder / "log.xlsx", "w") as archive:
        archive.writestr("xl/worksheets/sheet1.xml", "<worksheet/>")
    return StrangeInput(folder / "log.xlsx", _NO_ROWS, r"a zip archive, such as Excel's .xlsx", False)


def compressed_without_saying_so(rng: np.random.Generator, folder: Path) -> StrangeInput:
    body = gzip.compress(log(rng).to_csv(index=False).encode())
    return StrangeInput(_csv(folder, body, str(rng.choice(["log.csv", "log"]))), _NO_ROWS, "compressed by gzip")


def separator_of_hive(rng: np.random.Generator, folder: Path) -> StrangeInput:
    separator = str(rng.choice(["\x01", "~", "^"]))
    text = log(rng).to_csv(index=False, sep=separator)
    return StrangeInput(_csv(folder, text, "log.txt"), _read(text, sep=separator))


def time_of_day_beside_the_date(rng: np.random.Generator, folder: Path) -> StrangeInput:
    frame = log(rng)
    moments = pd.to_datetime(frame.pop("ts"))
    if rng.random() < 0.5:
        moments = moments.dt.floor("min")
    form = "%I:%M:%S %p" if rng.random() < 0.5 else "%H:%M:%S"
    frame.insert(2, "date", moments.dt.strftime("%d.%m.%Y"))
    frame.insert(3, "time", moments.dt.strftime(form.replace(":%S", "") if (moments.dt.second == 0).all() else form))
    text = frame.to_csv(index=False)
    read = pd.read_csv(io.StringIO(text)).drop(columns=["date", "time"])
    return StrangeInput(_csv(folder, text), read.assign(event_moment=moments.dt.tz_localize("UTC")))


Kind = Callable[[np.random.Generator, Path], StrangeInput]
KINDS: tuple[Kind, ...] = (
    header_again,
    units_below_the_header,
    separators_at_all_ends,
    separators_at_the_ends_of_lines,
    separator_at_the_end_of_the_header,
    all_quoted,
    percent,
    currency,
    returns,
    mixed_line_ends,
    old_mac,
    utf_16,
    latin_1,
    excels_line,
    lines_before_the_header,
    milliseconds_as_floats,
    leading_zeros,
    booleans,
    many_columns,
    one_column,
    empty,
    header_alone,
    readme_beside_the_data,
    several_tables,
    dates_of_zeros,
    array_of_objects,
    workbook,
    compressed_without_saying_so,
    separator_of_hive,
    time_of_day_beside_the_date,
)
