"""The arrows between the apps, and the few modules that may touch the network or the loop."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
APPS = ("catalog", "servers", "sessions_app", "toolcrib")
MAY_IMPORT = {
    "catalog": {"catalog"},
    "servers": {"servers", "catalog"},
    "sessions_app": {"sessions_app", "servers", "catalog"},
    "toolcrib": set(APPS),
}
LEAVES = {
    "toolcrib.prepared",
    "toolcrib.errors",
    "toolcrib.charts",
    "toolcrib.filters",
    "toolcrib.paging",
    "toolcrib.api_shapes",
    "toolcrib.environment",
    "toolcrib.health",
}
# The demos are programs of their own, run in their own process.
MAY_SPEAK_MCP = {
    "servers/asking.py",
    "servers/client.py",
    "servers/explaining.py",
    "servers/link.py",
    "servers/subscribing.py",
    "servers/wires.py",
    "servers/sse.py",
    "servers/demo.py",
    "servers/demo_office.py",
    "sessions_app/mcp_endpoint.py",
    "sessions_app/mcp_server.py",
}
MAY_SPEAK_HTTP = MAY_SPEAK_MCP | {
    "servers/bodies.py",
    "servers/http1.py",
    "servers/network.py",
    "servers/faults.py",
    "toolcrib/client_http.py",
}
ASYNC = {
    "servers/asking.py",
    "servers/http1.py",
    "servers/lean.py",
    "servers/attempts.py",
    "servers/bodies.py",
    "servers/bulkhead.py",
    "servers/calling.py",
    "servers/client.py",
    "servers/errands.py",
    "servers/explaining.py",
    "servers/link.py",
    "servers/subscribing.py",
    "servers/threads.py",
    "servers/wires.py",
    "servers/sse.py",
    "servers/network.py",
    "servers/stdio.py",
    "servers/pool.py",
    "servers/listening.py",
    "servers/listing.py",
    "servers/sync.py",
    "servers/management/commands/listen.py",
    "sessions_app/api.py",
    "sessions_app/act_path.py",
    "sessions_app/bare_http.py",
    "sessions_app/call_path.py",
    "sessions_app/crowding.py",
    "sessions_app/dispatch.py",
    "sessions_app/ledger.py",
    "sessions_app/mcp_short.py",
    "sessions_app/writing.py",
    "sessions_app/operators_api.py",
    "toolcrib/asgi.py",
    "toolcrib/client_http.py",
    "toolcrib/client_loop.py",
    "toolcrib/runtime.py",
    "toolcrib/pulse.py",
    "toolcrib/collecting.py",
    "toolcrib/invalidation.py",
    "toolcrib/middleware.py",
    "toolcrib/people.py",
    "toolcrib/management/commands/serve.py",
    "sessions_app/mcp_endpoint.py",
    "sessions_app/mcp_server.py",
    "sessions_app/mcp_streams.py",
    "sessions_app/mcp_refusals.py",
    "sessions_app/revoking.py",
}
PURE = {
    "servers/pieces.py",
    "catalog/canonical.py",
    "catalog/near.py",
    "catalog/definitions.py",
    "catalog/diffs.py",
    "catalog/findings.py",
    "catalog/lints.py",
    "catalog/masking.py",
    "catalog/naming.py",
    "catalog/clauses.py",
    "catalog/evaluating.py",
    "catalog/glossary.py",
    "catalog/graph.py",
    "catalog/matching.py",
    "catalog/matrix.py",
    "catalog/meaning.py",
    "catalog/postings.py",
    "catalog/ranking.py",
    "catalog/spelling.py",
    "catalog/tokenizing.py",
    "catalog/schemas.py",
    "catalog/search.py",
    "catalog/tokens.py",
    "catalog/render.py",
    "catalog/validation.py",
    "sessions_app/formats.py",
    "sessions_app/formats_native.py",
    "sessions_app/payloads.py",
    "sessions_app/strict_json.py",
    "servers/checks.py",
    "servers/drafting.py",
    "servers/drafts.py",
    "servers/exporting.py",
    "servers/holder.py",
    "servers/importing.py",
    "servers/jsonc.py",
    "servers/messages.py",
    "servers/results.py",
    "servers/secret.py",
    "servers/spec.py",
    "sessions_app/contents.py",
    "sessions_app/marking.py",
    "sessions_app/timeline.py",
    "sessions_app/trying.py",
    "sessions_app/snippets.py",
    "toolcrib/charts.py",
    "toolcrib/client.py",
    "toolcrib/client_asks.py",
    "toolcrib/client_http.py",
    "toolcrib/client_loop.py",
    "toolcrib/client_providers.py",
    "toolcrib/client_state.py",
    "toolcrib/client_steps.py",
    "toolcrib/errors.py",
    "toolcrib/paging.py",
    "sessions_app/mcp_tools.py",
}


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


def only_for_types(tree):
    """Modules named under `if TYPE_CHECKING:`."""
    blocks = (node for node in ast.walk(tree) if isinstance(node, ast.If))
    return {
        name
        for block in blocks
        if isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for statement in block.body
        for name in imports(ast.Module([statement], []))
    }


@pytest.mark.parametrize("path", MODULES)
def test_imports_follow_the_arrows(path):
    app = path.partition("/")[0]
    tree = MODULES[path]
    for name in set(imports(tree)) - only_for_types(tree):
        other = name.partition(".")[0]
        if name not in APPS and other in APPS and other not in MAY_IMPORT[app]:
            leaf = ".".join(name.split(".")[:2])
            assert leaf in LEAVES, f"{path} imports {name}"


def test_only_the_client_speaks_mcp_and_only_the_transport_speaks_http():
    for path, tree in MODULES.items():
        roots = {name.partition(".")[0] for name in imports(tree)}
        if path not in MAY_SPEAK_MCP:
            assert not roots & {"mcp", "mcp_types"}, path
        if path not in MAY_SPEAK_HTTP:
            assert not roots & {"httpx", "httpx2", "httpcore2", "requests", "aiohttp"}, path
            assert "urllib.request" not in set(imports(tree)), path


def test_async_functions_stand_only_where_they_must():
    found = {
        path
        for path, tree in MODULES.items()
        if any(isinstance(node, ast.AsyncFunctionDef) for node in ast.walk(tree))
    }
    assert found <= ASYNC, found - ASYNC


@pytest.mark.parametrize("path", sorted(PURE))
def test_pure_modules_import_no_django(path):
    assert not any(name.partition(".")[0] == "django" for name in imports(MODULES[path]))


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
