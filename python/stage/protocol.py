"""The protocol of stages: plan, run, commit. Stages never import each other; they exchange data on disk."""

from __future__ import annotations

import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel, ValidationError

from headrace.config import Spec
from headrace.config.schema import DatasetSchema
from headrace.config.stages import ORDER, STAGES, StageEntry
from headrace.config.workspace import Workspace
from headrace.errors import BusyError, UserError
from headrace.plugins import Seam, faults_of
from headrace.stage.manifest import Input, Manifest, Output, fingerprint
from headrace.storage import Fence, Lease
from headrace.storage.lease import Held, Holder
from headrace.storage.local_store import sync_seconds


@dataclass(frozen=True)
class Context:
    """Arguments of a stage's run; `upstream` has the manifests of the stages in its `needs`."""

    spec: Spec
    ws: Workspace
    ds: str
    upstream: Mapping[str, Manifest] = field(default_factory=dict)
    #: Key of this run. It is computed before the work, and names the temporary and final folders.
    key: str = ""
    #: Pinned inputs from which the key was computed, upstream stages included. `run` and `verify` read these versions,
    #: never newer ones, which the manifest would not name.
    inputs: tuple[Input, ...] = ()
    #: Start of the stage's turn (seconds since 1970) in a process that ran other stages before; None: the first stage.
    turn_start: float | None = None
    #: The pipeline's lock, if this process holds it.
    lock: RunLock | None = None
    #: Whether to register a trained model; False for models that are only compared with the day's model.
    registers: bool = True

    @property
    def fence(self) -> Fence | None:
        """Fencing token for commits: tables then refuse an earlier holder's commits. None without a lock."""
        return None if self.lock is None else self.lock.fence

    def check_lease(self) -> None:
        """Check the leases before a step that carries no token. Raises LeaseLost if another process holds one."""
        if self.lock is not None:
            self.lock.check()


@dataclass(frozen=True)
class Result:
    """Result of a stage's work, from which its manifest is made."""

    outputs: tuple[Output, ...] = ()
    rows: Mapping[str, int] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    dataset_schema: DatasetSchema | None = None
    #: Peak memory, in MiB, of processes that this one cannot measure (ranks); added to the manifest's.
    peak_memory_mib: Mapping[str, float] = field(default_factory=dict)
    #: Processor seconds of such processes, summed.
    core_seconds: float = 0.0


#: Entry of `Stage.needs` for all stages of other packages in the pipeline; their manifests may be missing.
PACKAGE_NEEDS = "*?"


class Stage(Protocol):
    """One step of the day.

    Implementations are stateless. Headrace's own are listed in `headrace.config.stages`; a package's extend
    `PackageStage`.
    """

    name: str
    #: Increase it when the meaning of the output changes: runs that older code has finished are then repeated.
    version: int

    @property
    def needs(self) -> tuple[str, ...]:
        """Stages whose manifests (same pipeline, same ds) must exist; one like `"x?"` may be missing (`needs_of`)."""
        ...

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """Return the part of the spec that changes the output (not ranks, memory or progress)."""
        ...

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """Pin the inputs besides the upstream stages; cheap. Raises UserError where an input is missing."""
        ...

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """Return the reason why a finished run is no longer valid (an output is missing or damaged), or None."""
        ...

    def run(self, ctx: Context) -> Result:
        """Do the work on `ctx.inputs`. May be killed anywhere; running it again heals."""
        ...


class PackageStage(ABC):
    """Base class of a stage that another package adds to the day of the pipelines that name it.

    A pipeline names it in its section `stages`: by an entry point of the group `headrace.stages`, or as `module:Class`.
    It runs after the stages of `needs`. The first line of its docstring is its description. Import Spark and other
    large libraries in `run`, since checks of a spec import the class.
    """

    #: The module from which packages import it, for error messages.
    __module__ = "headrace.stage"

    #: See `Stage`.
    version: int = 1
    #: Whether it opens a Spark session (`headrace.lake.spark.session.session`).
    spark: ClassVar[bool] = False
    #: Hours after which Airflow ends it.
    hours: ClassVar[float] = 2
    #: Patterns of its outputs, as in `StageEntry.writes`; a dry run shows them. `headrace gc` removes files that they
    #: match and no manifest names.
    writes: ClassVar[tuple[str, ...]] = ()
    #: Number of days whose outputs `headrace gc` keeps unless the pipeline sets another; None: all days.
    keep_days: ClassVar[int | None] = None
    #: Pydantic model of `stages.NAME.args`; None: any mapping, which `__init__` checks.
    Args: ClassVar[type[BaseModel] | None] = None

    def __init__(self, name: str, args: Any) -> None:
        """Take the settings.

        Args:
            name: the stage's name in the pipeline and in manifests.
            args: an instance of `Args`, or a mapping where the class has none.

        Raises:
            ValueError: `args` are not valid.
        """
        self.name, self.args = name, args

    @property
    @abstractmethod
    def needs(self) -> tuple[str, ...]:
        """See `Stage.needs`; at least one. A class attribute suffices."""

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """Return the part of the spec that changes the output; here the stage's own `args`."""
        return {"args": self.args.model_dump(mode="json") if isinstance(self.args, BaseModel) else self.args}

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """Return the pinned inputs besides the upstream stages; here none."""
        return ()

    @abstractmethod
    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """See `Stage.verify`."""

    @abstractmethod
    def run(self, ctx: Context) -> Result:
        """See `Stage.run`."""


#: Finder of the classes that `stages.NAME` of a spec names.
PACKAGE_STAGES: Seam[PackageStage] = Seam("headrace.stages", "stage", PackageStage, {})  # type: ignore[type-abstract]


def package_stage(spec: Spec, name: str) -> PackageStage:
    """Create the stage that a pipeline has under a name of its section `stages`.

    Raises:
        UserError: its class cannot be imported, extends something else, lacks a method, or refuses the settings.
    """
    settings, key = spec.stages[name], f"stages.{name}"
    kind = PACKAGE_STAGES.find(settings.kind or name, key)
    reference = f"'{kind.__module__}:{kind.__qualname__}'"
    if missing_methods := sorted(kind.__abstractmethods__):
        raise UserError(f"{key}: {reference} is no stage: it lacks {', '.join(missing_methods)}")
    try:
        stage = kind(name, dict(settings.args) if kind.Args is None else kind.Args.model_validate(dict(settings.args)))
    except ValidationError as e:
        raise UserError(f"{key}.args: {faults_of(kind.Args or BaseModel, e)}") from None
    except ValueError as e:
        raise UserError(f"{key}.args: {e}") from None
    needs = [need.rstrip("?") for need in stage.needs]
    known = [*ORDER[:-1], *(n for n in spec.stages if n != name)]
    if not needs or (unknown := [need for need in needs if need not in known]):
        fault = f"needs '{unknown[0]}', which is no stage before it" if needs else "needs no stage"
        raise UserError(f"{key}: {reference} {fault}: name some of {', '.join(known)}")
    return stage


def stage_entries(spec: Spec) -> dict[str, StageEntry]:
    """Return the stages that a day of a pipeline has, in order: headrace's own and those of other packages.

    Raises:
        UserError: a stage of a package is not valid (`package_stage`), needs a stage that the pipeline does not have,
            or two of them need each other.
    """
    entries = {name: STAGES[name] for name in ORDER if STAGES[name].applies(spec)}
    pending = {name: package_stage(spec, name) for name in spec.stages}
    while pending:
        ready = (n for n, s in pending.items() if not pending.keys() & {need.rstrip("?") for need in s.needs})
        if (name := next(ready, None)) is None:
            raise UserError(f"stages: {' and '.join(pending)} need each other")
        stage = pending.pop(name)
        if missing := [need for need in stage.needs if not need.endswith("?") and need not in entries]:
            raise UserError(f"stages.{name} needs '{missing[0]}', and pipeline '{spec.pipeline}' has no such stage")
        order = list(entries)
        position = _position(order, stage.needs, spec)
        entry = StageEntry(
            name,
            help=(inspect.getdoc(type(stage)) or name).splitlines()[0],
            implementation="",
            dag=entries[order[max(position, 1) - 1]].dag,
            spark=stage.spark,
            hours=stage.hours,
            writes=stage.writes,
        )
        entries = {n: entry if n == name else entries[n] for n in (*order[:position], name, *order[position:])}
    return entries


def _position(order: Sequence[str], needs: Sequence[str], spec: Spec) -> int:
    """Return where a package's stage with these needs is inserted among the stages of a pipeline."""

    def position_after(need: str) -> int:
        if need in order:
            return order.index(need) + 1
        earlier = ORDER[: ORDER.index(need)] if need in ORDER else ()
        return max((k for k, name in enumerate(order, 1) if name in earlier), default=0)

    def must_stay_adjacent(first: str, second: str) -> bool:
        # Airflow skips the stage right after `gate`; stages with leases of their own run at the same time.
        leases = [STAGES[name].lease for name in (first, second) if name in STAGES]
        return (first, second) == ("gate", "promote") or (len(leases) == 2 and None not in leases)

    position = max(position_after(need.rstrip("?")) for need in needs)
    while 0 < position < len(order) and (
        order[position] in spec.stages or must_stay_adjacent(order[position - 1], order[position])
    ):
        position += 1
    return position


def stage_order(spec: Spec) -> tuple[str, ...]:
    """Return the names of all stages of a day in order: `ORDER` and those of other packages.

    Raises:
        UserError: as `stage_entries`.
    """
    order = list(stage_entries(spec))
    for k, name in enumerate(ORDER):
        if name not in order:
            order.insert(order.index(ORDER[k - 1]) + 1 if k else 0, name)
    return tuple(order)


def stage_entry(spec: Spec, name: str) -> StageEntry:
    """Return the description of a stage, headrace's own or a package's.

    Raises:
        UserError: the pipeline has no such stage.
    """
    if name in STAGES:
        return STAGES[name]
    if name not in spec.stages:
        raise UserError(f"no stage '{name}'; stages, in order: {', '.join((*ORDER, *spec.stages))}")
    return stage_entries(spec)[name]


@dataclass(frozen=True)
class Outcome:
    """Outcome of `run_stage`: the manifest, and the reason why the stage ran or was skipped."""

    manifest: Manifest
    skipped: bool
    reason: str


def run_stage(
    stage: Stage,
    spec: Spec,
    ws: Workspace,
    ds: str,
    announce: Callable[[RunPlan], None] = lambda plan: None,
    turn_start: float | None = None,
) -> Outcome:
    """Run one stage for one day, unless its result exists and is valid.

    Args:
        stage: the stage.
        spec: the pipeline.
        ws: the workspace.
        ds: the day.
        announce: called with the plan before the work, even if there is nothing to do.
        turn_start: see Context.

    Raises:
        UserError: an upstream stage or an input is missing, or (BusyError) another run of this pipeline holds the
            lock.
    """
    entry = STAGES.get(stage.name)
    lease = entry.lease if entry is not None else None
    with run_lock(ws, spec.pipeline, lease) as lock:
        if lease is None:  # otherwise another stage may be writing its manifest there
            ws.manifest(spec.pipeline, ds, stage.name).parent.discard_unfinished()
        plan = plan_run(stage, spec, ws, ds)
        announce(plan)
        if plan.reason is None:
            assert plan.manifest is not None
            return Outcome(plan.manifest, skipped=True, reason="already done with the same inputs")
        synced_before = sync_seconds()
        manifest = execute(stage, replace(plan, ctx=replace(plan.ctx, turn_start=turn_start, lock=lock)))
        lock.check()
        # Outputs must be on disk before the manifest that names them, and Spark and other libraries do not fsync.
        ws.sync()
        manifest = manifest.model_copy(update={"sync_seconds": round(sync_seconds() - synced_before, 3)})
        saved = manifest.save(ws.manifest(spec.pipeline, ds, stage.name), lock.fences)
        return Outcome(saved, skipped=False, reason=plan.reason)


def execute(stage: Stage, plan: RunPlan) -> Manifest:
    """Run a stage's plan, even if a result exists, and return its manifest, which the caller saves."""
    from headrace.stage.resources import PeakMemory, ResourceUse

    started, start_seconds, peak = datetime.now(UTC), time.perf_counter(), PeakMemory.begin()
    use = ResourceUse.begin()
    try:
        result = stage.run(plan.ctx)
    except UserError as e:
        removals = [(name, m.why_removed) for name, m in plan.ctx.upstream.items() if m.removed]
        if not removals or type(e) is not UserError:
            raise
        command = f"headrace run {plan.ctx.spec.argument} --ds {plan.ctx.ds} --from {removals[0][0]}"
        raise UserError(f"{e}. {'; '.join(str(reason) for _, reason in removals)}. To make it again: {command}") from e
    return Manifest(
        stage=stage.name,
        pipeline=plan.ctx.spec.pipeline,
        ds=plan.ctx.ds,
        key=plan.ctx.key,
        spec_hash=plan.spec_hash,
        inputs=plan.inputs,
        outputs=result.outputs,
        rows=dict(result.rows),
        facts=dict(result.facts),
        dataset_schema=result.dataset_schema,
        started=started,
        seconds=round(time.perf_counter() - start_seconds, 3),
        peak_memory_mib={**peak.mib(), **result.peak_memory_mib},
        resources=use.used(result.core_seconds),
    )


def check_stage(stage: Stage, spec: Spec, ws: Workspace, ds: str, verify: bool = True) -> str | None:
    """Return the reason why `run_stage` would run the stage now, or None. Changes nothing and takes no lock.

    Without `verify` the outputs are not examined: only the manifest's existence and its key are checked.

    Raises:
        UserError: as `run_stage` would, but for the lock.
    """
    return plan_run(stage, spec, ws, ds, verify).reason


@dataclass(frozen=True)
class RunPlan:
    """Plan of a run: the context with its key, the pinned inputs, and the existing manifest."""

    ctx: Context
    inputs: tuple[Input, ...]
    spec_hash: str
    manifest: Manifest | None
    #: The reason to run the stage; None where there is nothing to do.
    reason: str | None


def plan_run(stage: Stage, spec: Spec, ws: Workspace, ds: str, verify: bool = True) -> RunPlan:
    """Plan what `run_stage` would do now. Changes nothing and takes no lock; `verify`: see `check_stage`.

    Raises:
        UserError: as `run_stage` would, but for the lock.
    """
    upstream = _upstream(stage, spec, ws, ds)
    ctx = Context(spec=spec, ws=ws, ds=ds, upstream=upstream)
    inputs = (
        *(Input(kind="stage", name=name, version=identity(m)) for name, m in sorted(upstream.items())),
        *stage.inputs(ctx),
    )
    spec_hash = fingerprint(stage.spec_part(spec))
    key = fingerprint(
        {
            "stage": stage.name,
            "version": stage.version,
            "ds": ds,
            "pipeline": spec.pipeline,
            "spec": spec_hash,
            "inputs": [i.model_dump() for i in inputs],
        }
    )
    ctx = replace(ctx, key=key, inputs=inputs)
    manifest = Manifest.load(ws.manifest(spec.pipeline, ds, stage.name))
    return RunPlan(ctx, inputs, spec_hash, manifest, _reason_to_run(stage, ctx, manifest, verify))


def identity(manifest: Manifest) -> str:
    """Return the version of a stage's result: a fingerprint of its key and its outputs' versions, new with new data."""
    return fingerprint({"key": manifest.key, "outputs": [o.model_dump() for o in manifest.outputs]})


def needs_of(stage: Stage, spec: Spec) -> tuple[str, ...]:
    """Return a stage's needs in a pipeline, with the stages of other packages in the place of `PACKAGE_NEEDS`."""
    packages = [f"{name}?" for name in spec.stages]
    return tuple(need for part in stage.needs for need in (packages if part == PACKAGE_NEEDS else [part]))


def _upstream(stage: Stage, spec: Spec, ws: Workspace, ds: str) -> dict[str, Manifest]:
    manifests: dict[str, Manifest] = {}
    for need in needs_of(stage, spec):
        name = need.rstrip("?")
        manifest = Manifest.load(ws.manifest(spec.pipeline, ds, name))
        if manifest is not None:
            manifests[name] = manifest
        elif not need.endswith("?"):
            raise UserError(
                f"stage '{stage.name}' of '{spec.pipeline}' for {ds} needs stage '{name}', which has not finished. "
                f"Run: headrace run {spec.argument} --ds {ds} --from {name} --to {stage.name}"
            )
    return manifests


def _reason_to_run(stage: Stage, ctx: Context, manifest: Manifest | None, verify: bool) -> str | None:
    if manifest is None:
        return "not yet run for this date"
    if manifest.key != ctx.key:
        return "its inputs or its part of the spec have changed"
    if manifest.removed:
        return manifest.why_removed
    return stage.verify(ctx, manifest) if verify else None


@dataclass(frozen=True)
class RunLock:
    """Leases of a pipeline that this process holds."""

    leases: tuple[Lease, ...]

    @property
    def fence(self) -> Fence:
        """Fencing token for commits to tables: that of the pipeline's lease, or of the stage's."""
        return self.leases[0].fence

    @property
    def fences(self) -> tuple[Fence, ...]:
        """Fencing tokens of all leases, for manifests."""
        return tuple(lease.fence for lease in self.leases)

    def check(self) -> None:
        """Call `Lease.check` of each lease."""
        for lease in self.leases:
            lease.check()

    def check_again(self) -> None:
        """Call `Lease.check_again` of each lease."""
        for lease in self.leases:
            lease.check_again()


@contextmanager
def run_lock(ws: Workspace, pipeline: str, lease: str | None = None) -> Iterator[RunLock]:
    """Lock a pipeline for one writer; the lock ends with its holder's process.

    A stage with a lease of its own takes only that lease; all others take every lease of the pipeline. So two stages
    with different leases can run at the same time, but no other stage beside them.

    Args:
        ws: the workspace.
        pipeline: the pipeline.
        lease: one of `headrace.config.stages.LEASES`; None: all of them, and the pipeline's.

    Raises:
        BusyError: another process holds one of them.
    """
    with ExitStack() as stack:
        try:
            leases = [stack.enter_context(file.lease()) for file in ws.locks(pipeline, lease)]
        except Held as e:
            raise _busy(pipeline, e.holder) from None
        yield RunLock(tuple(leases))


def check_lock(ws: Workspace, pipeline: str, lease: str | None = None) -> None:
    """Check that `run_lock` could be taken now. Takes no lease: the caller still has to take it.

    Raises:
        BusyError: another process holds one of the leases.
    """
    for file in ws.locks(pipeline, lease):
        if (holder := file.holder()) is not None:
            raise _busy(pipeline, holder)


def _busy(pipeline: str, holder: Holder) -> BusyError:
    return BusyError(f"another run of pipeline '{pipeline}' is at work ({holder}); wait for it or stop it")
