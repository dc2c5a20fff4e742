"""Each numbered requirement of the engine names the tests that show it, or says why not."""

import ast
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LINES = Path(__file__).with_name("requirements.txt").read_text().splitlines()
ROWS = [line.split(" | ") for line in LINES if not line.startswith("#")]


@lru_cache
def functions_of(path):
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, functions)}


def test_every_requirement_is_listed_once():
    assert [int(number) for number, _, _ in ROWS] == [*range(1, 83), *range(98, 103)]


def test_each_is_shown_by_tests_or_differs_by_design():
    for _, requirement, shown in ROWS:
        if shown.startswith("By design: "):
            continue
        for name in shown.split():
            path, _, function = name.partition("::")
            assert function.startswith("test_"), requirement
            assert function in functions_of(path), f"{requirement}: {name}"
