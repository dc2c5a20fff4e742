"""OpenAPI document: operation ids, and descriptions of fields and parameters by name."""

import re
from collections.abc import Iterator
from typing import Any

from ninja import NinjaAPI
from ninja.openapi.schema import OpenAPISchema
from ninja.operation import Operation

from toolcrib.lib.openapi import examples
from toolcrib.lib.openapi.vocabulary import FIELDS, PARAMETERS

RANGES = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


class DescribedAPI(NinjaAPI):
    """An API whose functions are named like their operations, with a described document."""

    def get_openapi_operation_id(self, operation: Operation) -> str:
        return operation.view_func.__name__

    def get_openapi_schema(self, **options: Any) -> OpenAPISchema:
        document = super().get_openapi_schema(**options)
        _correct_ranges(document["components"]["schemas"])
        for _, key, schema in fields(document):
            _describe(schema, key, FIELDS)
        for path, _, parameter in parameters(document):
            key = f"{path.removeprefix('/api/v1')}.{parameter['name']}"
            _describe(parameter, key, PARAMETERS)
            _describe(parameter, key, FIELDS)
            if parameter["in"] == "query" and parameter["name"] in examples.PARAMETERS:
                parameter["example"] = examples.PARAMETERS[parameter["name"]]
        for path, methods in document["paths"].items():
            for operation in methods.values():
                _remove_impossible_errors(path, operation)
        _add_examples(document)
        return document


def fields(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Return every property as (schema, schema.property, its schema)."""
    for name, schema in document["components"]["schemas"].items():
        for field, value in schema.get("properties", {}).items():
            yield name, f"{name}.{field}", value


def parameters(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Return every parameter as (path, operation id, parameter)."""
    for path, methods in document["paths"].items():
        for operation in methods.values():
            for parameter in operation.get("parameters", []):
                yield path, operation["operationId"], parameter


def find_entry(key: str, vocabulary: dict[str, str]) -> str | None:
    """Return the vocabulary's key for `owner.field`: that of the owner, or of the field alone.

    The owner of a parameter is its path, of which any part suffices, the longest first.
    """
    owner, _, name = key.rpartition(".")
    parts = re.findall(r"/[^/]+", owner) or [owner]
    for length in range(len(parts), 0, -1):
        for start in range(len(parts) - length + 1):
            candidate = "".join(parts[start : start + length]) + "." + name
            if candidate in vocabulary:
                return candidate
    return name if name in vocabulary else None


def _correct_ranges(value: Any) -> None:
    """Rename the ranges of unions, which pydantic writes under its own names."""
    if isinstance(value, list):
        for item in value:
            _correct_ranges(item)
    elif isinstance(value, dict):
        for own, name in RANGES.items():
            if isinstance(value.get(own), int | float):
                value[name] = value.pop(own)
        for item in value.values():
            _correct_ranges(item)


def _remove_impossible_errors(path: str, operation: dict[str, Any]) -> None:
    """Remove the statuses that the form of an operation excludes."""
    excluded = set() if "{" in path else {404}
    if "requestBody" not in operation:
        names = {parameter["name"] for parameter in operation.get("parameters", [])}
        excluded |= {413} if "pattern" in names else {400, 413}
    for status in excluded:
        operation["responses"].pop(status, None)


def _add_examples(document: dict[str, Any]) -> None:
    """Add the examples of bodies and answers, and to the fields of bodies their values there."""
    schemas = document["components"]["schemas"]
    answers = examples.read_answers()
    for status, error in examples.ERRORS.items():
        schemas[f"Error{status}"]["examples"] = [error]
    for methods in document["paths"].values():
        for operation in methods.values():
            for status, response in operation["responses"].items():
                content = response.get("content", {}).get("application/json")
                if status < 300 and content and operation["operationId"] in answers:
                    content["example"] = answers[operation["operationId"]]
            example = examples.BODIES.get(operation["operationId"])
            if example is None or "requestBody" not in operation:
                continue
            content = operation["requestBody"]["content"]["application/json"]
            content["example"] = example
            reference = content["schema"].get("$ref", "").rpartition("/")[2]
            for field, schema in schemas.get(reference, {}).get("properties", {}).items():
                if field in example:
                    schema.setdefault("examples", [example[field]])


def _describe(item: dict[str, Any], key: str, vocabulary: dict[str, str]) -> None:
    own = item.get("description") or item.get("schema", {}).get("description")
    if own:
        item["description"] = own
    elif entry := find_entry(key, vocabulary):
        item["description"] = vocabulary[entry]
