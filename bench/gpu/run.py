"""Figures of one GPU: bare floors, then the embedding step and whole training steps beside them and beside torch's own.

    python bench/gpu/run.py                      # torch and Triton alone; about 5 minutes of an H200
    python bench/gpu/run.py --json gpu.json --batch 65536 --parts floors "step dlrm"
    TRITON_INTERPRET=1 python bench/gpu/run.py --tiny    # no GPU: tiny sizes, only to see that every line runs

Ends with 3 and says so where there is no GPU. Prints a table, and JSON with --json (or a line of it). A part
that fails is a line, and the others go on.

- floors: a copy of memory (bytes read and written), a gather of random rows of the tables (likewise), a bf16 product;
- embedding step: look up 26 rows a sample, sort out duplicates, sum gradients, row-wise Adagrad
  (headrace.embeddings.kernels.gpu). Floor: the bytes of its parts (row read and written out; gradient read; distinct
  rows read and written) at the speed of the gather. Peer: torch.nn.EmbeddingBag, sparse gradients, torch.optim.SGD,
  which has no state;
- step: the whole model, bf16 (or TF32) in its dense part, that part as a CUDA graph, DLRM's interaction in one kernel
  (`plain dlrm`: by torch);
- map, cache: the hash table of ids, and a table in host memory whose hot rows are on the card;
- product: the step as `headrace train` takes it, without its loader (needs pydantic, too).

Rates are millions of samples a second, the median of several batches. MLPerf-like DLRM on one A100: 4.0 (PyTorch), 4.55
(TensorFlow 2); on eight: 14 to 16.5 (NVIDIA's published figures).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
if importlib.util.find_spec("headrace") is None:
    # Not installed here: the package is the folder `python`.
    _spec = importlib.util.spec_from_file_location(
        "headrace", ROOT / "python" / "__init__.py", submodule_search_locations=[str(ROOT / "python")]
    )
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules["headrace"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["headrace"])

from bench.gpu import workloads  # noqa: E402
from bench.gpu.workloads import DIM, MODELS, Clock, IdBatch, Row, batches, cardinalities  # noqa: E402
from headrace.embeddings.kernels import gpu  # noqa: E402

LR = 0.01


class EmbeddingMatrix:
    """All tables, one below the other, with row-wise Adagrad."""

    def __init__(self, sizes: list[int], device: str, dtype: torch.dtype) -> None:
        self.sizes = sizes
        self.weight = torch.empty(sum(sizes), DIM, dtype=dtype, device=device)
        for part in self.weight.split(1_000_000):
            part.uniform_(-0.01, 0.01)
        self.state = torch.zeros(sum(sizes), 1, device=device)

    def look_up(self, addresses: Tensor) -> Tensor:
        """Return vectors float32 [N, DIM]."""
        return gpu.pool_sum(self.weight, addresses, addresses.numel())

    def update(self, addresses: Tensor, grad: Tensor) -> int:
        """Make one step; grad float32 [N, DIM]. Return how many distinct rows there were."""
        values, order = torch.sort(addresses)
        is_first = torch.ones_like(values, dtype=torch.bool)
        torch.ne(values[1:], values[:-1], out=is_first[1:])
        starts = is_first.nonzero().view(-1)
        rows = values.index_select(0, starts)
        gpu.rowwise_adagrad(self.weight, self.state, rows, starts, order, grad, lr=LR)
        return rows.numel()


def floors(clock: Clock, tables: EmbeddingMatrix, batch: int, small: bool) -> dict[str, float]:
    """Measure TB/s of a copy and of a gather of rows, TFLOP/s of a bf16 product."""
    device = clock.device
    source = torch.randn((1 << 20) if small else (1 << 30), device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / clock.seconds(lambda _, a=source, b=target: b.copy_(a))  # type: ignore[misc]
    del source, target
    drawn = batches("uniform", tables.sizes, batch, 4, device)
    n = drawn[0].addresses.numel()
    out = torch.empty(n, DIM, dtype=tables.weight.dtype, device=device)
    gathered = (
        2 * out.nbytes / clock.seconds(lambda i: torch.index_select(tables.weight, 0, drawn[i % 4].addresses, out=out))
    )
    side = 256 if small else 8192
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    product = 2 * side**3 / clock.seconds(lambda _: a @ b)
    return {"copy TB/s": copied / 1e12, "gather TB/s": gathered / 1e12, "bf16 TFLOP/s": product / 1e12}


def embedding_step(clock: Clock, tables: EmbeddingMatrix, drawn: list[IdBatch], gather: float) -> dict[str, float]:
    """Measure seconds of the step, of its floor, and of torch's."""
    n = drawn[0].addresses.numel()
    grad = torch.randn(n, DIM, device=clock.device)
    distinct: list[int] = []

    def step(i: int) -> None:
        addresses = drawn[i % len(drawn)].addresses
        tables.look_up(addresses)
        distinct.append(tables.update(addresses, grad))

    seconds = clock.seconds(step)
    row = DIM * tables.weight.element_size()
    moved = n * (row + 4 * DIM) + n * 4 * DIM + 2 * statistics.median(distinct) * row
    return {"seconds": seconds, "floor": moved / gather, "distinct share": statistics.median(distinct) / n}


def torch_step(clock: Clock, tables: EmbeddingMatrix, drawn: list[IdBatch]) -> float:
    """Measure seconds of torch.nn.EmbeddingBag and SGD over the same matrix (a parameter shares it)."""
    bag = torch.nn.EmbeddingBag.from_pretrained(tables.weight, freeze=False, mode="sum", sparse=True)
    optimizer = torch.optim.SGD(bag.parameters(), lr=LR)
    n = drawn[0].addresses.numel()
    grad = torch.randn(n, DIM, device=clock.device, dtype=tables.weight.dtype)

    def step(i: int) -> None:
        out = bag(drawn[i % len(drawn)].addresses.view(-1, 1))
        out.backward(grad)
        optimizer.step()
        optimizer.zero_grad()

    return clock.seconds(step)


class StepTrainer:
    """A model's whole step. On a GPU the dense part, which has the same shapes each time, is a CUDA graph."""

    def __init__(self, name: str, tables: EmbeddingMatrix, batch: int, device: str, dense: str) -> None:
        self.tables, self.device, self.bf16 = tables, device, dense == "bf16"
        features = len(tables.sizes)
        self.model = MODELS[name](features).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.vectors = torch.zeros(batch * features, DIM, device=device, requires_grad=True)
        self.dense, self.label = torch.zeros(batch, 13, device=device), torch.zeros(batch, 1, device=device)
        self.loss = torch.zeros((), device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        if device == "cuda":
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self._dense_part()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._dense_part()

    def _dense_part(self) -> None:
        """Forward, backward, the dense optimizer: all in the same memory each time."""
        self.optimizer.zero_grad(set_to_none=True)
        self.vectors.grad = None
        with torch.autocast(self.device, torch.bfloat16) if self.bf16 else nullcontext():
            logits = self.model(self.dense, self.vectors.view(self.label.shape[0], -1, DIM))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits.float(), self.label)
        loss.backward()
        self.optimizer.step()
        self.loss.copy_(loss.detach())

    def dense_part(self) -> None:
        """Forward, backward and the dense optimizer, of what was last put in."""
        if self.graph is None:
            self._dense_part()
        else:
            self.graph.replay()

    def step(self, batch: IdBatch) -> None:
        with torch.no_grad():
            self.vectors.copy_(self.tables.look_up(batch.addresses))
        self.dense.copy_(batch.dense)
        self.label.copy_(batch.label)
        self.dense_part()
        assert self.vectors.grad is not None
        self.tables.update(batch.addresses, self.vectors.grad)


def parts(args: argparse.Namespace, device: str) -> Iterator[tuple[str, Callable[[], Iterator[Row]]]]:
    """Yield (name, what makes its figures), one after the other. Tables are made when the first part asks for them."""
    small = args.tiny
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.rows]
    clock = Clock(device, 1, 0) if small else Clock(device, 20, 3)
    batch_sizes = [4] if small else args.batch

    @cache
    def sizes() -> list[int]:
        room = 10_000 if small else int(args.memory * torch.cuda.mem_get_info()[0] / (DIM * dtype.itemsize + 4))
        return cardinalities(room)

    @cache
    def tables() -> EmbeddingMatrix:
        return EmbeddingMatrix(sizes(), device, dtype)

    @cache
    def bare() -> dict[str, float]:
        return floors(clock, tables(), max(batch_sizes), small)

    def floor_rows() -> Iterator[Row]:
        yield {"what": "rows of all tables", "value": sum(tables().sizes), "unit": args.rows}
        yield from ({"what": name, "value": value} for name, value in bare().items())

    def embedding_rows(kind: str, batch: int) -> Iterator[Row]:
        drawn = batches(kind, tables().sizes, batch, 4, device)
        step = embedding_step(clock, tables(), drawn, bare()["gather TB/s"] * 1e12)
        yield {
            "what": f"embedding step, {kind}, {batch}",
            "value": batch / step["seconds"] / 1e6,
            "unit": "M samples/s",
            "of floor": step["floor"] / step["seconds"],
            "distinct": step["distinct share"],
        }
        peer = torch_step(clock, tables(), drawn)
        yield {
            "what": f"torch's EmbeddingBag, {kind}, {batch}",
            "value": batch / peer / 1e6,
            "unit": "M samples/s",
            "of the step above": step["seconds"] / peer,
        }

    def step_rows(name: str, kind: str, batch: int) -> Iterator[Row]:
        drawn = batches(kind, tables().sizes, batch, 4, device)
        trainer = StepTrainer(name, tables(), batch, device, args.dense)
        seconds = clock.seconds(lambda i: trainer.step(drawn[i % len(drawn)]))
        if not torch.isfinite(trainer.loss):
            raise RuntimeError(f"the loss is {float(trainer.loss)}")
        dense = clock.seconds(lambda i: trainer.dense_part())
        yield {
            "what": f"{name} step, {kind}, {batch}",
            "value": batch / seconds / 1e6,
            "unit": "M samples/s",
            "dense share": dense / seconds,
        }

    yield "floors", floor_rows
    for kind in ("uniform", "zipf"):
        for batch in batch_sizes:
            yield f"embedding {kind} {batch}", partial(embedding_rows, kind, batch)
            for name in MODELS:
                yield f"step {name} {kind} {batch}", partial(step_rows, name, kind, batch)
    yield "map", partial(workloads.map_rows, clock, 1 << 8 if small else 1 << 22)
    yield "cache", partial(workloads.cache_rows, clock, *((1_000, 8) if small else (20_000_000, 16_384)))

    def product_rows(kind: str, batch: int) -> Iterator[Row]:
        tables.cache_clear()  # there is no room for both
        if device == "cuda":
            torch.cuda.empty_cache()
        yield from workloads.product_rows(clock, sizes(), kind, batch, args.rows, args.dense)

    sizes()  # of the memory that is free now
    for kind in ("uniform", "zipf"):
        yield f"product {kind} {batch_sizes[-1]}", partial(product_rows, kind, batch_sizes[-1])


def show(row: Row) -> None:
    rest = ", ".join(f"{k} {v:.3g}" for k, v in row.items() if k not in ("what", "value", "unit", "failed"))
    if "failed" in row:
        print(f"{row['what']:36} FAILED: {row['failed']}", flush=True)
    else:
        print(f"{row['what']:36} {row['value']:>14.4g} {row.get('unit', ''):12} {rest}", flush=True)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[16_384, 65_536, 131_072])
    parser.add_argument("--rows", choices=["fp32", "bf16"], default="fp32", help="what a table's numbers are")
    parser.add_argument("--dense", choices=["bf16", "tf32"], default="bf16", help="the dense part's products")
    parser.add_argument("--memory", type=float, default=0.6, help="the tables' share of the card's free memory")
    parser.add_argument(
        "--parts", nargs="+", default=[""], help="those whose names begin so: floors embedding step map cache product"
    )
    parser.add_argument("--json", type=Path, help="written anew after each part")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on a CPU; its figures mean nothing")
    args = parser.parse_args(words)
    if not torch.cuda.is_available() and not args.tiny:
        print("no GPU here: these figures are missing. On a machine with one: python bench/gpu/run.py", file=sys.stderr)
        return 3
    device = "cpu" if args.tiny else "cuda"
    torch.set_float32_matmul_precision("high")
    on = "a rehearsal on a CPU: the figures mean nothing" if args.tiny else torch.cuda.get_device_name()
    print(f"{on}; torch {torch.__version__}, Triton {gpu.triton.__version__}")
    rows: list[Row] = []
    for name, make in parts(args, device):
        if not any(name.startswith(p) for p in args.parts):
            continue
        part_rows: list[Row] = []
        try:
            part_rows.extend(make())
        except Exception as e:  # one that fails must not cost the others' figures
            traceback.print_exc()
            part_rows.append({"what": name, "failed": f"{type(e).__name__}: {e}".splitlines()[0]})
        for row in part_rows:
            show(row)
        rows += part_rows
        if args.json:
            args.json.write_text(json.dumps({"device": on, "torch": torch.__version__, "figures": rows}) + "\n")
    if not args.json:
        print(json.dumps({"device": on, "torch": torch.__version__, "figures": rows}))
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
