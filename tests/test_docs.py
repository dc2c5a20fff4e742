"""What the documents name exists, and what exists is named."""

import ast
import re
import tomllib
from pathlib import Path

from django.core.management import get_commands, load_command_class
from django.urls import resolve

from sessions_app.agents import snippets
from tests.support import client_table
from tests.support.documents import NEEDS, documents, our_commands, shell_blocks
from toolcrib.http.http_protocol import MAX_OPEN_FILES

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
DOCUMENTS = [
    README,
    OPERATIONS,
    (ROOT / "docs" / "security.md").read_text(),
    (ROOT / "docs" / "agents.md").read_text(),
    (ROOT / "docs" / "configuration.md").read_text(),
    (ROOT / "docs" / "quickstart.md").read_text(),
    (ROOT / "docs" / "troubleshooting.md").read_text(),
]
OURS = ("catalog", "servers", "sessions_app", "toolcrib")


def settings_read():
    code = "".join(path.read_text() for path in (ROOT / "toolcrib").rglob("*.py"))
    return set(re.findall(r'(?:env\.\w+|environ\.get)\(\s*"([A-Z_]+)"', code))


def settings_documented():
    return set(re.findall(r"^\| `([A-Z_]+)`", OPERATIONS, re.MULTILINE))


def test_every_setting_is_in_the_tables_and_every_row_is_a_setting():
    assert settings_read() == settings_documented()


def command_parser(name):
    return load_command_class(get_commands()[name], name).create_parser("toolcrib", name)


def test_every_command_the_documents_name_exists_with_its_options():
    """As `manage.py import_servers` or `toolcrib import-servers`, in text and in blocks."""
    known = set(get_commands())
    found = [
        (path.name, name, options) for path in documents() for name, options in our_commands(path)
    ]
    assert len(found) > 40
    for where, name, options in found:
        assert name in known, f"{where}: {name}"
        accepted = command_parser(name).format_help() if options else ""
        for option in options:
            assert re.search(rf"{option}\b", accepted), f"{where}: {name} {option}"


def test_every_block_that_no_test_runs_names_what_it_needs_and_is_valid():
    """Programs that are known, parsed as their own options or compared with what we provide."""
    marked = [block for path in documents() for block in shell_blocks(path) if block.needs]
    assert {block.needs for block in marked} == set(NEEDS)
    for block in marked:
        for words in block.lines:
            words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
            assert words[0] in NEEDS[block.needs], words
            CHECKS[words[0]](words)


def check_make(words):
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in words[1:])


def check_pip(words):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert words[1:] == ["install", project["name"]]


def check_toolcrib(words):
    command_parser(words[1].replace("-", "_")).parse_args(words[2:])


def check_claude(words):
    """The page of snippets has the same words with the key written out; a test reads those."""
    snippets = (ROOT / "docs" / "connect.md").read_text()
    assert " ".join(words[:7]) in snippets
    assert words[7:] == ["--header", "Authorization: Bearer $TOOLCRIB_KEY"]


def check_curl(words):
    path = words[-1].partition("/api/v1")[2]
    assert resolve("/api/v1" + path.replace("SESSION_ID", f"ses_{'0' * 32}"))


CHECKS = {
    "make": check_make,
    "pip": check_pip,
    "toolcrib": check_toolcrib,
    "claude": check_claude,
    "curl": check_curl,
}


def test_every_command_of_ours_is_named_in_a_document():
    ours = {name for name, app in get_commands().items() if app in OURS}
    named = {name for path in documents() for name, _ in our_commands(path)}
    assert ours <= named, ours - named


def texts_in_the_code():
    """Yield every text of the product's modules; what an f-string inserts is an ellipsis."""
    for app in OURS:
        for path in (ROOT / app).rglob("*.py"):
            tree = ast.parse(path.read_text())
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
                elif isinstance(node, ast.JoinedStr):
                    yield "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "…"
                        for part in node.values
                    )


def test_every_message_of_the_troubleshooting_page_is_one_of_the_code():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    headings = re.findall(r"^### (.+)$", page, re.MULTILINE)
    messages = [text for heading in headings for text in re.findall(r"`([^`]+)`", heading)]
    assert len(messages) > 40
    texts = [text for text in texts_in_the_code() if len(text) > 5]
    for message in messages:
        parts = [re.escape(part.strip()) for part in message.rstrip(".").split("…")]
        pattern = re.compile(".*".join(parts))
        assert any(pattern.search(text) for text in texts), message
    assert len(messages) == len(set(messages))


def test_every_make_target_the_readme_names_exists():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake (\w+) ", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_link_between_documents_leads_somewhere():
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "bench" / "README.md"]:
        for link in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / link).exists(), f"{path.name} links to {link}"


def test_every_promise_of_the_security_page_links_to_its_test():
    """After each sentence of a paragraph a link to a test follows; what is not promised says so."""
    page = (ROOT / "docs" / "security.md").read_text()
    promises = [text for text in page.split("\n\n")[2:-1] if "Known limits" not in text]
    assert len(promises) > 12
    for text in promises:
        links = re.findall(r"\]\(\.\./((?:tests|bench)/[^)]+\.py)\)", text)
        assert links, f"no test is linked: {text[:60]}"
        after_last = text.rpartition(".py)")[2]
        assert re.fullmatch(r"[).;:]*( Not covered: .+)?", after_last.strip(), re.DOTALL), (
            after_last
        )
        for link in links:
            content = (ROOT / link).read_text()
            assert "def test_" in content or link.startswith("bench/"), link


def test_every_file_the_documents_name_exists():
    """Whole paths, and bare names that some file of the project has."""
    names = {
        path.name
        for app in [*OURS, "templates", "tests", "docs"]
        for path in (ROOT / app).rglob("*.*")
    }
    names |= {path.name for path in ROOT.iterdir()}
    missing = []
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for name in re.findall(r"`([\w./-]+\.(?:py|txt|html|md|yml))\b", path.read_text()):
            if not ((ROOT / name).exists() if "/" in name else name in names):
                missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert missing == []


def test_every_package_the_architecture_names_exists():
    text = (ROOT / "docs" / "architecture.md").read_text()
    for name in re.findall(
        r"`((?:catalog|servers|sessions_app|toolcrib|templates|static|tests)(?:/\w+)+)/?`", text
    ):
        assert (ROOT / name).exists(), name


def test_the_documents_keep_their_length():
    for name, most in (("docs/architecture.md", 250), ("CONTRIBUTING.md", 150), ("README.md", 70)):
        assert len((ROOT / name).read_text().splitlines()) <= most, name


def test_the_limit_of_open_files_is_documented():
    section = OPERATIONS.split("## Connections\n")[1].split("\n## ")[0]

    assert f"at most {MAX_OPEN_FILES:,}" in section
    for words in ("`ulimit -n`", "`LimitNOFILE=`", "`ulimits: nofile`", "at least 4,096"):
        assert words in section


def test_every_decision_is_in_the_index():
    folder = ROOT / "docs" / "decisions"
    index = re.findall(
        r"^- \[(\d{4})\]\(([\w-]+\.md)\) (.+)$", (folder / "README.md").read_text(), re.MULTILINE
    )
    pages = sorted(path.name for path in folder.glob("[0-9]*.md"))
    assert [name for _, name, _ in index] == pages
    for number, name, title in index:
        assert name.startswith(number)
        assert (folder / name).read_text().startswith(f"# {int(number)}. {title}\n")


def test_every_address_the_documents_name_resolves():
    for text in DOCUMENTS:
        for path in re.findall(r"(/api/v1/[\w./]+|/livez|/readyz)", text):
            assert resolve(path.rstrip("."))


def test_every_name_a_recipe_mentions_exists():
    """Constants, classes and functions in CONTRIBUTING.md, such as `SETTINGS` or `check_draft`."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    recipes = text[text.index("## Recipes") : text.index("## Style")]
    names = re.findall(r"`@?(?:[A-Z]\w+\.)?(_?[A-Za-z]\w{3,})(?:\([^`]*\))?`", recipes)
    code = "".join(
        path.read_text() for folder in (*OURS, "tests") for path in (ROOT / folder).rglob("*.py")
    )
    missing = {name for name in names if not re.search(rf"\b{name}\b", code)}
    assert missing - {"EXAMPLES", "UPDATE_GOLDEN"} == set()
    assert len(names) > 20


def test_the_page_of_clients_says_what_the_tests_check():
    """Its cells and limits; versions, protocols and date are those of `make test-clients`."""
    records, date = client_table.read_page()
    assert records.keys() == client_table.BY_TITLE.keys()
    assert client_table.PAGE.read_text() == client_table.page(records, date)


def test_every_snippet_is_run_or_named_as_not_run():
    """A snippet's client has a row, is named below the table, or is run by test_snippets.py."""
    text = (ROOT / "docs" / "clients.md").read_text()
    run_there = {"Anthropic SDK", "OpenAI SDK", "Python", "Plain Python", "curl"}
    for item in snippets.for_agent("http://localhost:8000"):
        assert item.title in run_there or item.title in text, item.title
