"""Upper bound for the cost of validating one value, which blocks the event loop. Pure.

In a plain schema each value is compared with one subschema, however large both are; but 20,000
values, each compared with 1,900 branches of an `anyOf`, take seconds.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from catalog.definitions import json_schema
from catalog.definitions.json_schema import collect_anchors, resolve, walk

Schema = dict[str, Any]
PATTERN_COST, UNIQUE_COST = 16, 40  # measured, relative to one plain comparison
MAX_COST = 20_000  # also the number of subschemas visited before giving up


def max_comparisons_per_value(root: Schema) -> int:
    """Return the maximum number of comparisons that a single value can require."""
    anchors = collect_anchors(sub for _, sub in walk(root))
    highest, visited = 1, 0
    pending: list[list[Schema]] = [[root]]
    seen: set[frozenset[int]] = set()
    while pending:
        applied = list(_applied_together(root, anchors, pending.pop()))
        highest = max(highest, sum(map(_cost, applied)))
        visited += len(applied)
        if visited > MAX_COST:
            return MAX_COST
        for children in _child_schemas(applied):
            key = frozenset(map(id, children))
            if key not in seen:
                seen.add(key)
                pending.append(children)
    return highest


def _applied_together(
    root: Schema, anchors: dict[str, Schema], schemas: list[Schema]
) -> Iterator[Schema]:
    """Yield each schema that applies to the same value as the given ones, once."""
    stack, seen = list(schemas), set[int]()
    while stack:
        sub = stack.pop()
        if id(sub) in seen:
            continue
        seen.add(id(sub))
        yield sub
        for key in json_schema.BRANCHES:
            stack += _schemas(sub.get(key))
        for key in json_schema.CONDITIONALS:
            stack += _schemas([sub.get(key)])
        stack += _schemas(_values(sub.get("dependentSchemas")))
        stack += _schemas(
            resolve(root, anchors, sub[key]) for key in json_schema.REFERENCES if key in sub
        )


def _child_schemas(applied: list[Schema]) -> Iterator[list[Schema]]:
    """Yield the schemas that apply together to one property, or to the items."""
    by_property: dict[str, list[Schema]] = {}
    any_property, items = list[Schema](), list[Schema]()
    for sub in applied:
        properties = sub.get("properties")
        for name, inner in properties.items() if isinstance(properties, dict) else ():
            by_property.setdefault(name, []).extend(_schemas([inner]))
        any_property += _schemas(_values(sub.get("patternProperties")))
        any_property += _schemas(sub.get(key) for key in json_schema.ANY_PROPERTY)
        for key in ("prefixItems", *json_schema.ANY_ITEM):
            value = sub.get(key)
            items += _schemas(value if isinstance(value, list) else [value])
    yield from (schemas + any_property for schemas in by_property.values())
    yield from (schemas for schemas in (any_property, items) if schemas)


def _cost(sub: Schema) -> int:
    cost = 1
    if "pattern" in sub:
        cost += PATTERN_COST
    cost += PATTERN_COST * len(_values(sub.get("patternProperties")))
    if sub.get("uniqueItems") is True:
        cost += UNIQUE_COST
    options = sub.get("enum")
    if isinstance(options, list) and not all(isinstance(option, str) for option in options):
        cost += 2 * len(options)  # only lists of strings are hashed
    return cost


def _values(mapping: object) -> list[Any]:
    return list(mapping.values()) if isinstance(mapping, dict) else []


def _schemas(values: object) -> list[Schema]:
    if not isinstance(values, Iterable) or isinstance(values, str | dict):
        return []
    return [value for value in values if isinstance(value, dict)]
