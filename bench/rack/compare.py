"""On a host: whether two days are equal. `python -m bench.rack.compare ONE OTHER DS [STAGE]`.

ONE and OTHER are a folder, that of a `--home`, or the URI below which lake and store are.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from headrace.config.stages import ORDER
from headrace.config.workspace import Workspace
from scripts.store_day import digests, manifests, rows_of

#: Where a model or a dataset keeps its rows and weights; what stands beside them names places and times.
_DATA = (".parquet", ".safetensors", ".arrow")


def main(first_place: str, second_place: str, ds: str, last: str = ORDER[-1]) -> None:
    """Compare events, datasets, weights, scores and how many were published, as far as the first day went.

    Args:
        first_place: see the module.
        second_place: the same.
        ds: the day.
        last: nothing is compared that a stage behind it has made.

    Raises:
        SystemExit: they differ.
    """
    a, b = _workspace(first_place), _workspace(second_place)
    compared = ORDER[: ORDER.index(last) + 1]
    first, second = ({s: m for s, m in manifests(ws, ds).items() if s in compared} for ws in (a, b))
    faults = [f"stage {stage}" for stage in first if stage not in second]
    print(", ".join(f"{s} {first[s].seconds:.0f} s and {second[s].seconds:.0f} s" for s in first if s in second))
    for stage, kind in (("features", "dataset"), ("train", "model")):
        if stage in first and stage in second:
            first_digests, second_digests = (
                digests(ws.locate(by_stage[stage].output(kind).name)) for ws, by_stage in ((a, first), (b, second))
            )
            data = {name for name in first_digests if name.endswith(_DATA)}
            differ = sorted(name for name in data if first_digests[name] != second_digests.get(name))
            differ += sorted({name for name in second_digests if name.endswith(_DATA)} - data)
            print(f"{kind}: {len(data)} files of data, {len(differ)} differ")
            faults += differ or ([] if data else [f"no data in the {kind}"])
    for stage, table in (("ingest", "events"), ("score", "scores")):
        if stage in first and stage in second:
            first_rows, second_rows = rows_of(table, a, ds), rows_of(table, b, ds)
            equal = first_rows.num_rows > 0 and first_rows.equals(second_rows)
            print(f"{table}: {first_rows.num_rows:,} rows, {'equal' if equal else 'they differ'}")
            faults += [] if equal else [table]
    if "publish" in first and "publish" in second:
        counts = [by_stage["publish"].rows for by_stage in (first, second)]
        print(f"rows in the warehouse: {counts[0]['published']:,} and {counts[1]['published']:,}")
        faults += [] if counts[0] == counts[1] else ["rows in the warehouse"]
    if faults:
        raise SystemExit(f"the days differ: {', '.join(faults[:10])}")


def _workspace(root: str) -> Workspace:
    if "://" not in root:
        return Workspace(Path(root))
    return Workspace(Path.home(), f"{root}/lake", f"{root}/store", os.environ["HEADRACE_SCRATCH"])


if __name__ == "__main__":
    main(*sys.argv[1:])
