"""YAML that people write, read strictly: no key is given twice, and no alias makes much of little.

Airflow's DAGs read this module by its file's path: it imports nothing but the standard library and PyYAML.
"""

from __future__ import annotations

from typing import Any

import yaml

#: Values that aliases may add to those that a text spells out: a few hundred bytes can stand for billions.
_MOST_REPEATED = 100_000
#: Of the keys `<<` and `=`.
_MERGE_TAGS = ("tag:yaml.org,2002:merge", "tag:yaml.org,2002:value")


class YamlFault(ValueError):
    """A text that is YAML, and says something twice, or too often."""


def parse_yaml(text: str) -> Any:
    """Parse a YAML document as `yaml.safe_load` does, in time and memory linear in its length.

    An alias gives the very object that its anchor names: change none in place.

    Raises:
        YamlFault: a key is given twice in one mapping (with both lines; all such keys, one a line); an alias stands
            within what it repeats; aliases stand for more than 100,000 values; the nesting is too deep.
        yaml.YAMLError: it is not YAML.
        ValueError: a value is none, such as the date 2026-02-30.
    """
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        nodes = Nodes(loader)
        size = nodes.visit(root, "")
        if nodes.faults:
            raise YamlFault("\n".join(nodes.faults))
        if size - nodes.visited > _MOST_REPEATED:
            raise YamlFault(f"its aliases stand for {size:,} values, and it spells out {nodes.visited:,}")
        return loader.construct_document(root)
    except RecursionError:
        raise YamlFault("values are nested too deeply") from None
    finally:
        loader.dispose()


class Nodes:
    """A walk over the nodes of a document that visits each once, however many aliases repeat it."""

    def __init__(self, loader: yaml.SafeLoader) -> None:
        self._loader = loader
        #: By node, how many values it stands for with all aliases written out; None while the walk is within it.
        self._sizes: dict[yaml.Node, int | None] = {}
        #: Nodes that were visited.
        self.visited = 0
        #: Keys that are given twice, for people.
        self.faults: list[str] = []

    def visit(self, node: yaml.Node, path: str) -> int:
        """Return how many values a node stands for. `path`: the key path that leads to it, for messages."""
        if node in self._sizes:
            size = self._sizes[node]
            if size is None:
                raise YamlFault(f"line {_line(node)}: an alias stands within what it repeats")
            return size
        self.visited += 1
        self._sizes[node] = None
        size = 1
        if isinstance(node, yaml.SequenceNode):
            size += sum(self.visit(item, f"{path}[{i}]") for i, item in enumerate(node.value))
        elif isinstance(node, yaml.MappingNode):
            lines: dict[Any, int] = {}
            for key, value in node.value:
                size += self.visit(key, path)
                name, shown = self._key(key), str(key.value) if isinstance(key, yaml.ScalarNode) else "?"
                where = f"{path}.{shown}" if path else shown
                if name in lines:
                    self.faults.append(f"key '{where}' is given twice, in lines {lines[name]} and {_line(key)}")
                lines[name] = _line(key)
                size += self.visit(value, where)
        self._sizes[node] = size
        return size

    def _key(self, node: yaml.Node) -> Any:
        """Return a key as it is compared; lists and mappings are refused where the document is constructed."""
        if not isinstance(node, yaml.ScalarNode):
            return node
        return node.tag if node.tag in _MERGE_TAGS else self._loader.construct_object(node)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
