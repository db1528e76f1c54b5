"""Makes `manifest.schema.json` from the classes of `schema.py`.

`python -m neuron_store.manifest.json_schema` writes the file beside this module.
"""

from __future__ import annotations

import json
import types
import typing
from pathlib import Path
from typing import Any

import attrs

from neuron_store.artifact import _KEY
from neuron_store.manifest.schema import Config, Graph, Manifest, Topology

__all__ = ["SCHEMA_PATH", "json_schema", "schema_text"]

SCHEMA_PATH = Path(__file__).with_name("manifest.schema.json")
_PLAIN = {str: "string", int: "integer", bool: "boolean", type(None): "null"}


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a manifest."""
    definitions = {model.__name__: _object(model) for model in (Topology, Config, Graph)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Compile-artifact manifest",
        **_object(Manifest),
        "$defs": definitions,
    }


def schema_text() -> str:
    """The schema as it stands in the file."""
    return json.dumps(json_schema(), indent=2) + "\n"


def _object(model: type) -> dict[str, Any]:
    fields = [field for field in attrs.fields(model) if not field.metadata.get("extra")]
    return {
        "description": " ".join((model.__doc__ or "").split()),
        "type": "object",
        "properties": {field.name: _property(field) for field in fields},
        # A reader keeps what a later minor version adds.
        "additionalProperties": True,
        "required": [field.name for field in fields if field.default is attrs.NOTHING]
        + (["manifest_version", "graphs"] if model is Manifest else []),
    }


def _property(field: attrs.Attribute[Any]) -> dict[str, Any]:
    rules = dict(field.metadata)
    if field.name == "graph_hash":
        rules["pattern"] = "^" + _KEY.pattern.removesuffix(r"\Z") + "$"
    described = {"description": rules.pop("description")} if "description" in rules else {}
    return {**described, **_kind(field.type, counted=field.name in {"neff_size", "ranks"}), **rules}


def _kind(kind: Any, *, counted: bool = False) -> dict[str, Any]:
    if kind in _PLAIN:
        return {"type": _PLAIN[kind], **({"minimum": 0} if counted and kind is int else {})}
    if kind is Any:
        return {}
    if attrs.has(kind):
        return {"$ref": f"#/$defs/{kind.__name__}"}
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in {types.UnionType, typing.Union}:
        parts = [_kind(argument, counted=counted) for argument in arguments]
        simple = [part["type"] for part in parts]
        merged = {k: v for part in parts for k, v in part.items() if k != "type"}
        return {"type": simple, **merged}
    if origin is tuple:
        return {"type": "array", "items": _kind(arguments[0], counted=counted)}
    return {"type": "object", "additionalProperties": _kind(arguments[1]) or True}


if __name__ == "__main__":
    SCHEMA_PATH.write_text(schema_text(), encoding="utf-8")
