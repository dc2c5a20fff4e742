"""Every example of the OpenAPI document, sent as it is."""

import json
from urllib.parse import urlencode

import pytest

from tests.support.api_objects import make_objects
from tests.support.asgi_requests import send_api
from toolcrib.api import api
from toolcrib.lib.openapi import examples
from toolcrib.lib.openapi.document import parameters

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
