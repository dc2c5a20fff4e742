"""External contract as plain values: everything that a release must not change by accident.

`python -m tests.support.contract` writes tests/golden/contract/; test_contract.py compares with it.
"""

import ast
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
GOLDEN = ROOT / "tests" / "golden" / "contract"
APPS = ("catalog", "servers", "sessions_app", "toolcrib")
# Error codes that are passed as positional arguments.
OTHER_CODES = frozenset(
    {"definition_changed", "denied", "held", "input_required", "meta_tool", "missing"}
    | {"rejected", "result_invalid", "result_too_large", "server_disabled", "waiting"}
)
# Texts and names that may change without breaking a client.
TEXT_KEYS = frozenset({"title", "description", "summary", "tags", "examples", "example"})


def openapi() -> dict[str, Any]:
    """Return every operation by method and path, with parameters, bodies and responses.

    The bodies of errors are beside the operations, by name.
    """
    from toolcrib.api import api

    document = json.loads(json.dumps(api.get_openapi_schema()))
    components = document["components"]["schemas"]
    operations: dict[str, Any] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            schema = _inline(operation, components, ())
            schema["parameters"] = sorted(
                schema.get("parameters", []), key=lambda item: (item["in"], item["name"])
            )
            operations[f"{method.upper()} {path}"] = schema
    errors = {
        name: _inline(components[name], components, ()) for name in components if is_error(name)
    }
    return operations | errors


def is_error(name: str) -> bool:
    """Return whether a schema is the body of errors of one status, which many operations have."""
    return name.startswith("Error") and name[5:].isdecimal()


def _inline(value: Any, components: dict[str, Any], inside: tuple[str, ...]) -> Any:
    """Replace references by their schemas, and remove texts."""
    if isinstance(value, list):
        return [_inline(item, components, inside) for item in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        if name in inside:
            return {"recursive": True}
        if is_error(name):
            return {"error": name}
        return _inline(components[name], components, (*inside, name))
    return {
        key: {name: _inline(schema, components, inside) for name, schema in item.items()}
        if key == "properties"
        else _inline(item, components, inside)
        for key, item in value.items()
        if (key not in TEXT_KEYS or not isinstance(item, str | list))
        and not (key == "example" and "schema" in value)
    }


def url_names() -> dict[str, str]:
    """Return every named URL of the pages, with its pattern."""
    from django.urls import get_resolver

    def walk(patterns: Any, prefix: str) -> Iterator[tuple[str, str]]:
        for pattern in patterns:
            route = prefix + str(pattern.pattern)
            if hasattr(pattern, "url_patterns"):
                yield from walk(pattern.url_patterns, route)
            elif pattern.name and not route.startswith("api/"):
                yield pattern.name, route

    return dict(sorted(walk(get_resolver().url_patterns, "")))


def celery_tasks() -> dict[str, Any]:
    """Return task names, the beat schedule and the queue routes."""
    from toolcrib.celery import app

    app.loader.import_default_modules()
    tasks = sorted(name for name in app.tasks if name.partition(".")[0] in APPS)
    schedule = {
        name: {key: str(entry[key]) for key in ("task", "schedule")}
        for name, entry in sorted(app.conf.beat_schedule.items())
    }
    routes = app.conf.task_routes
    return {"tasks": tasks, "schedule": schedule, "routes": json.loads(json.dumps(routes))}


def commands() -> dict[str, list[str]]:
    """Return our management commands with their arguments."""
    from django.core.management import get_commands, load_command_class

    arguments = {}
    for name, app in sorted(get_commands().items()):
        if app in APPS:
            parser = load_command_class(app, name).create_parser("manage.py", name)
            arguments[name] = sorted(
                "/".join(action.option_strings) or action.dest
                for action in parser._actions
                if "help" not in action.dest
            )
    return arguments


def audit_verbs() -> list[str]:
    from catalog.audit import SENTENCES

    return sorted(SENTENCES)


def trees() -> Iterator[ast.Module]:
    for folder in (*APPS, "clients/python/src"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "migrations" not in path.parts:
                yield ast.parse(path.read_text())


def settings() -> dict[str, str]:
    """Return every environment variable with its type and default, as written in the code."""
    variables: dict[str, str] = {}
    for tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            reads = isinstance(node.func.value, ast.Name) and node.func.value.id == "env"
            if reads and node.args and isinstance(node.args[0], ast.Constant):
                arguments = [ast.unparse(item) for item in (*node.args[1:], *node.keywords)]
                name = str(node.args[0].value)
                variables[name] = f"{node.func.attr}({', '.join(arguments)})"
    return dict(sorted(variables.items()))


def error_codes() -> list[str]:
    """Return error codes: values of the attribute, keyword or key `code`, and OTHER_CODES."""
    codes: set[str] = set()
    for tree in trees():
        for node in ast.walk(tree):
            values: list[ast.expr | None] = []
            if isinstance(node, ast.Constant) and node.value in OTHER_CODES:
                codes.add(str(node.value))
            elif isinstance(node, ast.ClassDef):
                values = [
                    item.value
                    for item in node.body
                    if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == "code"
                ]
            elif isinstance(node, ast.keyword) and node.arg == "code":
                values = [node.value]
            elif isinstance(node, ast.Dict):
                pairs = zip(node.keys, node.values, strict=True)
                values = [
                    value
                    for key, value in pairs
                    if isinstance(key, ast.Constant) and key.value == "code"
                ]
            for value in values:
                codes |= {
                    item.value
                    for item in ast.walk(value or ast.Constant(None))
                    if isinstance(item, ast.Constant) and isinstance(item.value, str) and item.value
                }
    return sorted(codes)


def event_kinds() -> list[str]:
    from sessions_app.models import EventKind

    return sorted(EventKind.values)


PARTS = {
    "openapi": openapi,
    "url_names": url_names,
    "celery": celery_tasks,
    "commands": commands,
    "audit_verbs": audit_verbs,
    "settings": settings,
    "error_codes": error_codes,
    "event_kinds": event_kinds,
}


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "toolcrib.settings")
    import django

    import tests.support.environment  # noqa: F401 - a data folder of its own

    django.setup()
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name, part in PARTS.items():
        text = json.dumps(part(), indent=1, sort_keys=True, ensure_ascii=False)
        (GOLDEN / f"{name}.json").write_text(text + "\n")
        sys.stdout.write(f"{name}: {len(text):,} characters\n")


if __name__ == "__main__":
    main()
