"""The protocol that every stage follows: plan, run, commit. Stages never import each other; they meet on disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Protocol

from headrace.config import Spec
from headrace.errors import BusyError, UserError
from headrace.manifest import Input, Manifest, Output, fingerprint
from headrace.memory import PeakMemory
from headrace.resources import ResourceUse
from headrace.schema import DatasetSchema
from headrace.stages import STAGES
from headrace.storage import Fence, Lease
from headrace.storage.lease import Held, Holder
from headrace.storage.local import sync_seconds
from headrace.workspace import Workspace


@dataclass(frozen=True)
class Context:
    """All that a stage is given. `upstream` holds the manifests of the stages it names in `needs`."""

    spec: Spec
    ws: Workspace
    ds: str
    upstream: Mapping[str, Manifest] = field(default_factory=dict)
    #: The key of this run, known before the work starts: name temporary and final places after it.
    key: str = ""
    #: The pinned inputs that the key was computed from, upstream stages among them. `run` and `verify` read these
    #: versions and never look for the newest again: a commit in between would be data that the manifest does not name.
    inputs: tuple[Input, ...] = ()
    #: When its turn came (seconds since 1970) in a process that has served other stages; None: it is the first in its.
    began: float | None = None
    #: That this process is at work on the pipeline, and nobody else; None: nobody has asked.
    lock: RunLock | None = None
    #: Whether a model that it trains becomes a version of the registry: not one that is tried beside the day's.
    registers: bool = True

    @property
    def fence(self) -> Fence | None:
        """What its commits carry: those of the process that held the lease before are refused after them."""
        return None if self.lock is None else self.lock.fence

    def check_lease(self) -> None:
        """Call it right before a step that carries no token. Raises LeaseLost where another process is at work."""
        if self.lock is not None:
            self.lock.check()


@dataclass(frozen=True)
class Result:
    """What a stage's work hands back; becomes its manifest."""

    outputs: tuple[Output, ...] = ()
    rows: Mapping[str, int] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    dataset_schema: DatasetSchema | None = None
    #: Peaks of processes that this one cannot see (ranks): merged into the manifest's.
    peak_memory_mib: Mapping[str, float] = field(default_factory=dict)
    #: Processor time of such processes, all together.
    core_seconds: float = 0.0


class Stage(Protocol):
    """One step of the day. Implementations are stateless, and listed in `headrace.stages`."""

    name: str
    #: Raise it when the meaning of the output changes: finished runs of older code are then run again.
    version: int

    @property
    def needs(self) -> tuple[str, ...]:
        """Stages whose manifests (same pipeline, same ds) must be there; those like `"x?"` may be missing."""
        ...

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """The part of the spec that changes the output (not ranks, memory or progress)."""
        ...

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """What it will read besides its upstream stages, pinned; cheap. Raises UserError where an input is missing."""
        ...

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """Why a finished run no longer stands (an output is gone or damaged), or None."""
        ...

    def run(self, ctx: Context) -> Result:
        """Do the work on `ctx.inputs`. May be killed anywhere; running it again heals."""
        ...


@dataclass(frozen=True)
class Outcome:
    """What `run_stage` did."""

    manifest: Manifest
    skipped: bool
    reason: str


def run_stage(
    stage: Stage,
    spec: Spec,
    ws: Workspace,
    ds: str,
    announce: Callable[[RunPlan], None] = lambda plan: None,
    began: float | None = None,
) -> Outcome:
    """Run one stage for one day unless its result is already there.

    Args:
        stage: the stage.
        spec: the pipeline.
        ws: the workspace.
        ds: the day.
        announce: called before the work with what is planned, also where there is nothing to do.
        began: see Context.

    Raises:
        UserError: an upstream stage or an input is missing, or (BusyError) another run of this pipeline holds the
            lock.
    """
    entry = STAGES.get(stage.name)
    own = entry.lease if entry is not None else None
    with run_lock(ws, spec.pipeline, own) as lock:
        if own is None:  # otherwise another stage may be writing its manifest there
            ws.manifest(spec.pipeline, ds, stage.name).parent.discard_unfinished()
        plan = plan_run(stage, spec, ws, ds)
        announce(plan)
        if plan.reason is None:
            assert plan.manifest is not None
            return Outcome(plan.manifest, skipped=True, reason="already done with the same inputs")
        waited = sync_seconds()
        manifest = execute(stage, replace(plan, ctx=replace(plan.ctx, began=began, lock=lock)))
        lock.check()
        # What a manifest names is on the disk before the manifest is: Spark and other libraries sync nothing.
        ws.sync()
        manifest = manifest.model_copy(update={"sync_seconds": round(sync_seconds() - waited, 3)})
        saved = manifest.save(ws.manifest(spec.pipeline, ds, stage.name), lock.fences)
        return Outcome(saved, skipped=False, reason=plan.reason)


def execute(stage: Stage, plan: RunPlan) -> Manifest:
    """Do a stage's work as it was planned, whatever is there; the caller saves the manifest."""
    started, tick, peak = datetime.now(UTC), time.perf_counter(), PeakMemory.begin()
    use = ResourceUse.begin()
    try:
        result = stage.run(plan.ctx)
    except UserError as e:
        gone = [(name, m.why_removed) for name, m in plan.ctx.upstream.items() if m.removed]
        if not gone or type(e) is not UserError:
            raise
        again = f"headrace run {plan.ctx.spec.argument} --ds {plan.ctx.ds} --from {gone[0][0]}"
        raise UserError(f"{e}. {'; '.join(str(why) for _, why in gone)}. To make it again: {again}") from e
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
        seconds=round(time.perf_counter() - tick, 3),
        peak_memory_mib={**peak.mib(), **result.peak_memory_mib},
        resources=use.used(result.core_seconds),
    )


def check_stage(stage: Stage, spec: Spec, ws: Workspace, ds: str, verify: bool = True) -> str | None:
    """Why `run_stage` would work now, or None where there is nothing to do. Changes nothing and takes no lock.

    Without `verify` the outputs are not looked at: only whether the manifest is there and its key still the same.

    Raises:
        UserError: as `run_stage` would, but for the lock.
    """
    return plan_run(stage, spec, ws, ds, verify).reason


@dataclass(frozen=True)
class RunPlan:
    """What is known before a run: the context with its key, the pinned inputs, and what is there already."""

    ctx: Context
    inputs: tuple[Input, ...]
    spec_hash: str
    manifest: Manifest | None
    #: Why the stage would work; None where there is nothing to do.
    reason: str | None


def plan_run(stage: Stage, spec: Spec, ws: Workspace, ds: str, verify: bool = True) -> RunPlan:
    """What `run_stage` would do now, and on what. Changes nothing and takes no lock; `verify` as of `check_stage`.

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
    return RunPlan(ctx, inputs, spec_hash, manifest, _why_run(stage, ctx, manifest, verify))


def identity(manifest: Manifest) -> str:
    """A version of what a stage made: its key and its outputs' versions, so that a rerun with new data is new."""
    return fingerprint({"key": manifest.key, "outputs": [o.model_dump() for o in manifest.outputs]})


def _upstream(stage: Stage, spec: Spec, ws: Workspace, ds: str) -> dict[str, Manifest]:
    found: dict[str, Manifest] = {}
    for need in stage.needs:
        name = need.rstrip("?")
        manifest = Manifest.load(ws.manifest(spec.pipeline, ds, name))
        if manifest is not None:
            found[name] = manifest
        elif not need.endswith("?"):
            raise UserError(
                f"stage '{stage.name}' of '{spec.pipeline}' for {ds} needs stage '{name}', which has not finished. "
                f"Run: headrace run {spec.argument} --ds {ds} --from {name} --to {stage.name}"
            )
    return found


def _why_run(stage: Stage, ctx: Context, manifest: Manifest | None, verify: bool) -> str | None:
    if manifest is None:
        return "not yet run for this date"
    if manifest.key != ctx.key:
        return "its inputs or its part of the spec have changed"
    if manifest.removed:
        return manifest.why_removed
    return stage.verify(ctx, manifest) if verify else None


@dataclass(frozen=True)
class RunLock:
    """That this process is at work on a pipeline."""

    leases: tuple[Lease, ...]

    @property
    def fence(self) -> Fence:
        """What commits to tables carry: the token of the pipeline's lease, or of the stage's own."""
        return self.leases[0].fence

    @property
    def fences(self) -> tuple[Fence, ...]:
        """What manifests carry: the tokens of all of them."""
        return tuple(lease.fence for lease in self.leases)

    def check(self) -> None:
        """As `Lease.check`, of each lease."""
        for lease in self.leases:
            lease.check()

    def check_again(self) -> None:
        """As `Lease.check_again`, of each lease."""
        for lease in self.leases:
            lease.check_again()


@contextmanager
def run_lock(ws: Workspace, pipeline: str, own: str | None = None) -> Iterator[RunLock]:
    """One writer per pipeline; the lock ends with its holder's process.

    A stage that has a lease of its own takes that one alone; all others take every lease of the pipeline. So two of
    the former can run at the same time, and nothing else beside any of them.

    Args:
        ws: the workspace.
        pipeline: the pipeline.
        own: one of `headrace.stages.LEASES`; None: all of them, and the pipeline's.

    Raises:
        BusyError: another process holds one of them.
    """
    with ExitStack() as stack:
        try:
            leases = [stack.enter_context(lease.lease()) for lease in ws.locks(pipeline, own)]
        except Held as e:
            raise _busy(pipeline, e.holder) from None
        yield RunLock(tuple(leases))


def check_lock(ws: Workspace, pipeline: str, own: str | None = None) -> None:
    """Whether `run_lock` could be had now. Takes nothing: whoever needs it takes it all the same.

    Raises:
        BusyError: as `run_lock`.
    """
    for lease in ws.locks(pipeline, own):
        if (holder := lease.holder()) is not None:
            raise _busy(pipeline, holder)


def _busy(pipeline: str, holder: Holder) -> BusyError:
    return BusyError(f"another run of pipeline '{pipeline}' is at work ({holder}); wait for it or stop it")
