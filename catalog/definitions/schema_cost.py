"""What it may cost to hold one value to a schema: how much stands at its widest place. Pure.

The validator lets nothing else run while it works. In a plain schema each value is held to one
subschema, however large both are; but a list of 20,000 values, each held to 1,900 branches of an
`anyOf`, takes seconds.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from catalog.definitions.json_schema import anchors_of, resolve, walk

Schema = dict[str, Any]
BRANCHES = ("anyOf", "oneOf", "allOf")
ASIDE = ("not", "if", "then", "else")
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
FOR_ANY_NAME = ("additionalProperties", "unevaluatedProperties", "propertyNames")
FOR_ITEMS = ("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains")
PATTERN, UNIQUE = 16, 40  # what these cost beside one plain comparison, as measured
MOST = 20_000  # subschemas looked at; what has more is as broad as can be


def max_comparisons_per_value(root: Schema) -> int:
    """Return how many comparisons a single value may cost, at the place where that is most."""
    anchors = anchors_of(sub for _, sub in walk(root))
    widest, looked = 1, 0
    waiting: list[list[Schema]] = [[root]]
    known: set[frozenset[int]] = set()
    while waiting:
        group = waiting.pop()
        here = list(_in_place(root, anchors, group))
        widest = max(widest, sum(map(_cost, here)))
        looked += len(here)
        if looked > MOST:
            return MOST
        for below in _below(here):
            mark = frozenset(map(id, below))
            if mark not in known:
                known.add(mark)
                waiting.append(below)
    return widest


def _in_place(root: Schema, anchors: dict[str, Schema], group: list[Schema]) -> Iterator[Schema]:
    """Yield all that holds for the same value as these, each once."""
    stack, known = list(group), set[int]()
    while stack:
        sub = stack.pop()
        if id(sub) in known:
            continue
        known.add(id(sub))
        yield sub
        for key in BRANCHES:
            stack += _schemas(sub.get(key))
        for key in ASIDE:
            stack += _schemas([sub.get(key)])
        stack += _schemas(_values(sub.get("dependentSchemas")))
        stack += _schemas(resolve(root, anchors, sub[key]) for key in REFERENCES if key in sub)


def _below(here: list[Schema]) -> Iterator[list[Schema]]:
    """Yield what holds together for one property, or for the items."""
    named: dict[str, list[Schema]] = {}
    for_any, items = list[Schema](), list[Schema]()
    for sub in here:
        properties = sub.get("properties")
        for name, inner in properties.items() if isinstance(properties, dict) else ():
            named.setdefault(name, []).extend(_schemas([inner]))
        for_any += _schemas(_values(sub.get("patternProperties")))
        for_any += _schemas(sub.get(key) for key in FOR_ANY_NAME)
        for key in FOR_ITEMS:
            found = sub.get(key)
            items += _schemas(found if isinstance(found, list) else [found])
    yield from (found + for_any for found in named.values())
    yield from (found for found in (for_any, items) if found)


def _cost(sub: Schema) -> int:
    cost = 1
    if "pattern" in sub:
        cost += PATTERN
    cost += PATTERN * len(_values(sub.get("patternProperties")))
    if sub.get("uniqueItems") is True:
        cost += UNIQUE
    options = sub.get("enum")
    if isinstance(options, list) and not all(isinstance(option, str) for option in options):
        cost += 2 * len(options)  # texts alone are looked up
    return cost


def _values(found: object) -> list[Any]:
    return list(found.values()) if isinstance(found, dict) else []


def _schemas(found: object) -> list[Schema]:
    if not isinstance(found, Iterable) or isinstance(found, str | dict):
        return []
    return [sub for sub in found if isinstance(sub, dict)]
