"""Strict parsing of YAML that people write: no key occurs twice in a mapping, and aliases are limited.

Airflow's DAGs read this module by its file's path: it imports nothing but the standard library and PyYAML.
"""

from __future__ import annotations

from typing import Any

import yaml

#: Most values that aliases may add to those that a text spells out: a few hundred bytes could expand to billions.
_MOST_REPEATED = 100_000
#: Tags of the keys `<<` and `=`.
_MERGE_TAGS = ("tag:yaml.org,2002:merge", "tag:yaml.org,2002:value")


class YamlFault(ValueError):
    """A valid YAML text with a repeated key, or with aliases that expand too far."""


def parse_yaml(text: str) -> Any:
    """Parse a YAML document as `yaml.safe_load` does, in time and memory linear in its length.

    An alias gives the very object that its anchor names: change none in place.

    Raises:
        YamlFault: a key is given twice in one mapping (with both lines; all such keys, one a line); an alias stands
            within the value that it repeats; aliases stand for more than 100,000 values; the nesting is too deep.
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
    """A walk over a document's nodes that visits each node once, however many aliases repeat it."""

    def __init__(self, loader: yaml.SafeLoader) -> None:
        self._loader = loader
        #: Number of values in each node with all aliases expanded; None while the walk is within the node.
        self._sizes: dict[yaml.Node, int | None] = {}
        #: Number of nodes that were visited.
        self.visited = 0
        #: One message for each key that is given twice.
        self.faults: list[str] = []

    def visit(self, node: yaml.Node, path: str) -> int:
        """Return the number of values in a node, aliases expanded. `path`: the node's key path, for messages."""
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
                name, text = self._key(key), str(key.value) if isinstance(key, yaml.ScalarNode) else "?"
                key_path = f"{path}.{text}" if path else text
                if name in lines:
                    self.faults.append(f"key '{key_path}' is given twice, in lines {lines[name]} and {_line(key)}")
                lines[name] = _line(key)
                size += self.visit(value, key_path)
        self._sizes[node] = size
        return size

    def _key(self, node: yaml.Node) -> Any:
        """Return a key as it is compared; lists and mappings are refused where the document is constructed."""
        if not isinstance(node, yaml.ScalarNode):
            return node
        return node.tag if node.tag in _MERGE_TAGS else self._loader.construct_object(node)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
