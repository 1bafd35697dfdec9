"""`python -m bench.export_parity`: exports beside the models that they are of, by class, format and precision."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.export_parity.cases import CASES
from bench.export_parity.table import PRECISIONS, markdown, measure


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.export_parity", description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(CASES), help="Models, by the names of the table.")
    parser.add_argument("--formats", nargs="*", default=["onnx", "torch"], choices=["onnx", "torch"])
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory(prefix="export-parity-") as scratch:
        for number, name in enumerate(args.only):
            rows.append(measure(name, args.formats, Path(scratch) / str(number)))
    print(markdown(rows, args.formats, PRECISIONS))


if __name__ == "__main__":
    main()
