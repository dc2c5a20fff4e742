"""Property-based tests of the API, generated from its OpenAPI document.

Every operation gets valid and invalid requests, first with random ids and then with ids of
existing objects: random ones as every kind of caller, and those at the limits of its schema, with
every check, as the caller that it is for. They are the same in every run. What is excluded, and
why, is in schemathesis_exclusions.txt.
"""

from dataclasses import dataclass
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path

import pytest
import schemathesis
from django.core.signals import request_finished, request_started
from django.db import close_old_connections
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS as REGISTERED_CHECKS
from schemathesis.checks import not_a_server_error
from schemathesis.core.parameters import ParameterLocation
from schemathesis.generation.hypothesis.builder import (
    HypothesisTestConfig,
    HypothesisTestMode,
    create_test,
)
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.api_objects import make_objects
from tests.support.asgi_requests import wsgi_application
from toolcrib.api import api

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
DOCUMENT = api.get_openapi_schema()
OPERATIONS = [
    (method.upper(), path, scope)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
    for scope in ("agent", "operator", "admin")
    if scope != "agent" or {"AgentAuth": []} in operation["security"]
    if not path.endswith("/stream")  # has no end
]
EXAMPLES = settings(
    max_examples=12,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
UNREACHABLE = "http://127.0.0.1:9/mcp"  # the only URL that these tests connect to


@lru_cache
def load_schema():
    return schemathesis.openapi.from_wsgi("/api/v1/openapi.json", wsgi_application)


@pytest.fixture
def document(objects):
    """The OpenAPI document, with the application on the test's database connection."""
    for signal in (request_started, request_finished):
        signal.disconnect(close_old_connections)
    yield load_schema()
    for signal in (request_started, request_finished):
        signal.connect(close_old_connections)


@pytest.fixture
def objects(db):
    return make_objects()


def use_existing_ids(case, ids):
    """Replace ids in the request by existing ones; return whether there are any."""
    area = "/" + case.path.removeprefix("/api/v1/").split("/")[0]
    for name in case.path_parameters or {}:
        case.path_parameters[name] = ids[area] if name == "name" else ids[name]
    return bool(case.path_parameters)


def replace_urls(value):
    """Replace generated URLs, so that no request connects to another host."""
    if isinstance(value, dict):
        return {key: replace_urls(sub) for key, sub in value.items()}
    if isinstance(value, list):
        return [replace_urls(sub) for sub in value]
    return UNREACHABLE if isinstance(value, str) and "//" in value else value


def fuzz(document, objects, method, path, scope):
    operation = document[path][method]
    headers = {"Authorization": f"Bearer {objects[scope]}"}
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

        @EXAMPLES
        @given(operation.as_strategy(generation_mode=mode))
        def send(case):
            case.body = replace_urls(case.body)
            case.call_and_validate(headers=headers, checks=CHECKS)
            if use_existing_ids(case, objects["ids"]):
                case.call_and_validate(headers=headers, checks=CHECKS)

        send()


@pytest.mark.parametrize(("method", "path", "scope"), OPERATIONS)
def test_every_response_is_documented(document, objects, method, path, scope):
    fuzz(document, objects, method, path, scope)


# --- Every check ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exclusion:
    check: str
    operations: str  # operation ids, or globs on them
    reason: str

    def matches(self, operation_id):
        return any(fnmatch(operation_id, each) for each in self.operations.split())


def read_exclusions():
    lines = Path(__file__).with_name("schemathesis_exclusions.txt").read_text().splitlines()
    return [Exclusion(*line.split(" | ")) for line in lines if not line.startswith("#")]


EXCLUSIONS = read_exclusions()
BY_ID = {
    operation["operationId"]: (method.upper(), path, operation)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
}


def excluded_checks(operation_id):
    """Return the names of the checks that an operation is excluded from; `*` is every check."""
    return {each.check for each in EXCLUSIONS if each.matches(operation_id)}


def caller(method, operation):
    """Return the scope of the keys that an operation is for."""
    if {"AgentAuth": []} in operation["security"]:
        return "agent"
    return "operator" if method == "GET" else "admin"


@pytest.mark.parametrize("operation_id", [x for x in BY_ID if "*" not in excluded_checks(x)])
def test_every_check_passes_at_the_limits_of_the_schema(document, objects, operation_id):
    method, path, operation = BY_ID[operation_id]
    excluded = [REGISTERED_CHECKS.get_one(name) for name in excluded_checks(operation_id)]
    headers = {"Authorization": f"Bearer {objects[caller(method, operation)]}"}

    def send(case):
        case.body = replace_urls(case.body)
        case.call_and_validate(headers=headers, excluded_checks=excluded)
        has_wrong_path = case.meta and case.meta.is_negative_at(ParameterLocation.PATH)
        if use_existing_ids(case, objects["ids"]):
            replaced = [negative_data_rejection] if has_wrong_path else []
            case.call_and_validate(headers=headers, excluded_checks=excluded + replaced)

    modes = [HypothesisTestMode.COVERAGE]
    config = HypothesisTestConfig(project=document.config, modes=modes, settings=EXAMPLES)
    create_test(operation=document[path][method], test_func=send, config=config)()


def test_exclusions_are_few_and_reasoned():
    assert len(EXCLUSIONS) <= 20
    for check in REGISTERED_CHECKS.get_all_names():
        excluded = [name for name in BY_ID if check in excluded_checks(name)]
        assert len(excluded) < len(BY_ID) / 2, check
    known = {*REGISTERED_CHECKS.get_all_names(), "*"}
    for each in EXCLUSIONS:
        assert each.check in known, each
        for part in each.operations.split():
            assert any(fnmatch(name, part) for name in BY_ID), part
        assert each.reason.endswith("."), each
