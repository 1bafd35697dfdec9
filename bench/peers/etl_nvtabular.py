"""NVTabular 23.8 on CPUs: the Criteo workflow over the same files. Runs in its own environment (make bench-etl-peers).

    python etl_nvtabular.py OUT SCHEDULER TRAIN_FILES VALID_FILES CATEGORIES COUNTS MIN_COUNT

SCHEDULER: `synchronous`, or the number of worker processes of a dask.distributed cluster. Files and columns are
separated by commas.
Prints {"fit": s, "write": s, "rows": n}; starting the cluster is not counted.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import warnings

warnings.filterwarnings("ignore")


def main(
    out: str, scheduler: str, train_files: str, valid_files: str, categories: str, counts: str, min_count: str
) -> None:
    """Fit on train, transform and write both."""
    import nvtabular as nvt
    from nvtabular import ops

    with contextlib.ExitStack() as stack:
        client = None
        if scheduler != "synchronous":
            from dask.distributed import Client, LocalCluster

            cluster = stack.enter_context(
                LocalCluster(n_workers=int(scheduler), threads_per_worker=1, processes=True, dashboard_address=None)
            )
            client = stack.enter_context(Client(cluster))
        # freq_threshold is the least count that gets a code of its own, as min_count.
        codes = categories.split(",") >> ops.Categorify(freq_threshold=int(min_count), out_path=f"{out}/categories")
        features, label = codes, ["label"]
        if counts:
            numbers = counts.split(",") >> ops.FillMissing() >> ops.Clip(min_value=0) >> ops.LogOp() >> ops.Normalize()
            features = codes + numbers
        kwargs = {} if client is None else {"client": client}
        workflow = nvt.Workflow(features + label, **kwargs)
        datasets = {
            "train": nvt.Dataset(train_files.split(","), engine="parquet", cpu=True, part_size="64MB"),
            "valid": nvt.Dataset(valid_files.split(","), engine="parquet", cpu=True, part_size="64MB"),
        }
        tick = time.perf_counter()
        workflow.fit(datasets["train"])
        fitted = time.perf_counter()
        for split, dataset in datasets.items():
            workflow.transform(dataset).to_parquet(f"{out}/{split}")
        done = time.perf_counter()
        rows = sum(d.num_rows for d in datasets.values())
    print(json.dumps({"fit": fitted - tick, "write": done - fitted, "rows": rows}))


if __name__ == "__main__":
    main(*sys.argv[1:])
