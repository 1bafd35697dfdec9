"""Go from data of eight kinds to the first published list by `headrace init`, and look for items that users had.

    python -m scripts.first_lists                                   # all eight
    python -m scripts.first_lists german retail --seed 2 --transcripts build/first-lists
    python -m scripts.first_lists recbole --recbole ml-100k.inter

    recbole   RecBole's `ml-100k.inter`: from the file or the wheel that `--recbole` names, else from the wheel that pip
              downloads once to ~/.cache/headrace; left out, with the reason, where there is neither
    retail    an online retailer's CSV: `12/1/2010 8:26`, `CustomerID` as 17850.0, no label
    german    an export: `;`, a BOM, `Kunden-Nr.`, `11,71`, `01.12.2025 00:00`, a label of ja and nein
    nested    six days of Parquet with nested columns, a folder a day, no label
    dat       MovieLens' `ratings.dat`: `::` between fields, no names, seconds since 1970, no label
    libfm     lines of libFM, a label of 1 and -1; `--user` and `--item` say which features those are
    zst       `plays.jsonl.zst`: compressed JSON lines with nested objects, no label
    bare      a file without a suffix: tabs, a date and a time of day, prices such as `12.50 €`, a label of yes and no

All but the first are drawn with a seed. `headrace init FILE` and then `headrace run` are typed as a new user would;
pandas reads the source once more, by itself, and counts rows of the published lists whose item the user had. Ends with
1 where a command fails, a list has such an item, or a kind takes more than ten minutes. With `--transcripts` each
kind's commands and their output are written to a file, without the lines that only count.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.config import Warehouse, load_spec
from headrace.config.workspace import Workspace
from headrace.publish.postgres.server import connect

#: Seconds from `init` to the first list, at most.
LIMIT = 600.0
_CACHE = Path.home() / ".cache" / "headrace" / "recbole"
_INTER = "recbole/dataset_example/ml-100k/ml-100k.inter"
#: Lines of output that say nothing to a reader: progress, and what Spark and Python warn of.
_DULL = re.compile(r"WARN|log level|adjust logging|resource_tracker|warnings[.]warn|: \[[#.]{24}\]")


@dataclass(frozen=True)
class Source:
    """Data as a stranger has it."""

    #: What `headrace init` is given, in the folder of the run.
    path: str
    #: (user, item) as text, of all that users had.
    pairs: Callable[[Path], pd.DataFrame]
    #: Options of `headrace init`, for what no file says.
    options: tuple[str, ...] = ()


class Missing(Exception):
    """Data that cannot be had here."""


# --- the kinds ---------------------------------------------------------------------------------------------------


def recbole(folder: Path, seed: int, inter: Path | None) -> Source:
    """Take RecBole's file as its wheel ships it.

    Raises:
        Missing: there is no such file or wheel, and none can be downloaded.
    """
    del seed
    target = folder / "ml-100k.inter"
    if inter is None:
        wheels = sorted(_CACHE.glob("recbole-*.whl"))
        if not wheels:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(_CACHE), "recbole"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            wheels = sorted(_CACHE.glob("recbole-*.whl"))
            if done.returncode or not wheels:
                raise Missing(f"pip download recbole: {(done.stderr.strip().splitlines() or ['no wheel'])[-1]}")
        inter = wheels[-1]
    if not inter.exists():
        raise Missing(f"{inter} is not there")
    if inter.suffix == ".whl":
        with zipfile.ZipFile(inter) as wheel:
            target.write_bytes(wheel.read(_INTER))
    else:
        target.write_bytes(inter.read_bytes())

    def pairs(path: Path) -> pd.DataFrame:
        rows = pd.read_csv(path, sep="\t", dtype=str)
        return rows.rename(columns={"user_id:token": "user", "item_id:token": "item"})[["user", "item"]]

    return Source(target.name, pairs)


def _drawn(rng: np.random.Generator, rows: int, users: int, items: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw users and the items that they like: each user likes one of eight kinds of items most."""
    user = rng.zipf(1.3, rows * 3) - 1
    user = user[user < users][:rows]
    kinds, popularity = 8, 1 / np.arange(1, items + 1) ** 0.8
    item = np.empty(len(user), np.int64)
    for kind in range(kinds):
        liked = np.where(np.arange(items) % kinds == kind, popularity * 12, popularity)
        of_kind = user % kinds == kind
        item[of_kind] = rng.choice(items, of_kind.sum(), p=liked / liked.sum())
    return user, item


def retail(folder: Path, seed: int, inter: Path | None) -> Source:
    """Write an online retailer's CSV: US dates, ids as doubles, quantities and prices, no label."""
    del inter
    rng = np.random.default_rng([seed, 1])
    user, item = _drawn(rng, 30_000, 1_500, 400)
    rows = len(user)
    minutes = np.sort(rng.integers(0, 60 * 24 * 60, rows))
    moment = pd.Timestamp("2010-12-01 08:26") + pd.to_timedelta(minutes, unit="min")
    price = np.round(rng.gamma(2.0, 2.0, 400) + 0.2, 2)
    colours = rng.choice(["RED", "WHITE", "BLUE", "CREAM"], 400)
    things = rng.choice(["MUG", "LANTERN", "CAKE TIN", "BUNTING", "CLOCK", "JIGSAW"], 400)
    frame = pd.DataFrame(
        {
            "InvoiceNo": 536_365 + minutes // 7,
            "StockCode": [f"{22_000 + i}{'ABC'[i % 3] if i % 5 == 0 else ''}" for i in item],
            "Description": [f"{colours[i]} {things[i]}" for i in item],
            "Quantity": rng.geometric(0.25, rows) * np.where(rng.random(rows) < 0.02, -1, 1),
            "InvoiceDate": [f"{t.month}/{t.day}/{t.year} {t.hour}:{t.minute:02d}" for t in moment],
            "UnitPrice": price[item],
            "CustomerID": pd.Series(12_346.0 + user).where(rng.random(rows) > 0.1),
            "Country": np.array(["United Kingdom", "France", "Germany", "EIRE"])[user % 7 % 4],
        }
    )
    frame.to_csv(folder / "online_retail.csv", index=False)

    def pairs(path: Path) -> pd.DataFrame:
        read = pd.read_csv(path).dropna(subset=["CustomerID"])
        return pd.DataFrame({"user": read["CustomerID"].astype(int).astype(str), "item": read["StockCode"].astype(str)})

    return Source("online_retail.csv", pairs)


def german(folder: Path, seed: int, inter: Path | None) -> Source:
    """Write a German export: a BOM, semicolons, decimal commas, German times, and a label of ja and nein."""
    del inter
    rng = np.random.default_rng([seed, 2])
    user, item = _drawn(rng, 20_000, 800, 250)
    rows = len(user)
    hours = np.sort(rng.integers(0, 14 * 24, rows))
    moment = pd.Timestamp("2025-12-01") + pd.to_timedelta(hours, unit="h")
    price = np.round(rng.gamma(2.0, 9.0, 250) + 1, 2)
    likes = np.where(user % 8 == item % 8, 0.5, 0.12)
    frame = pd.DataFrame(
        {
            "Kunden-Nr.": 100_000 + user,
            "Artikelnummer": [f"A-{i:05d}" for i in item],
            "Warengruppe": np.array(["Küche", "Garten", "Bücher", "Spielwaren"])[item % 4],
            "Preis": [f"{p:.2f}".replace(".", ",") for p in price[item]],
            "Zeitpunkt": moment.strftime("%d.%m.%Y %H:%M"),
            "Bundesland": np.array(["Bayern", "Hessen", "Berlin", "k.A."])[user % 5 % 4],
            "gekauft": np.where(rng.random(rows) < likes, "ja", "nein"),
        }
    )
    frame.to_csv(folder / "export.csv", index=False, sep=";", encoding="utf-8-sig")

    def pairs(path: Path) -> pd.DataFrame:
        read = pd.read_csv(path, sep=";", encoding="utf-8-sig", dtype=str)
        read = read[read["gekauft"] == "ja"]
        return read.rename(columns={"Kunden-Nr.": "user", "Artikelnummer": "item"})[["user", "item"]]

    return Source("export.csv", pairs)


def nested(folder: Path, seed: int, inter: Path | None) -> Source:
    """Write six days of Parquet, a folder a day, with structures of user and item, and no label."""
    del inter
    rng = np.random.default_rng([seed, 3])
    user, item = _drawn(rng, 24_000, 1_200, 300)
    day = np.sort(rng.integers(0, 6, len(user)))
    for k in range(6):
        of_day = day == k
        u, i = user[of_day], item[of_day]
        seconds = np.sort(rng.integers(0, 86_400, of_day.sum()))
        ds = pd.Timestamp("2026-01-05") + pd.Timedelta(days=k)
        rows = pa.table(
            {
                "event_time": pa.array(ds.tz_localize("UTC") + pd.to_timedelta(seconds, unit="s")),
                "user": pa.array([{"id": f"u{n:05d}", "country": ("DE", "FR", "US")[n % 3]} for n in u.tolist()]),
                "item": pa.array([{"id": n + 1, "category": f"c{n % 8}", "price": 5.0 + n % 17} for n in i.tolist()]),
                "device": pa.array(rng.choice(["phone", "tablet", "desktop"], of_day.sum())),
            }
        )
        target = folder / "events" / f"dt={ds.date()}"
        target.mkdir(parents=True)
        pq.write_table(rows, target / "part-0.parquet")

    def pairs(path: Path) -> pd.DataFrame:
        read = pd.concat([pd.read_parquet(f, columns=["user", "item"]) for f in sorted(path.glob("*/*.parquet"))])
        return pd.DataFrame({"user": [u["id"] for u in read["user"]], "item": [str(i["id"]) for i in read["item"]]})

    return Source("events", pairs)


def dat(folder: Path, seed: int, inter: Path | None) -> Source:
    """Write ratings as MovieLens has them: two colons between fields, no names, seconds since 1970."""
    del inter
    rng = np.random.default_rng([seed, 4])
    user, item = _drawn(rng, 12_000, 500, 200)
    seconds = 978_300_000 + np.sort(rng.integers(0, 30 * 86_400, len(user)))
    rating = rng.integers(1, 6, len(user))
    rows = zip(user + 1, item + 1, rating, seconds, strict=True)
    (folder / "ratings.dat").write_text("".join("::".join(map(str, row)) + "\n" for row in rows))

    def pairs(path: Path) -> pd.DataFrame:
        rows = pd.read_csv(path, sep="::", engine="python", dtype=str, names=["user", "item", "rating", "time"])
        return rows[["user", "item"]]

    return Source("ratings.dat", pairs)


def libfm(folder: Path, seed: int, inter: Path | None) -> Source:
    """Write lines of libFM: the label, then the features of the user, the item and the hour."""
    del inter
    rng = np.random.default_rng([seed, 5])
    user, item = _drawn(rng, 10_000, 400, 150)
    label = np.where(rng.random(len(user)) < np.where(user % 8 == item % 8, 0.5, 0.12), 1, -1)
    hour = rng.integers(0, 24, len(user))
    rows = zip(label, user, 1_000 + item, 2_000 + hour, strict=True)
    (folder / "clicks.libfm").write_text("".join(f"{y} {u}:1 {i}:1 {h}:1\n" for y, u, i, h in rows))

    def pairs(path: Path) -> pd.DataFrame:
        rows = pd.read_csv(path, sep=" ", dtype=str, names=["label", "user", "item", "hour"])
        return rows[rows["label"] == "1"][["user", "item"]]

    return Source("clicks.libfm", pairs, ("--user", "column1", "--item", "column2"))


def zst(folder: Path, seed: int, inter: Path | None) -> Source:
    """Write plays as compressed JSON lines, with objects of the user and of the track."""
    del inter
    rng = np.random.default_rng([seed, 6])
    user, item = _drawn(rng, 12_000, 500, 200)
    seconds = np.sort(rng.integers(0, 7 * 86_400, len(user)))
    times = (pd.Timestamp("2026-02-01") + pd.to_timedelta(seconds, unit="s")).strftime("%Y-%m-%dT%H:%M:%SZ")
    lines = [
        json.dumps(
            {
                "played_at": time,
                "user": {"id": f"u{u}", "plan": ("free", "paid")[u % 2]},
                "track": {"id": i + 1, "genre": f"g{i % 8}"},
                "ms_played": ms,
            }
        )
        for time, u, i, ms in zip(
            times, user.tolist(), item.tolist(), rng.integers(0, 300_000, len(user)).tolist(), strict=True
        )
    ]
    text = "\n".join(lines) + "\n"
    (folder / "plays.jsonl.zst").write_bytes(pa.compress(text.encode(), "zstd", asbytes=True))

    def pairs(path: Path) -> pd.DataFrame:
        with pa.input_stream(str(path), compression="zstd") as plain:
            read = pd.read_json(io.BytesIO(plain.read()), lines=True)
        return pd.DataFrame({"user": [u["id"] for u in read["user"]], "item": [str(t["id"]) for t in read["track"]]})

    return Source("plays.jsonl.zst", pairs)


def bare(folder: Path, seed: int, inter: Path | None) -> Source:
    """Write offers to customers, in a file without a suffix: a date and a time of day, prices with their currency."""
    del inter
    rng = np.random.default_rng([seed, 7])
    user, item = _drawn(rng, 12_000, 500, 200)
    moment = pd.Timestamp("2026-01-01") + pd.to_timedelta(np.sort(rng.integers(0, 10 * 1_440, len(user))), unit="min")
    price = np.round(rng.gamma(2.0, 9.0, 200) + 1, 2)
    likes = np.where(user % 8 == item % 8, 0.5, 0.12)
    frame = pd.DataFrame(
        {
            "date": moment.strftime("%d.%m.%Y"),
            "time": moment.strftime("%H:%M"),
            "customer": [f"{c:06d}" for c in user],
            "product": [f"P{i:04d}" for i in item],
            "price": [f"{p:.2f} €" for p in price[item]],
            "bought": np.where(rng.random(len(user)) < likes, "yes", "no"),
        }
    )
    frame.to_csv(folder / "offers", index=False, sep="\t")

    def pairs(path: Path) -> pd.DataFrame:
        read = pd.read_csv(path, sep="\t", dtype=str)
        return read[read["bought"] == "yes"].rename(columns={"customer": "user", "product": "item"})[["user", "item"]]

    return Source("offers", pairs)


KINDS: dict[str, Callable[[Path, int, Path | None], Source]] = {
    "recbole": recbole,
    "retail": retail,
    "german": german,
    "nested": nested,
    "dat": dat,
    "libfm": libfm,
    "zst": zst,
    "bare": bare,
}


# --- commands and checks ----------------------------------------------------------------------------------------------


class Terminal:
    """A shell in a folder: runs commands of headrace and notes what they print."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lines = folder, list[str]()

    def headrace(self, *words: str) -> str:
        """Run `headrace WORDS...` and return what it prints.

        Raises:
            RuntimeError: it ends with another code than 0; has the end of what it printed.
        """
        command = [sys.executable, "-m", "headrace.cli", *words]
        done = subprocess.run(
            command, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        self.lines += [f"$ headrace {' '.join(words)}", *_telling(done.stdout), ""]
        if done.returncode:
            raise RuntimeError(f"headrace {' '.join(words)} ended with {done.returncode}:\n{done.stdout[-3_000:]}")
        return done.stdout


def _telling(output: str) -> list[str]:
    """Return the lines of a command's output that say something to a reader."""
    lines = [line.rstrip() for line in output.splitlines()]
    return [line for line in lines if _DULL.search(line) is None]


@dataclass(frozen=True)
class FirstLists:
    """A kind's day: rows of lists, users, rows whose item the user had, seconds."""

    rows: int
    users: int
    had: int
    seconds: float


def first_list(kind: str, folder: Path, seed: int, inter: Path | None, transcripts: Path | None) -> FirstLists:
    """Go from a kind's data to its first published lists.

    Raises:
        Missing: its data are not here.
        RuntimeError: a command fails.
    """
    folder.mkdir(parents=True)
    source = KINDS[kind](folder, seed, inter)
    terminal, started = Terminal(folder), time.perf_counter()
    try:
        printed = terminal.headrace("init", source.path, *source.options)
        # Of the commands that `init` prints at its end, the one that runs the day.
        commands = [line.partition("#")[0].split() for line in printed.splitlines() if line.startswith("  headrace ")]
        run = next(words[1:] for words in commands if words[1] == "run" and "--dry-run" not in words)
        pipeline = run[1]
        terminal.headrace(*run)
        seconds = time.perf_counter() - started
        terminal.headrace("warehouse", "sample", pipeline, "--rows", "5")
        rows = _published(folder, pipeline)
    finally:
        stop = [sys.executable, "-m", "headrace.cli", "warehouse", "stop", "--home", str(folder / "var")]
        subprocess.run(stop, capture_output=True, check=False)
        if transcripts is not None:
            transcripts.mkdir(parents=True, exist_ok=True)
            text = "\n".join(terminal.lines).replace(str(folder), "/data")
            (transcripts / f"{kind}.txt").write_text(text)
            for file in folder.glob("*.yaml"):
                (transcripts / f"{kind}.yaml").write_text(file.read_text().replace(str(folder), "/data"))
    had = source.pairs(folder / source.path).drop_duplicates()
    both = rows.merge(had, on=["user", "item"])
    return FirstLists(len(rows), rows["user"].nunique(), len(both), seconds)


def _published(folder: Path, pipeline: str) -> pd.DataFrame:
    """Return (user, item) as text of all rows in the warehouse."""
    spec = load_spec(folder / pipeline)
    assert spec.score is not None
    user, item = (f'"{key}"' for key in (spec.score.user.key, spec.score.item.key))
    with connect(Warehouse(), Workspace(folder / "var")) as conn:
        pairs = conn.execute(f"SELECT {user}::text, {item}::text FROM {spec.pipeline}_scores").fetchall()
    return pd.DataFrame(pairs, columns=["user", "item"])


def main(words: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description="From eight kinds of data to the first published list, unaided.")
    parser.add_argument("kinds", nargs="*", help=f"which: {', '.join(KINDS)}; default: all")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn (default: %(default)s)")
    parser.add_argument("--recbole", type=Path, help="ml-100k.inter, or the wheel that has it")
    parser.add_argument("--home", type=Path, help="a folder for all that is made; default: one that is removed")
    parser.add_argument("--transcripts", type=Path, help="a folder for the commands and what they print")
    args = parser.parse_args(words)
    if unknown := [kind for kind in args.kinds if kind not in KINDS]:
        parser.error(f"no kind '{unknown[0]}': {', '.join(KINDS)}")
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        home = args.home or Path(scratch)
        print(f"{'data':<8} {'rows':>8} {'users':>7} {'item had':>9} {'seconds':>8}")
        for kind in args.kinds or KINDS:
            try:
                outcome = first_list(kind, home.absolute() / kind, args.seed, args.recbole, args.transcripts)
            except Missing as e:
                print(f"{kind:<8} left out: {e}")
                continue
            except RuntimeError as e:
                print(f"{kind:<8} {e}")
                failed = True
                continue
            failed |= bool(outcome.had) or not outcome.rows or outcome.seconds > LIMIT
            print(
                f"{kind:<8} {outcome.rows:>8,} {outcome.users:>7,} {outcome.had:>9,} {outcome.seconds:>8.0f}",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
