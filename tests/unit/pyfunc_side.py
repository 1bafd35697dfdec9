"""Loading of a registered model by a program that knows MLflow alone; test_registry_server.py runs it."""

from __future__ import annotations

import json
import sys

import mlflow.pyfunc
import numpy as np
import pandas as pd

uri, rows = sys.argv[1], pd.read_json(sys.stdin, orient="split", dtype=False)
was_imported = "headrace" in sys.modules
scores = mlflow.pyfunc.load_model(uri).predict(rows)

# It came with the model.
import headrace  # noqa: E402
from headrace.compute import native  # noqa: E402
from headrace.score.top_k import RETRIEVAL  # noqa: E402

report = {
    "headrace": headrace.__file__,
    "before": was_imported,
    "native": native.library() is not None,
    # Of no use to this model; loaded as well, from the best level that the processor has.
    "level": RETRIEVAL.path().parent.name,
    "dtype": str(np.asarray(scores).dtype),
    "scores": scores.tolist(),
}
print(json.dumps(report))
