"""Loads a registered model as a program does that knows MLflow and headrace's wheel; run by test_registry_server.py."""

from __future__ import annotations

import json
import sys

import mlflow.pyfunc
import numpy as np
import pandas as pd

import headrace

uri, rows = sys.argv[1], pd.read_json(sys.stdin, orient="split", dtype=False)
scores = mlflow.pyfunc.load_model(uri).predict(rows)
print(json.dumps({"headrace": headrace.__file__, "dtype": str(np.asarray(scores).dtype), "scores": scores.tolist()}))
