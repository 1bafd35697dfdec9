"""Graphs of a network, traced by torch's exporter."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import UserError
from headrace.export.network import Argument, ExportedNetwork, NetworkGraphs

#: Of the batch by which a network is traced: not 0 and not 1, which torch takes for constants.
_TRACED_ROWS = 3


def traced(module: nn.Module, arguments: Sequence[Argument], kind: str) -> torch.export.ExportedProgram:
    """Trace a module of tensors as a program of torch.

    Args:
        module: in evaluation mode.
        arguments: of its `forward`, in order.
        kind: the model's class, for the message.

    Raises:
        UserError: torch's exporter cannot trace it; says where.
    """
    sizes: dict[str, Any] = {}
    examples, shapes = [], []
    for a in arguments:
        examples.append(_example(a, sizes))
        shapes.append({i: sizes[n][1] for i, n in enumerate(a.shape) if isinstance(n, str)})
    try:
        with _quiet(), torch.no_grad():
            return torch.export.export(module, tuple(examples), dynamic_shapes=(tuple(shapes),), strict=False)
    except Exception as e:  # torch has many kinds, and a class of the user's its own
        raise _refused(kind, e) from e


def traced_onnx(exported: ExportedNetwork) -> Any:
    """All graphs of a network as one ONNX model (`onnx.ModelProto`), inputs and outputs by their names.

    Raises:
        UserError: torch's exporter cannot trace it, or has no ONNX operator for what it does; says where.
    """
    kind = exported.model.config.kind
    program = traced(NetworkGraphs(exported, exported.graphs).eval(), exported.arguments, kind)
    outputs = [name for graph in exported.graphs for name in exported.outputs(graph)]
    try:
        with _quiet():
            made = torch.onnx.export(
                program,
                dynamo=True,
                input_names=[a.name for a in exported.arguments],
                output_names=outputs,
                verbose=False,
            )
    except (torch.onnx.errors.OnnxExporterError, RuntimeError) as e:
        raise _refused(kind, e) from e
    assert made is not None
    return made.model_proto


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's messages about missing libraries and untraceable code: the error has the latter."""
    with warnings.catch_warnings(), torch.inference_mode(False), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr):
            stack.enter_context(redirect(io.StringIO()))
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)
        stack.callback(logging.disable, before)
        yield


def _example(a: Argument, sizes: dict[str, Any]) -> Tensor:
    """Return an example tensor of an argument's shape; dimensions that vary get sizes and names of torch's."""
    shape = []
    for n in a.shape:
        if isinstance(n, str):
            if n not in sizes:  # sizes that are alike would be taken for one
                sizes[n] = _TRACED_ROWS + 2 * len(sizes), torch.export.Dim(f"size_{len(sizes)}")
            n = sizes[n][0]
        shape.append(n)
    return torch.zeros(*shape, dtype=a.dtype)


def _refused(kind: str, e: Exception) -> UserError:
    first = next((line.strip() for line in str(e).splitlines() if line.strip()), type(e).__name__)
    return UserError(f"the model's class '{kind}' cannot be exported: {first}")
