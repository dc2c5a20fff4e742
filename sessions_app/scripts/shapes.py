"""Shapes of values, read from JSON Schemas: what Python stubs and TypeScript declarations print.

A shape says less than its schema: what a type cannot express is left out, and what is not
understood is any value. Schemas are written by servers, so depth, unions and enums are limited.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from catalog.rendering import one_line

MAX_DEPTH = 8
MAX_LITERALS = 40
MAX_LITERAL_LENGTH = 100
MAX_VARIANTS = 12
MAX_FIELDS = 200
MAX_NODES = 2_000  # of one tool
SCALARS = ("string", "integer", "number", "boolean", "null")


@dataclass(frozen=True, slots=True)
class Scalar:
    kind: str  # one of SCALARS, or "any"


@dataclass(frozen=True, slots=True)
class Literals:
    values: tuple[str | int | bool | None, ...]


@dataclass(frozen=True, slots=True)
class Union:
    variants: "tuple[Shape, ...]"


@dataclass(frozen=True, slots=True)
class Array:
    items: "Shape"


@dataclass(frozen=True, slots=True)
class Map:
    values: "Shape"


@dataclass(frozen=True, slots=True)
class Reference:
    """An object that is described once, by name, since it contains itself or is used often."""

    name: str


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    shape: "Shape"
    is_required: bool
    description: str = ""


@dataclass(frozen=True, slots=True)
class Object:
    fields: tuple[Field, ...]
    is_open: bool = False  # it also takes fields that are not described


Shape = Scalar | Literals | Union | Array | Map | Reference | Object
ANY = Scalar("any")


@dataclass
class ShapeReader:
    """Reads the schemas of one tool; `objects` are those that have a name."""

    root: Any
    prefix: str
    objects: dict[str, Object] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)  # by reference
    _nodes: int = 0

    def read(self) -> Shape:
        return self._read(self.root, 0, ())

    def _read(self, schema: Any, depth: int, refs: tuple[str, ...]) -> Shape:
        self._nodes += 1
        if not isinstance(schema, dict) or depth > MAX_DEPTH or self._nodes > MAX_NODES:
            return ANY
        if isinstance(ref := schema.get("$ref"), str):
            return self._read_reference(ref, depth, refs)
        if "const" in schema:
            return _literals([schema["const"]])
        if isinstance(values := schema.get("enum"), list):
            return _literals(values)
        for key in ("anyOf", "oneOf"):
            if isinstance(variants := schema.get(key), list) and not schema.get("properties"):
                return self._union(variants, depth, refs)
        if isinstance(parts := schema.get("allOf"), list):
            return self._merged(schema, parts, depth, refs)
        kind = schema.get("type")
        if isinstance(kind, list):
            variants = [{**schema, "type": one} for one in kind if isinstance(one, str)]
            return self._union(variants, depth, refs)
        return self._read_type(schema, kind, depth, refs)

    def _read_type(
        self, schema: Mapping[str, Any], kind: object, depth: int, refs: tuple[str, ...]
    ) -> Shape:
        if kind == "array":
            return Array(self._read(schema.get("items"), depth + 1, refs))
        properties = schema.get("properties")
        if isinstance(properties, dict) and properties and kind in ("object", None):
            return self._object(schema, properties, depth, refs)
        if kind == "object":
            more = schema.get("additionalProperties")
            return Map(self._read(more, depth + 1, refs) if isinstance(more, dict) else ANY)
        return Scalar(str(kind)) if kind in SCALARS else ANY

    def _object(
        self,
        schema: Mapping[str, Any],
        properties: Mapping[str, Any],
        depth: int,
        refs: tuple[str, ...],
    ) -> Shape:
        if len(properties) > MAX_FIELDS:
            return Map(ANY)
        required = schema.get("required")
        names = required if isinstance(required, list) else []
        fields = tuple(
            Field(name, self._read(value, depth + 1, refs), name in names, _description(value))
            for name, value in properties.items()
        )
        more = schema.get("additionalProperties")
        return Object(fields, more is True or (isinstance(more, dict) and bool(more)))

    def _union(self, variants: Sequence[Any], depth: int, refs: tuple[str, ...]) -> Shape:
        if len(variants) > MAX_VARIANTS:
            return ANY
        shapes: dict[Shape, None] = {}
        for variant in variants:
            shape = self._read(variant, depth + 1, refs)
            shapes |= dict.fromkeys(shape.variants if isinstance(shape, Union) else [shape])
        if ANY in shapes or not shapes:
            return ANY
        return next(iter(shapes)) if len(shapes) == 1 else Union(tuple(shapes))

    def _merged(
        self, schema: Mapping[str, Any], parts: Sequence[Any], depth: int, refs: tuple[str, ...]
    ) -> Shape:
        """Return the shape of a schema that must match all its parts: objects are merged."""
        rest = {key: value for key, value in schema.items() if key != "allOf"}
        is_alone = not (rest.keys() & {"type", "properties", "anyOf", "oneOf"})
        schemas = [*parts[:MAX_VARIANTS], *([] if is_alone else [rest])]
        shapes = [self._read(part, depth + 1, refs) for part in schemas]
        if len(shapes) == 1:
            return shapes[0]
        fields: dict[str, Field] = {}
        for shape in shapes:
            known = self.objects.get(shape.name) if isinstance(shape, Reference) else shape
            if not isinstance(known, Object):
                return Map(ANY) if isinstance(known, Map) else ANY
            fields |= {one.name: one for one in known.fields}
        return Object(tuple(fields.values()))

    def _read_reference(self, ref: str, depth: int, refs: tuple[str, ...]) -> Shape:
        if ref in self._names:
            return Reference(self._names[ref])
        target = _resolve(self.root, ref)
        if target is None or ref in refs:
            return ANY  # not here, or a list that contains itself
        if _is_object(target):
            name = self._names[ref] = f"{self.prefix}_{_identifier(ref)}_{len(self._names) + 1}"
            shape = self._read(target, 1, (*refs, ref))
            if isinstance(shape, Object):
                self.objects[name] = shape
                return Reference(name)
            # Too large or odd: what refers to it must not find it missing.
            self.objects[name] = Object((), is_open=True)
            return shape
        return self._read(target, depth + 1, (*refs, ref))


def parameters(schema: Any, prefix: str) -> tuple[Object, dict[str, Object]]:
    """Return the parameters of a tool, and the objects that they name."""
    reader = ShapeReader(schema, prefix)
    shape = reader.read()
    if isinstance(shape, Reference):
        shape = reader.objects[shape.name]
    return shape if isinstance(shape, Object) else Object((), is_open=True), reader.objects


def _is_object(schema: Any) -> bool:
    return isinstance(schema, dict) and bool(schema.get("properties"))


def _literals(values: Sequence[Any]) -> Shape:
    if not 0 < len(values) <= MAX_LITERALS:
        return _common_scalar(values)
    for value in values:
        if not (value is None or isinstance(value, bool | int | str)):
            return _common_scalar(values)
        if isinstance(value, str) and (len(value) > MAX_LITERAL_LENGTH or not value.isprintable()):
            return _common_scalar(values)
    # A dictionary takes 1 and True for the same key, so the type belongs to the key.
    unique = {(type(value), value): value for value in values}
    return Literals(tuple(unique.values()))


def _common_scalar(values: Sequence[Any]) -> Shape:
    return Scalar("string") if values and all(isinstance(v, str) for v in values) else ANY


def _resolve(root: Any, ref: str) -> Any:
    """Return what a local reference points to; None if there is nothing."""
    if ref == "#":
        return root
    if not ref.startswith("#/"):
        return None
    value = root
    for part in ref[2:].split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _identifier(text: str) -> str:
    last = text.rpartition("/")[2]
    return "".join(char if char.isascii() and char.isalnum() else "_" for char in last)[:30]


def _description(schema: Any) -> str:
    text = schema.get("description") if isinstance(schema, dict) else None
    return one_line(text) if isinstance(text, str) else ""


def shorten(text: str, length: int) -> str:
    """Return one line of a description, truncated with an ellipsis."""
    line = one_line(text)
    return line if len(line) <= length else line[: length - 1].rstrip() + "…"


def described(fields: Sequence[Field]) -> Iterator[Field]:
    """Return the fields that have a description."""
    return (one for one in fields if one.description)
