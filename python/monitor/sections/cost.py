"""What the stages have used: time, cores, storage, memory."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.manifest import Manifest
from headrace.monitor import facts, plots
from headrace.monitor.blocks import Block, Cell, Plot, Section, Table
from headrace.monitor.sections.day import Day, not_run
from headrace.stages import ORDER

_PROCESSES = {"jvm": "JVM", "python": "Python", "children": "largest child", "rank0": "rank 0", "rank1": "rank 1"}
_MIB = 1 << 20


def cost(day: Day) -> Section:
    """Time, processor time, bytes from and to storage, and peak memory, by stage."""
    done = [m for s in ORDER if (m := day.manifests.get(s)) is not None and s != "report"]
    if not done:
        return Section("cost", "Cost", (not_run("the day"),))
    blocks: list[Block] = [_table(done)]
    blocks.append(
        Plot(plots.value_bars([(m.stage, m.seconds) for m in done], "seconds", "Seconds by stage", unit=" s"), "Time")
    )
    cores = [(m.stage, m.resources.core_seconds) for m in done if m.resources]
    if any(seconds for _, seconds in cores):
        title = "Processor time by stage"
        blocks.append(Plot(plots.value_bars(cores, "core-seconds", title, plots.CEILING, " s"), "Processor time"))
    peaks = [
        (f"{m.stage}: {_PROCESSES.get(p, p)}", v)
        for m in done
        for p, v in facts.numbers(m.peak_memory_mib).items()
        if v >= 1
    ]
    if peaks:
        svg = plots.value_bars(peaks, "MiB", "Peak memory by process", plots.BASELINE, " MiB")
        blocks.append(Plot(svg, "Peak resident memory by process"))
    note = "Bytes are those that went past the page cache: what was read before on the machine is not counted."
    return Section("cost", "Cost", tuple(blocks), note if cores else "")


def _table(done: Sequence[Manifest]) -> Table:
    """A row a stage, and their sum."""
    largest = max((m.resources.core_seconds for m in done if m.resources), default=0.0) or 1.0
    rows: list[tuple[Cell | str, ...]] = []
    for m in done:
        used, peak = m.resources, max(m.peak_memory_mib.values(), default=None)
        told: tuple[Cell | str, ...] = ("–", "–", "–", "–")
        if used is not None:
            busy = used.core_seconds / m.seconds if m.seconds else None
            share = Cell(f"{used.core_seconds:,.1f} s", bar=max(0.0, used.core_seconds / largest))
            read, written = (facts.memory(n / _MIB) for n in (used.read_bytes, used.written_bytes))
            told = (share, facts.decimals(busy, 1), read, written)
        rows.append((m.stage, facts.duration(m.seconds), *told, facts.memory(peak)))
    known = [m.resources for m in done if m.resources]
    if known:
        total = sum(r.core_seconds for r in known)
        both = (
            facts.memory(sum(n) / _MIB) for n in zip(*((r.read_bytes, r.written_bytes) for r in known), strict=True)
        )
        rows.append(("all", facts.duration(sum(m.seconds for m in done)), f"{total:,.1f} s", "", *both, ""))
    headings = ("Stage", ">Time", ">Core-seconds", ">Cores busy", ">Read", ">Written", ">Peak memory of a process")
    return Table(headings, tuple(rows), "What the stages used", wide=True)
