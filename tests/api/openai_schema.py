"""Checks answers against OpenAI's published description, where a copy lies beside the project.

Owns: a validator for the part of JSON schema that the description uses. Does not own: the
description; tests that need it are skipped without it.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

DESCRIPTION = Path(__file__).resolve().parents[3] / "shared" / "openai" / "openapi.json"

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


@functools.cache
def _schemas() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DESCRIPTION.read_text())["components"]["schemas"]
    return found


def faults(value: Any, name: str) -> list[str]:
    """What about `value` is not as the schema `name` says; empty when it fits."""
    return _faults(value, {"$ref": f"#/components/schemas/{name}"}, "$")


def _faults(value: Any, schema: dict[str, Any], at: str) -> list[str]:
    if "$ref" in schema:
        return _faults(value, _schemas()[schema["$ref"].rsplit("/", 1)[1]], at)
    if value is None and schema.get("nullable"):
        return []
    found: list[str] = []
    for part in schema.get("allOf", ()):
        found += _faults(value, part, at)
    for union in ("anyOf", "oneOf"):
        options = [_faults(value, option, at) for option in schema.get(union, ())]
        if options and all(options):
            found.append(f"{at}: none of {len(options)} alternatives: {min(options, key=len)}")
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{at}: {value!r} is not one of {schema['enum']}")
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        return [*found, f"{at}: {type(value).__name__} instead of {kinds}"]
    if isinstance(value, dict):
        found += [f"{at}: lacks {key}" for key in schema.get("required", ()) if key not in value]
        for key, inner in schema.get("properties", {}).items():
            if key in value:
                found += _faults(value[key], inner, f"{at}.{key}")
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            found += _faults(item, schema["items"], f"{at}[{index}]")
    return found


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind])
