"""On a host: whether the day over the rack is that of one machine. `python -m bench.rack.compare ONE OTHER DS`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from headrace.workspace import Workspace
from scripts.store_day import digests, manifests, scores

#: Where a model or a dataset keeps its rows and weights; what stands beside them names places and times.
_DATA = (".parquet", ".safetensors", ".arrow")


def main(one: str, other: str, ds: str) -> None:
    """Compare datasets, weights and scores, as far as the first day went.

    Raises:
        SystemExit: they differ.
    """
    a, b = Workspace(Path(one)), Workspace.at(Path(other), os.environ)
    first, second = manifests(a, ds), manifests(b, ds)
    faults = [f"stage {stage}" for stage in first if stage not in second]
    print(", ".join(f"{s} {first[s].seconds:.0f} s and {second[s].seconds:.0f} s" for s in first if s in second))
    for stage, kind in (("features", "dataset"), ("train", "model")):
        if stage in first and stage in second:
            mine, theirs = (
                digests(ws.locate(found[stage].output(kind).name)) for ws, found in ((a, first), (b, second))
            )
            data = {name for name in mine if name.endswith(_DATA)}
            differ = sorted(name for name in data if mine[name] != theirs.get(name))
            differ += sorted({name for name in theirs if name.endswith(_DATA)} - data)
            print(f"{kind}: {len(data)} files of data, {len(differ)} differ")
            faults += differ or ([] if data else [f"no data in the {kind}"])
    if "score" in first and "score" in second:
        here, there = scores(a, ds), scores(b, ds)
        equal = here.num_rows > 0 and here.equals(there)
        print(f"scores: {here.num_rows:,} rows, {'equal' if equal else 'they differ'}")
        faults += [] if equal else ["scores"]
    if faults:
        raise SystemExit(f"the days differ: {', '.join(faults[:10])}")


if __name__ == "__main__":
    main(*sys.argv[1:])
