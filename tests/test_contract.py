"""The contract is what the golden files say: a change to it is a decision, never an accident."""

import json

import pytest
from ninja.openapi.schema import OpenAPISchema

from tests.support import contract
from toolcrib.api import api


@pytest.mark.parametrize("part", contract.PARTS)
def test_the_contract_is_unchanged(part):
    golden = json.loads((contract.GOLDEN / f"{part}.json").read_text())
    now = json.loads(json.dumps(contract.PARTS[part]()))
    assert now == golden, "if intended: python -m tests.support.contract"


def test_different_schemas_have_different_names(monkeypatch):
    """The OpenAPI document keeps one schema per name: a second one would replace it silently."""
    schemas: dict[str, list[object]] = {}

    def collect(self, definitions):
        for name, schema in definitions.items():
            known = schemas.setdefault(name, [])
            if schema not in known:
                known.append(schema)
        self.schemas.update(definitions)

    monkeypatch.setattr(OpenAPISchema, "add_schema_definitions", collect)
    api.get_openapi_schema()
    assert len(schemas) > 80
    assert [name for name, known in schemas.items() if len(known) > 1] == []
