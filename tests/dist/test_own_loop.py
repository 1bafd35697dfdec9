"""A Horovod loop of a user's own, with torch's embedding bags replaced, against plain torch in one process."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from headrace.config.installation import checkout

EXAMPLES = checkout() / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain_model() -> Any:
    torch.manual_seed(1)
    return example("plain_loop").Model()


def own_rank() -> dict[str, Any]:
    """examples/own_loop.py on this rank, from the plain model's start."""
    import horovod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    try:
        module, start = example("own_loop"), plain_model()
        model = module.Model()
        model.top.load_state_dict(start.top.state_dict())
        for name, bag in start.tables.items():
            model.tables.set_table(name, bag.weight)
        rows = sum(len(w) for w in model.tables.embeddings.weights)
        losses = module.train(model)
        tables = {name: model.tables.table(name).numpy() for name in module.TABLES}
        return {"losses": losses, "tables": tables, "rows": rows, "top": [p.tolist() for p in model.top.parameters()]}
    finally:
        hvd.shutdown()


def test_two_ranks_equal_plain_torch() -> None:
    import horovod

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks cannot import this file by name
    ranks = horovod.run(own_rank, num_proc=2, use_gloo=True, executable=sys.executable)

    plain, model, losses = example("plain_loop"), plain_model(), []
    start = {name: bag.weight.detach().clone() for name, bag in model.tables.items()}
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for features, labels in plain.batches(0, 1):
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(model(features), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    assert sum(r["rows"] for r in ranks) == sum(plain.TABLES.values())  # no rank holds all of them
    for report in ranks:
        np.testing.assert_allclose(report["losses"], losses, rtol=1e-5)
        for name, table in report["tables"].items():
            expected = model.tables[name].weight.detach().numpy()
            np.testing.assert_allclose(table, expected, rtol=1e-3, atol=2e-5, err_msg=name)
            assert not np.allclose(table, start[name].numpy(), atol=1e-3)
        for actual, expected in zip(report["top"], model.top.parameters(), strict=True):
            np.testing.assert_allclose(actual, expected.detach().numpy(), rtol=1e-3, atol=2e-5)


def test_it_takes_at_most_ten_changed_lines() -> None:
    def code(path: Path) -> list[str]:
        text = path.read_text(encoding="utf-8")
        return [line for line in text[text.index("import ") :].splitlines() if line]

    changes = difflib.unified_diff(*(code(EXAMPLES / f"{n}_loop.py") for n in ("plain", "own")), n=0, lineterm="")
    added = [line for line in changes if line.startswith("+") and not line.startswith("+++")]
    assert 1 <= len(added) <= 10, added
