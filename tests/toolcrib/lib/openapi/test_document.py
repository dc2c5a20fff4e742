"""The OpenAPI document describes every operation, parameter and field, in valid JSON Schema."""

import ast
import re
from collections import Counter, defaultdict

import pytest
from django.test import Client
from jsonschema import Draft202012Validator

from tests.support.contract import APPS, ROOT
from toolcrib.api import api
from toolcrib.lib.openapi.document import RANGES, fields, find_entry, parameters
from toolcrib.lib.openapi.error_codes import CODES
from toolcrib.lib.openapi.vocabulary import FIELDS, PARAMETERS

DOCUMENT = api.get_openapi_schema()
OPERATIONS = [
    (f"{method.upper()} {path}", operation)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
]


def schemas_in(value):
    """Return every object in a document."""
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict | list | tuple):
            yield from schemas_in(item)


def test_every_operation_is_described():
    assert len(OPERATIONS) > 120
    assert [name for name, operation in OPERATIONS if not operation.get("description")] == []


def test_every_parameter_is_described():
    missing = [
        f"{operation}: {item['name']}"
        for _, operation, item in parameters(DOCUMENT)
        if not item.get("description")
    ]
    assert missing == []


def test_every_field_is_described():
    assert [key for _, key, schema in fields(DOCUMENT) if not schema.get("description")] == []


def test_the_vocabulary_contains_only_what_the_api_has():
    keys = [key for _, key, _ in fields(DOCUMENT)]
    keys += [
        f"{path.removeprefix('/api/v1')}.{item['name']}" for path, _, item in parameters(DOCUMENT)
    ]
    used = {find_entry(key, words) for key in keys for words in (FIELDS, PARAMETERS)}
    assert (FIELDS.keys() | PARAMETERS.keys()) - used == set()


def test_operation_ids_are_verbs_and_resources_and_unique():
    ids = Counter(operation["operationId"] for _, operation in OPERATIONS)
    assert [name for name, times in ids.items() if times > 1] == []
    assert [name for name in ids if not re.fullmatch(r"[a-z]+(_[a-z]+)+", name)] == []
    modules = ("api_", "catalog_", "servers_", "sessions_app_", "toolcrib_")
    assert [name for name in ids if name.startswith(modules)] == []
    verbs = {"get": ("get_", "list_", "export_", "lint_", "try_", "stream_"), "delete": (
        "delete_", "remove_")}  # fmt: skip
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            allowed = verbs.get(method)
            assert allowed is None or operation["operationId"].startswith(allowed), (method, path)


def test_ranges_are_json_schema():
    found = [item for item in schemas_in(DOCUMENT["components"]) if RANGES.keys() & item.keys()]
    assert found == []
    timeout = DOCUMENT["components"]["schemas"]["CallIn"]["properties"]["timeout"]
    assert {"exclusiveMinimum": 0, "maximum": 900}.items() <= timeout["anyOf"][0].items()
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_other_names_of_a_field_are_deprecated():
    properties = DOCUMENT["components"]["schemas"]["CallIn"]["properties"]
    assert {name for name, item in properties.items() if item.get("deprecated")} == {"name", "args"}
    for schema in ("ToolsIn", "AssignIn", "MemberPreloadIn"):
        properties = DOCUMENT["components"]["schemas"][schema]["properties"]
        assert properties["tools"]["deprecated"] is True
        assert "deprecated" not in properties["tool_names"]
    for schema in ("ToolOut", "ToolDetail", "MemberOut"):
        properties = DOCUMENT["components"]["schemas"][schema]["properties"]
        assert properties["mcpServer"]["deprecated"] is True
        assert "deprecated" not in properties["server"]


def test_an_operation_lists_only_the_statuses_that_it_can_answer():
    """Each request of the tests checks the opposite: that a status it got is listed."""
    of_errors = Counter()
    for name, operation in OPERATIONS:
        errors = {status for status in operation["responses"] if status >= 400}
        of_errors[frozenset(errors)] += 1
        assert errors >= {401, 422, 503}, name
        assert 404 not in errors or "{" in name, name
        has_body = "requestBody" in operation
        assert (413 in errors) == has_body, name
        assert (400 in errors) == (has_body or operation["operationId"] == "try_search"), name
        is_agents = {"AgentAuth": []} in operation["security"]
        assert 429 not in errors or is_agents, name
        is_reading = is_agents and name.startswith("GET ")
        assert 403 in errors or is_reading, name
        assert 409 not in errors or not name.startswith("GET ") or "{" in name, name
    assert len(of_errors) > 10


@pytest.mark.parametrize("status", CODES)
def test_an_error_lists_the_codes_of_its_status(status):
    schemas = DOCUMENT["components"]["schemas"]
    reference = schemas[f"Error{status}"]["properties"]["error"]["$ref"]
    detail = schemas[reference.rpartition("/")[2]]
    assert detail["properties"]["code"]["enum"] == list(CODES[status])
    for name, operation in OPERATIONS:
        response = operation["responses"].get(status)
        if response:
            schema = response["content"]["application/json"]["schema"]
            assert schema == {"$ref": f"#/components/schemas/Error{status}"}, name


def errors_in_the_code():
    """Return every error code with the statuses of its exception, as the code has them."""
    classes, calls = {}, []
    for folder in APPS:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    values = {
                        ast.unparse(item.targets[0]): item.value.value
                        for item in node.body
                        if isinstance(item, ast.Assign) and isinstance(item.value, ast.Constant)
                    }
                    bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
                    classes[node.name] = bases, values
                elif isinstance(node, ast.Call):
                    calls.append(node)

    def value_of(name, attribute):
        bases, values = classes.get(name, ((), {}))
        inherited = (value_of(base, attribute) for base in bases if base != name)
        return values.get(attribute) or next(filter(None, inherited), None)

    def is_error(name):
        bases = classes.get(name, ((),))[0]
        return name == "ToolcribError" or any(is_error(base) for base in bases if base != name)

    codes = defaultdict(set)
    for name in filter(is_error, classes):
        codes[value_of(name, "status")].add(value_of(name, "code"))
    for call in calls:
        name = ast.unparse(call.func).rpartition(".")[2]
        given = {item.arg: item.value for item in call.keywords}
        if is_error(name) and {"code", "status"} & given.keys():
            statuses, values = (
                [part.value for part in ast.walk(given[key]) if isinstance(part, ast.Constant)]
                if key in given
                else [value_of(name, key)]
                for key in ("status", "code")
            )
            for status in statuses:
                codes[status] |= set(values)
    return codes


def test_the_table_of_error_codes_contains_those_of_the_code():
    errors = errors_in_the_code()
    assert len(errors) > 10
    missing = {
        status: sorted(codes - set(CODES[status]) - {"session_"})  # its end is the state
        for status, codes in errors.items()
        if status in CODES
    }
    assert {status: codes for status, codes in missing.items() if codes} == {}


def test_an_error_is_answered_with_a_code_of_its_status(admin_token):
    response = Client(headers={"Authorization": f"Bearer {admin_token}"}).get("/api/v1/tools/none")
    assert response.json()["error"]["code"] in CODES[response.status_code]
