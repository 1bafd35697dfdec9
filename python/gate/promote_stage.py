"""The stage `promote`: the day's models become champions, where they may."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.config import Spec
from headrace.manifest import Input, Manifest
from headrace.registry.promotion import settle
from headrace.registry.store import store_file
from headrace.stage import Context, Result, Stage

#: The stages that register a model.
_TRAINED = ("train", "baseline", "second_stage")


class Promote(Stage):
    """Give the alias `champion` of each model that the day has registered to its version (registry.promotion.settle).

    It leaves nothing but its manifest and what the registry has. A run that was killed does the rest; one that was done
    is not done again, so an alias that people have moved since stays where they put it.
    """

    name = "promote"
    version = 1
    needs: tuple[str, ...] = ("train", "baseline?", "second_stage?")

    def spec_part(self, spec: Spec) -> Mapping[str, Any]:
        """Nothing: what is decided, is in the inputs."""
        return {}

    def inputs(self, ctx: Context) -> tuple[Input, ...]:
        """None besides the stages."""
        return ()

    def verify(self, ctx: Context, manifest: Manifest) -> str | None:
        """The registry is there."""
        return None if store_file(ctx.ws).is_file() else "the model registry is gone"

    def run(self, ctx: Context) -> Result:
        """See the class. Raises UserError where the registry cannot be used."""
        models: dict[str, Any] = {}
        for stage in _TRAINED:
            registered = ctx.upstream[stage].facts.get("registered") if stage in ctx.upstream else None
            if registered is None:
                continue
            name, version = registered["name"], str(registered["version"])
            done = settle(ctx.ws, name, version)
            models[name] = {"version": version, "champion": done.now, "before": done.before, "stays": done.stays}
        return Result(
            rows={"promoted": sum(m["champion"] == m["version"] for m in models.values())}, facts={"models": models}
        )
