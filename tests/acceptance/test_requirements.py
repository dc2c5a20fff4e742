"""Requirements of the engine and defects that were fixed name the tests that show them."""

import ast
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def read_rows(name):
    """Return the rows of a table in this folder, as lists of columns."""
    lines = Path(__file__).with_name(name).read_text().splitlines()
    return [line.split(" | ") for line in lines if not line.startswith("#")]


@lru_cache
def functions_of(path):
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, functions)}


def assert_tests_exist(row, names):
    assert names.split(), row
    for name in names.split():
        path, _, function = name.partition("::")
        assert function.startswith("test_"), row
        assert function in functions_of(path), f"{row}: {name}"


def test_every_requirement_is_listed_once():
    numbers = [int(number) for number, _, _ in read_rows("requirements.txt")]
    assert numbers == [*range(1, 83), *range(98, 103)]


ROWS_OF_FEATURES = [*range(1, 27), *range(29, 35), 36, 37, 41, 42, 44, *range(49, 59)]


def test_every_row_of_the_feature_table_is_listed_once():
    """Those that concern the engine."""
    numbers = [int(number) for number, _, _ in read_rows("features.txt")]
    assert numbers == ROWS_OF_FEATURES
    assert len(numbers) == 47


@pytest.mark.parametrize("name", ["requirements.txt", "features.txt"])
def test_each_is_shown_by_tests_or_differs_by_design(name):
    for _, requirement, shown in read_rows(name):
        if not shown.startswith("By design: "):
            assert_tests_exist(requirement, shown)


def test_every_defect_names_tests_that_exist_or_a_documented_limit():
    limits = " ".join((ROOT / "docs" / "security.md").read_text().split())
    rows = read_rows("defects.txt")
    assert len(rows) >= 40
    assert len({defect for defect, _ in rows}) == len(rows)
    for defect, shown in rows:
        if shown.startswith("Not built: "):
            assert shown.removeprefix("Not built: ") in limits, defect
        else:
            assert_tests_exist(defect, shown)
