"""The contract is what the golden files say: a change to it is a decision, never an accident."""

import json

import pytest

from tests.support import contract


@pytest.mark.parametrize("part", contract.PARTS)
def test_the_contract_is_unchanged(part):
    golden = json.loads((contract.GOLDEN / f"{part}.json").read_text())
    now = json.loads(json.dumps(contract.PARTS[part]()))
    assert now == golden, "if intended: python -m tests.support.contract"
