"""`headrace features explain`: what a pipeline makes of which columns."""

from __future__ import annotations

from headrace.commands.screen import out
from headrace.config import Spec
from headrace.features.workflow.graph import Format, draw, graph_of


def explain(spec: Spec, form: Format) -> None:
    """Print the graph of a pipeline's features.

    Raises:
        UserError: the spec's workflow has faults.
    """
    # soft_wrap: a diagram's source must not be broken over lines.
    out.print(draw(graph_of(spec), form), markup=False, soft_wrap=True)
