"""The JSON schema of a pipeline's YAML, by which editors complete keys, show their meaning and mark faults.

The models of headrace.config and the operators of headrace.features give it. The package has it as a file
(SCHEMA_FILE), which `headrace init` names in the first line of a pipeline.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

import headrace.config
from headrace.config.documentation import keys_of, meaning_of

#: The schema with the names that headrace itself has.
SCHEMA_FILE = Path(headrace.config.__file__).with_name("pipeline.schema.json")
#: The command that writes the file anew.
COMMAND = "headrace reference --json-schema > python/config/pipeline.schema.json"
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
#: A class of the user's: `module:Class`.
_OWN_CLASS = {"type": "string", "pattern": ":"}
#: Entries of a chain's `ops` that only label its features (headrace.config.features.Chain).
_LABELS: Mapping[str, JsonSchemaValue] = {
    "add_metadata": {"type": "object", "minProperties": 1, "description": "Values for the dataset's schema."},
    "add_tags": {
        "anyOf": [
            {"type": "array", "items": {"type": "string"}, "minItems": 1},
            {"type": "object", "properties": {"tags": {"type": "array", "items": {"type": "string"}, "minItems": 1}}},
        ],
        "description": "Tags of the chain's features.",
    },
}


def editor_line(file: Path) -> str:
    """Return the comment that names the schema to editors (yaml-language-server), for a pipeline's file.

    The path is relative where the environment is in the pipeline's folder or below it, else absolute.
    """
    folder = file.resolve().parent
    path = SCHEMA_FILE.relative_to(folder) if SCHEMA_FILE.is_relative_to(folder) else SCHEMA_FILE
    return f"# yaml-language-server: $schema={path}"


def json_schema() -> str:
    """Return the schema as JSON text: draft 2020-12, keys in the order of the reference."""
    from headrace.config import OpSpec, Spec
    from headrace.config.model_args import MODEL_ARGS
    from headrace.features.ops import OPERATORS
    from headrace.features.table_ops import TABLE_OPERATORS

    row_operators = {name: OPERATORS.find(name, name) for name in OPERATORS.known()}
    table_operators = {name: TABLE_OPERATORS.find(name, name) for name in TABLE_OPERATORS.known()}
    models: list[type[BaseModel]] = [Spec, *MODEL_ARGS.values(), *row_operators.values(), *table_operators.values()]
    references, schema = models_json_schema(
        [(model, "validation") for model in dict.fromkeys(models)], schema_generator=_SpecSchema
    )
    sections: dict[str, JsonSchemaValue] = schema["$defs"]
    operator_form = {"$ref": f"#/$defs/{OpSpec.__name__}"}

    def reference_of(model: type[BaseModel]) -> JsonSchemaValue:
        return references[model, "validation"]

    def entries(operators: Mapping[str, type[BaseModel]], labels: Mapping[str, JsonSchemaValue]) -> JsonSchemaValue:
        """Return the schema of one operator: `name`, `name: {parameter: value}`, `MODULE:CLASS`."""
        without_parameters = [name for name, op in operators.items() if not _required(op)]
        by_name = {
            name: reference_of(op) if _required(op) else {"anyOf": [reference_of(op), {"type": "null"}]}
            for name, op in operators.items()
        }
        named = {
            "type": "object",
            "properties": {**by_name, **labels},
            "patternProperties": {":": {"type": ["object", "null"]}},
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 1,
        }
        return {"anyOf": [{"enum": without_parameters}, _OWN_CLASS, named, operator_form]}

    sections["Chain"]["properties"]["ops"]["items"] = entries(row_operators, _LABELS)
    sections["Features"]["properties"]["prepare"]["items"] = entries(table_operators, {})
    # `loss: focal` is short for `loss: {kind: focal}`.
    sections["Loss"] = {"anyOf": [{"enum": sections["Loss"]["properties"]["kind"]["enum"]}, sections["Loss"]]}
    model = sections["Model"]
    classes = [{"enum": ["dlrm", *MODEL_ARGS]}, _OWN_CLASS]
    model["properties"]["class"]["anyOf"] = classes
    model["properties"]["kind"] = {"anyOf": classes, "description": "Another name of `class`."}
    model["allOf"] = [
        {
            "if": {"properties": {"class": {"const": name}}, "required": ["class"]},
            "then": {"properties": {"args": reference_of(args)}},
        }
        for name, args in MODEL_ARGS.items()
    ]
    document = {
        "$schema": _DIALECT,
        "title": "A pipeline of headrace",
        **sections.pop(Spec.__name__),
        "$defs": sections,
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _required(model: type[BaseModel]) -> bool:
    return any(info.is_required() for info in model.model_fields.values())


class _SpecSchema(GenerateJsonSchema):
    """Pydantic's schema of sections and operators, with the `#:` comments as descriptions and without titles."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        model = schema["cls"]
        result = super().model_schema(schema)
        result.pop("title", None)
        if meaning := meaning_of(model):
            result["description"] = meaning
        for key in keys_of(model):
            if key.meaning:
                result["properties"][key.name]["description"] = key.meaning
        return result

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """Leave out the defaults of whole sections: each of their keys has its own."""
        result = super().default_schema(schema)
        if isinstance(result.get("default"), dict):
            del result["default"]
        return result

    def tagged_union_schema(self, schema: core_schema.TaggedUnionSchema) -> JsonSchemaValue:
        """Return `anyOf`: of a source whose format is a class of the user's, both kinds hold."""
        result = super().tagged_union_schema(schema)
        result.pop("discriminator", None)
        result["anyOf"] = result.pop("oneOf")
        return result
