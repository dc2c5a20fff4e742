"""Rules about packages: which may import which, who may import the SDK, where async code is."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("toolcrib.lib", "catalog", "servers", "sessions_app", "toolcrib")  # lowest first
MAX_MODULES = 15
MAX_TEMPLATE_COLUMNS = 140

# Modules that serve pages and endpoints stand above every domain: they may read from any app, and
# no domain module imports them.
PAGE_MODULES = {
    "api",
    "board",
    "detail",
    "endpoint",
    "filters",
    "forms",
    "presenters",
    "queries",
    "urls",
    "views",
}
PAGE_PACKAGES = {
    "servers.web",
    "sessions_app.playground",
    "sessions_app.review",
    "sessions_app.usage",
    "toolcrib.pages",
}
# The packages that may import a network library.
SPEAKS_MCP = {"servers.connections", "servers.transports", "sessions_app.mcp"}
NETWORK = {
    "mcp": SPEAKS_MCP,
    "mcp_types": SPEAKS_MCP,
    "httpx": {"servers.transports"},
    "httpx2": {"servers.transports"},
    "httptools": {"servers.transports"},
}
PROGRAMS = {"servers.demo", "servers.demo_office"}  # MCP servers that run as their own process
ASYNC = {
    "servers.connections",
    "servers.sync",
    "servers.transports",
    "sessions_app.agents",
    "sessions_app.dispatch",
    "sessions_app.held_calls",
    "sessions_app.scripts",
    "sessions_app.ledger",
    "sessions_app.mcp",
    "toolcrib.http",
    "toolcrib.lib",
    "toolcrib.lib.protocols",
    "toolcrib.runtime",
}


def modules():
    for app in ("catalog", "servers", "sessions_app", "toolcrib"):
        for path in sorted((ROOT / app).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            if ".migrations." not in name:
                yield name.removesuffix(".__init__"), path


TREES = {name: ast.parse(path.read_text()) for name, path in modules()}


PACKAGES = {name for name, path in modules() if path.name == "__init__.py"}


def nodes(tree):
    """Walk a module without what only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        yield from nodes(node)


def imports(name):
    """Return the modules that a module imports, also inside functions."""
    for node in nodes(TREES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in TREES else str(node.module)


IMPORTS = {name: sorted(set(imports(name))) for name in TREES}
OURS = [(name, target) for name in TREES for target in IMPORTS[name] if target in TREES]


def layer(name):
    return next(i for i, start in enumerate(LAYERS) if f"{name}.".startswith(f"{start}."))


def package(name):
    return name if name in PACKAGES else name.rpartition(".")[0]


def is_page(name):
    last = name.rpartition(".")[2]
    return (
        package(name) in PAGE_PACKAGES
        or last in PAGE_MODULES
        or last.endswith(("_views", "_api"))
        or last == "tasks"  # Celery finds them at the root of an app
        or ".management." in name
    )


def test_a_package_has_2_to_15_modules():
    sizes = Counter(package(name) for name in TREES if name not in PACKAGES)
    assert {name: size for name, size in sizes.items() if size > MAX_MODULES} == {}
    empty = {name for name in PACKAGES - sizes.keys() if name.count(".") == 1}
    assert {name for name in empty if not name.endswith(".management")} == set()


def test_domain_modules_import_downwards():
    upwards = [
        f"{name} imports {target}"
        for name, target in OURS
        if layer(target) > layer(name) and not is_page(name)
    ]
    assert upwards == []


def test_the_library_imports_nothing_else_of_ours():
    assert [pair for pair in OURS if layer(pair[0]) == 0 and layer(pair[1]) > 0] == []


def test_no_domain_module_imports_a_page_module():
    wrong = [
        f"{name} imports {target}"
        for name, target in OURS
        if is_page(target) and not is_page(name) and layer(name) < layer("toolcrib")
    ]
    assert wrong == []


def test_models_of_another_app_are_not_reached_by_a_string():
    names = [name for name in TREES if layer(name) < layer("toolcrib")]
    calls = [name for name in names if "get_model(" in ast.unparse(TREES[name])]
    assert calls == []


@pytest.mark.parametrize("library", NETWORK)
def test_a_network_library_is_imported_by_its_packages_only(library):
    users = {
        package(name)
        for name in TREES
        if name not in PROGRAMS
        and any(target.partition(".")[0] == library for target in IMPORTS[name])
    }
    assert users <= NETWORK[library]


def test_async_functions_stand_in_packages_that_serve_or_connect():
    """Besides them: an endpoint that hands over to such a package, the ASGI entry, a command."""
    users = {
        name
        for name, tree in TREES.items()
        if any(isinstance(node, ast.AsyncFunctionDef) for node in ast.walk(tree))
    }
    entries = {name for name in users if is_page(name) or package(name) == "toolcrib"}
    assert {package(name) for name in users - entries} <= ASYNC


def test_private_attributes_of_the_sdk_are_touched_in_one_module():
    private = re.compile(r"\b(session|dispatcher|connection)\._(stamp|dispatcher|connection)\b")
    users = {name for name, path in modules() if private.search(path.read_text())}
    assert users <= {"servers.connections.sdk_compat"}


TEMPLATES = sorted((ROOT / "templates").rglob("*.html"))


def test_no_template_marks_text_as_safe():
    marked = [
        path.name for path in TEMPLATES if re.search(r"\|\s*safe\b|autoescape", path.read_text())
    ]
    marked += [name for name, path in modules() if "mark_safe" in path.read_text()]
    assert marked == []


def test_lines_of_templates_fit_a_window():
    long = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in TEMPLATES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > MAX_TEMPLATE_COLUMNS
    ]
    assert long == []


def test_stylesheets_and_scripts_have_their_blocks():
    wrong = [
        path.name
        for path in TEMPLATES
        if re.search(r"{% block scripts %}(?:(?!{% endblock).)*<link", path.read_text(), re.DOTALL)
        or re.search(r"<script src=(?:(?!type=\"module\"|>).)*>", path.read_text())
    ]
    assert wrong == []
