"""Every example of the OpenAPI document, sent as it is.

UPDATE_GOLDEN=1 records the answers as examples.
"""

import json
import os
import re
from urllib.parse import urlencode

import pytest
from jsonschema import Draft202012Validator

from servers.models import Server
from tests.support.api_objects import make_objects
from tests.support.asgi_requests import send_api
from tests.support.contract import ROOT
from tests.support.factories import ingest_tools, tool_object
from toolcrib.api import api
from toolcrib.lib.openapi import examples
from toolcrib.lib.openapi.document import parameters
from toolcrib.lib.openapi.error_codes import CODES

pytestmark = [pytest.mark.timeout(120)]
DOCUMENT = api.get_openapi_schema()
OPERATIONS = {
    operation["operationId"]: (method.upper(), path, operation)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
}
WITH_BODY = [name for name, (_, _, item) in OPERATIONS.items() if "requestBody" in item]
WITH_QUERY = sorted({operation for _, operation, item in parameters(DOCUMENT) if "example" in item})
# What an operation answers in a test, without an engine of scripts or an agent that may use one.
STATUSES = {"run_script": 403}


@pytest.fixture
def objects(db):
    return make_objects()


def address(path, operation_id, objects):
    """Return the path with the ids of existing objects."""
    ids = objects["ids"]
    area = "/" + path.removeprefix("/api/v1/").split("/")[0]
    own = {"name": ids.get(area), "key": "destructive" if area == "/rule-presets" else ids["key"]}
    if operation_id == "report_result":
        own["call_id"] = ids["client_call_id"]
    for name, value in {**ids, **own}.items():
        path = path.replace("{" + name + "}", str(value))
    return path


def send(operation_id, objects, query=""):
    method, path, operation = OPERATIONS[operation_id]
    is_agents = {"AgentAuth": []} in operation["security"]
    headers = {"Authorization": f"Bearer {objects['agent' if is_agents else 'admin']}"}
    body = examples.BODIES.get(operation_id)
    data = b"" if body is None else json.dumps(body).encode()
    url = address(path, operation_id, objects) + (f"?{query}" if query else "")
    return send_api(method, url, data, headers)


def test_every_body_has_an_example():
    missing = [
        name
        for name in WITH_BODY
        if "example" not in OPERATIONS[name][2]["requestBody"]["content"]["application/json"]
    ]
    assert missing == []
    assert examples.BODIES.keys() <= set(WITH_BODY)


@pytest.mark.parametrize("operation_id", WITH_BODY)
def test_the_example_of_a_body_is_accepted(operation_id, objects):
    response = send(operation_id, objects)
    expected = STATUSES.get(operation_id)
    assert response.status_code == expected if expected else response.status_code < 300, (
        response.status_code,
        response.content,
    )


@pytest.mark.parametrize("operation_id", WITH_QUERY)
def test_the_examples_of_parameters_are_accepted(operation_id, objects):
    _, _, operation = OPERATIONS[operation_id]
    values = {
        item["name"]: item["example"] for item in operation["parameters"] if "example" in item
    }
    response = send(operation_id, objects, urlencode(values, doseq=True))
    assert response.status_code < 300, (response.status_code, response.content)


# --- Answers --------------------------------------------------------------------------------------

ANSWERS = ROOT / "toolcrib" / "lib" / "openapi" / "answers.json"
ANSWERED = {
    name: response["content"]["application/json"]["schema"]
    for name, (_, _, operation) in OPERATIONS.items()
    for status, response in operation["responses"].items()
    if status < 300 and "application/json" in response.get("content", {})
}
# Written by hand: of an empty installation, the answers to these are empty or say that it has not
# what they need. `UNSENT` cannot be sent: a test of a schema has no engine of scripts.
WRITTEN = {
    "call_tool", "get_call", "get_golden_standing", "get_health", "get_masking", "get_prices",
    "get_script", "lint_tool", "list_alerts", "list_failed_searches", "list_model_costs",
    "list_server_features", "list_server_syncs", "list_tool_changes", "list_webhook_deliveries",
    "run_script", "test_server", "test_server_draft",
}  # fmt: skip
UNSENT = {"run_script"}
WITH_PARAMETERS = {"try_search", "remove_group_members"}
# Fixed values in recorded answers: pattern, value.
FIXED = [
    (re.compile(r"tcb_[\w-]{20,}"), "tcb_not-a-key"),
    (re.compile(r"tcb_\w{6}\b"), "tcb_4f7Qaz"),
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00)"), "2026-11-19T09:30:00Z"),
    (re.compile(r"\b(ses|call|run|grant)_[\w-]{16,}"), r"\1_2gBxT1LqXc"),
    (re.compile(r"\b[0-9a-f]{64}\b"), "9f86d081884c7d65" * 4),
    (re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"),
     "0192f0c1-2d3e-7a4b-8c5d-6e7f8091a2b3"),
]  # fmt: skip
MAX_ROWS = 2


def shorten(value):
    """Return an answer as an example: few rows of each list, with fixed ids and times."""
    if isinstance(value, dict):
        return {key: shorten(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shorten(item) for item in value[:MAX_ROWS]]
    if isinstance(value, float):
        return round(value, 1)
    if isinstance(value, str):
        for pattern, fixed in FIXED:
            value = pattern.sub(fixed, value)
    return value


def change_a_tool(objects):
    """Make a definition await review."""
    server = Server.objects.get(slug="github")
    ingest_tools(server, tool_object("create_issue", description="Open an issue."))
    objects["ids"]["/tools"] = "github__create_issue"


def approve_a_tool(objects):
    change_a_tool(objects)
    assert send("approve_tool", objects).status_code == 200


def edit_a_group(objects):
    response = send("edit_group", objects)
    objects["ids"]["audit_id"] = json.loads(response.content)["undo"][0]


BEFORE = {
    "approve_tool": change_a_tool,
    "reject_tool_change": change_a_tool,
    "undo_tool_approval": approve_a_tool,
    "undo_group_write": edit_a_group,
}


def answer_of(operation_id, objects):
    _, _, operation = OPERATIONS[operation_id]
    values = {
        item["name"]: item["example"]
        for item in operation.get("parameters", [])
        if "example" in item and operation_id in WITH_PARAMETERS
    }
    if operation_id in BEFORE:
        BEFORE[operation_id](objects)
    response = send(operation_id, objects, urlencode(values, doseq=True))
    assert response.status_code < 300, (response.status_code, response.content)
    return json.loads(response.content)


def record(operation_id, answer):
    recorded = json.loads(ANSWERS.read_text()) | {operation_id: shorten(answer)}
    in_order = {name: recorded[name] for name in OPERATIONS if name in recorded}
    ANSWERS.write_text(json.dumps(in_order, indent=1, ensure_ascii=False) + "\n")


@pytest.mark.parametrize("operation_id", [name for name in ANSWERED if name not in UNSENT])
def test_the_example_of_an_answer_has_the_fields_of_a_real_one(operation_id, objects):
    answer = answer_of(operation_id, objects)
    if os.environ.get("UPDATE_GOLDEN") and operation_id not in WRITTEN:
        record(operation_id, answer)
    example = examples.read_answers()[operation_id]
    assert type(example) is type(answer)
    if isinstance(answer, dict):
        assert example.keys() == answer.keys()


def test_every_answer_has_an_example_of_its_schema():
    answers = examples.read_answers()
    assert answers.keys() == ANSWERED.keys()
    for name, schema in ANSWERED.items():
        whole = schema | {"components": DOCUMENT["components"]}
        problems = [
            error.message for error in Draft202012Validator(whole).iter_errors(answers[name])
        ]
        assert problems == [], name


def test_every_error_has_an_example_with_a_code_of_its_status():
    for status, codes in CODES.items():
        schema = DOCUMENT["components"]["schemas"][f"Error{status}"]
        [example] = schema["examples"]
        assert example["error"]["code"] in codes
        assert Draft202012Validator(schema | {"components": DOCUMENT["components"]}).is_valid(
            example
        )


def test_examples_of_errors_are_what_is_answered(objects):
    def answer(method, path, body=b"", key="admin"):
        headers = {"Authorization": f"Bearer {objects.get(key, key)}"}
        response = send_api(method, f"/api/v1{path}", body, headers)
        error = json.loads(response.content)["error"]
        return response.status_code, error["code"], error["message"]

    for status, request in {
        400: ("POST", "/groups", b"{"),
        401: ("GET", "/tools", b"", "tcb_unknown"),
        403: ("POST", "/groups", b"{}", "operator"),
        404: ("GET", "/tools/none"),
        413: ("POST", "/groups", b'"' + b"x" * 2_000_000 + b'"'),
        422: ("GET", "/tools?limit=999"),
    }.items():
        example = examples.ERRORS[status]["error"]
        assert answer(*request) == (status, example["code"], example["message"])
