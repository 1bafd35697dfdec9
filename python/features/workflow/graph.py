"""A pipeline's features as a graph: columns of the lake, operators, features. Text, Mermaid, or Graphviz's dot.

graph_of(spec)            # needs no data and no Spark
draw(graph_of(spec), "mermaid")
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.config import Spec
from headrace.config.schema import Feature, Kind
from headrace.features.table_ops.preparation import Preparation
from headrace.features.types import ValueType
from headrace.features.workflow.workflow import BoundChain, Workflow

Format = Literal["text", "mermaid", "dot"]


@dataclass(frozen=True)
class GraphNode:
    """A column, an operator in its place, or a feature."""

    id: str
    kind: Literal["column", "operator", "feature"]
    #: The first is its name.
    lines: tuple[str, ...]
    #: Of an operator: what comes out of it.
    gives: tuple[str, ...] = ()


@dataclass(frozen=True)
class GraphEdge:
    """Columns that flow from one node to another."""

    start: str
    end: str
    #: Columns with their types.
    columns: tuple[str, ...]


@dataclass
class Graph:
    """All of a pipeline, from left to right."""

    title: str
    nodes: list[GraphNode] = field(default_factory=list)
    edges: list[GraphEdge] = field(default_factory=list)
    #: What is prepared, and each chain: a heading, and the nodes that come first.
    parts: list[tuple[str, list[str]]] = field(default_factory=list)

    def node(self, kind: Literal["column", "operator", "feature"], *lines: str, gives: tuple[str, ...] = ()) -> str:
        """Add a node; its id."""
        self.nodes.append(GraphNode(f"n{len(self.nodes)}", kind, lines, gives))
        return self.nodes[-1].id

    def join(self, sources: Iterable[tuple[str, str]], end: str) -> None:
        """Add edges to a node. `sources`: (node, what flows)."""
        flows: dict[str, list[str]] = {}
        for start, column in sources:
            flows.setdefault(start, []).append(column)
        self.edges += [GraphEdge(start, end, tuple(columns)) for start, columns in flows.items()]


def graph_of(spec: Spec) -> Graph:
    """Return the graph of a pipeline.

    Raises:
        UserError: the spec has faults, see `Workflow`.
    """
    workflow = Workflow.from_spec(spec)
    features = {f.name: f for f in workflow.schema_of({}).features}
    graph = Graph(
        f"{spec.pipeline}: {len(workflow.input_columns)} columns, {len(workflow.chains)} chains, "
        f"{sum(len(c.outputs) for c in workflow.chains)} features"
    )
    producers = _prepared(graph, spec)
    for name in workflow.input_columns:
        if name not in producers:
            producers[name] = graph.node("column", name, str(workflow.input_type(name)))
    for chain in workflow.chains:
        _add_chain(graph, chain, {c: (producers[c], workflow.input_type(c)) for c in chain.columns}, features)
    return graph


def _prepared(graph: Graph, spec: Spec) -> dict[str, str]:
    """Add nodes of `features.prepare`, and return the node that makes each column."""
    if not spec.features.prepare:
        return {}

    preparation = Preparation.from_spec(spec)
    producers: dict[str, str] = {}
    events = graph.node("column", "events", ", ".join(spec.table.keys) or "all rows")
    last_node = events
    after = [s.schema.types for s in preparation.steps[1:]] + [preparation.end.types]
    for step, types, op_spec in zip(preparation.steps, after, spec.features.prepare, strict=True):
        new = {n: t for n, t in types.items() if step.schema.types.get(n) != t}
        gives = tuple(f"{n}: {t}" for n, t in new.items())
        node = graph.node("operator", step.op.name, *_params(op_spec.params), gives=gives)
        graph.join([(last_node, "rows")], node)
        producers |= dict.fromkeys(new, node)
        if last_node == events:
            graph.parts.append(("prepare: all events", [node]))
        last_node = node
    return producers


def _add_chain(
    graph: Graph, chain: BoundChain, producers: dict[str, tuple[str, ValueType]], features: dict[str, Feature]
) -> None:
    """Add nodes of a chain. `producers`: the node of each column, and its type."""
    heading = ", ".join(f"{n}: {t}" for n, (_, t) in producers.items())
    first: list[str] = []
    for step in chain.steps:
        gives = tuple(f"{n}: {t}" for n, t in step.outputs.items() if n not in step.passthrough)
        params = _params(step.op.model_dump(mode="json", exclude_unset=True))
        node = graph.node("operator", step.op.name, *params, gives=gives)
        first = first or [node]
        graph.join(((producers[n][0], f"{n}: {producers[n][1]}") for n in step.inputs), node)
        producers = {n: producers[n] if n in step.passthrough else (node, t) for n, t in step.outputs.items()}
    for name in chain.outputs:
        node = graph.node("feature", name, *_about(features[name]))
        start, end = producers[name]
        graph.join([(start, f"{name}: {end}")], node)
        if not chain.steps:
            first.append(node)
    graph.parts.append((heading, first))


def _params(params: Any) -> tuple[str, ...]:
    """Return parameters, one a line."""
    return tuple(f"{k}: {v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)}" for k, v in params.items())


def _about(f: Feature) -> list[str]:
    """Return facts of the dataset about a feature, a line each."""
    kind = "raw ids" if f.dynamic else "codes" if f.kind is Kind.CATEGORICAL else "number"
    lines = [f"{kind} {f.dtype}" + (f" x {f.length}" if f.is_list else "")]
    if f.vocabulary is not None:
        lines.append(f"vocabulary {f.vocabulary}")
    elif f.cardinality is not None:
        lines.append(f"{f.cardinality:,} codes")
    if f.tags:
        lines.append(f"tags {', '.join(f.tags)}")
    return lines + [f"{k}: {json.dumps(v, ensure_ascii=False)}" for k, v in f.metadata.items()]


def draw(graph: Graph, form: Format) -> str:
    """Return the graph as text of the given form, no newline at its end."""
    return "\n".join({"text": _text, "mermaid": _mermaid, "dot": _dot}[form](graph))


def _text(graph: Graph) -> Iterator[str]:
    """Yield each chain as a tree: the columns that go in, operators with what comes out of them, features."""
    yield graph.title
    nodes = {n.id: n for n in graph.nodes}
    below: dict[str, list[GraphNode]] = {}
    heads = {n for _, first in graph.parts for n in first}
    for node in graph.nodes:
        if node.id in heads:
            continue
        # Of several nodes before it, the last: the others' columns have passed by that one.
        earlier_nodes = [e.start for e in graph.edges if e.end == node.id]
        if earlier_nodes:
            below.setdefault(earlier_nodes[-1], []).append(node)

    def tree(some: list[GraphNode], indent: str) -> Iterator[str]:
        for i, node in enumerate(some):
            corner, more = ("└─ ", "   ") if i == len(some) - 1 else ("├─ ", "│  ")
            head, *rest = node.lines
            if node.kind == "feature":
                yield f"{indent}{corner}= {head}: {'; '.join(rest)}"
            else:
                parameters = f"({', '.join(rest)})" if rest else ""
                yield f"{indent}{corner}{head}{parameters}" + (f" -> {', '.join(node.gives)}" if node.gives else "")
                yield from tree(below.get(node.id, []), indent + more)

    for heading, first in graph.parts:
        yield ""
        yield heading
        yield from tree([nodes[n] for n in first], "")


_SHAPES = {"column": ('(["', '"])'), "operator": ('["', '"]'), "feature": ('[/"', '"/]')}


def _mermaid(graph: Graph) -> Iterator[str]:
    """Yield lines of Mermaid. See https://mermaid.js.org/syntax/flowchart.html."""

    def safe(text: str) -> str:
        # Entities by number; quotes end a label, and # begins an entity.
        return "".join(c if c.isalnum() or c in " _-.,:/()=+" else f"#{ord(c)};" for c in text)

    yield "---"
    yield f"title: {json.dumps(graph.title, ensure_ascii=False)}"
    yield "---"
    yield "flowchart LR"
    for n in graph.nodes:
        left, right = _SHAPES[n.kind]
        yield f"  {n.id}{left}{'<br/>'.join(safe(line) for line in n.lines)}{right}:::{n.kind}"
    for e in graph.edges:
        yield f'  {e.start} -->|"{"<br/>".join(safe(c) for c in e.columns)}"| {e.end}'
    yield "  classDef column fill:#eef,stroke:#669"
    yield "  classDef operator fill:#fff,stroke:#999"
    yield "  classDef feature fill:#efe,stroke:#696"


def _dot(graph: Graph) -> Iterator[str]:
    """Yield lines of Graphviz. See https://graphviz.org/doc/info/lang.html."""

    def quoted(lines: Iterable[str]) -> str:
        return '"' + "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines) + '"'

    shapes = {"column": "ellipse", "operator": "box", "feature": "box, style=rounded"}
    yield "digraph features {"
    yield "  rankdir=LR; labelloc=t; node [fontname=Helvetica, fontsize=10]; edge [fontname=Helvetica, fontsize=8];"
    yield f"  label={quoted([graph.title])};"
    for n in graph.nodes:
        yield f"  {n.id} [label={quoted(n.lines)}, shape={shapes[n.kind]}];"
    for e in graph.edges:
        yield f"  {e.start} -> {e.end} [label={quoted(e.columns)}];"
    yield "}"
