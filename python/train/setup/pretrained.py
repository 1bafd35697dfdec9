"""Which trained models of other pipelines a network starts from, one for each of its parts: `train.pretrained`.

How it does: headrace.train.setup.start_from_pretrained.
"""

from __future__ import annotations

from headrace.config import Spec
from headrace.errors import UserError
from headrace.manifest import Input, Manifest
from headrace.workspace import Workspace

#: The kind of a manifest's input.
PRETRAINED = "pretrained"


def find_pretrained(ws: Workspace, spec: Spec, ds: str) -> tuple[Input, ...]:
    """The newest finished models up to `ds` of the pipelines that the spec names, in the order of parts' names.

    Raises:
        UserError: a pipeline has none.
    """
    found = []
    for part, pipeline in sorted(spec.train.pretrained.items()):
        days = sorted((d for d in ws.days(pipeline) if d <= ds), reverse=True)
        manifests = (Manifest.load(ws.manifest(pipeline, day, "train")) for day in days)
        manifest = next((m for m in manifests if m is not None), None)
        if manifest is None:
            raise UserError(
                f"train.pretrained.{part}: pipeline '{pipeline}' has no trained model up to {ds}; train it first: "
                f"headrace run PIPELINE --set pipeline={pipeline} --to train"
            )
        output = manifest.output("model")
        found.append(Input(kind=PRETRAINED, name=output.name, version=output.version))
    return tuple(found)
