"""A GPU that is pretended, to find what would fail on a real one: tensors that say they are elsewhere.

    with pretend():
        x = torch.zeros(3, device=ELSEWHERE)        # a Tensor of host memory in a wrapper
        x + torch.ones(3)                           # raises, as on a GPU
        x.cpu() + torch.ones(3)

"Elsewhere" is torch's device `meta`: autograd works on it in the calling thread, and nothing else here uses it. Kernels
and C++ loops, which take addresses, cannot take such a tensor by accident: it has none.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

ELSEWHERE = torch.device("meta")
#: May have tensors of two places: copies.
_CARRIERS = ("aten::copy_", "aten::_to_copy")


class Elsewhere(Tensor):
    """See the module."""

    @staticmethod
    def __new__(cls, inside: Tensor) -> Elsewhere:
        tensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inside.shape,
            strides=inside.stride(),
            storage_offset=inside.storage_offset(),
            dtype=inside.dtype,
            device=ELSEWHERE,
        )
        tensor.inside = inside
        return tensor

    def __repr__(self) -> str:
        return f"Elsewhere({self.inside!r})"  # type: ignore[attr-defined]

    def tolist(self) -> Any:
        return self.inside.tolist()  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def unwrap(x: Any) -> Any:
    return x.inside if isinstance(x, Elsewhere) else x


def wrap(x: Any) -> Any:
    return Elsewhere(x) if isinstance(x, Tensor) and not isinstance(x, Elsewhere) else x


def _run(func, args, kwargs):
    leaves, _ = tree_flatten((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    on_device = [x for x in tensors if isinstance(x, Elsewhere)]
    name = func._schema.name
    if on_device and name not in _CARRIERS:
        on_host = [x for x in tensors if not isinstance(x, Elsewhere) and x.dim()]
        if on_host:
            raise RuntimeError(f"{name}: tensors on two devices: {[tuple(x.shape) for x in on_host]} are on the host")
    device = kwargs.get("device")
    to_device = bool(on_device) if device is None else torch.device(device) == ELSEWHERE
    if device is not None and to_device:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if name == "aten::copy_":
        to_device = isinstance(args[0], Elsewhere)
    out = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
    if func._schema.is_mutable:  # what is changed in place is returned as the tensor that was given
        originals = {id(unwrap(x)): x for x in on_device}
        return tree_map(lambda x: originals.get(id(x), x) if isinstance(x, Tensor) else x, out)
    if name == "aten::_to_copy" and out is unwrap(args[0]):
        out = out.clone()
    return tree_map(wrap, out) if to_device else out


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Constructors(TorchFunctionMode):
    """`torch.tensor` makes its tensor where no operation is seen."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        options = kwargs or {}
        if func is torch.tensor and options.get("device") is not None and torch.device(options["device"]) == ELSEWHERE:
            return wrap(torch.tensor(*args, **{**options, "device": "cpu"}))
        return func(*args, **options)


@contextmanager
def pretend() -> Iterator[None]:
    """See the module. A thread's own."""
    with _Operations(), _Constructors():
        yield
