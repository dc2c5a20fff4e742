"""Rules about the code as a whole. Those about packages come with the packages."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
APPS = ("catalog", "servers", "sessions_app", "toolcrib")


def modules():
    for app in APPS:
        for path in sorted((ROOT / app).rglob("*.py")):
            if "migrations" not in path.parts:
                yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


MODULES = dict(modules())


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_nothing_marks_text_as_safe_html():
    for path in (ROOT / "templates").rglob("*.*"):
        assert "|safe" not in path.read_text(), path
        assert "autoescape off" not in path.read_text(), path
    for path, tree in MODULES.items():
        assert "django.utils.safestring.mark_safe" not in set(imports(tree)), path


def test_no_page_template_is_over_200_lines_and_no_script_over_150():
    for path in (ROOT / "templates").rglob("*.html"):
        assert len(path.read_text().splitlines()) <= 200, path
    for path in (ROOT / "static" / "js").glob("*.js"):
        assert len(path.read_text().splitlines()) <= 150, path
