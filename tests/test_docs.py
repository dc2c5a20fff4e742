"""What the documents name exists, and what exists is named."""

import re
from pathlib import Path

from django.core.management import get_commands
from django.urls import resolve

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
DOCUMENTS = [
    README,
    OPERATIONS,
    (ROOT / "docs" / "security.md").read_text(),
    (ROOT / "docs" / "agents.md").read_text(),
]
OURS = ("catalog", "servers", "sessions_app", "toolcrib")


def settings_read():
    code = "".join(path.read_text() for path in (ROOT / "toolcrib").rglob("*.py"))
    return set(re.findall(r'(?:env\.\w+|environ\.get)\(\s*"([A-Z_]+)"', code))


def settings_documented():
    return set(re.findall(r"^\| `([A-Z_]+)`", OPERATIONS, re.MULTILINE))


def test_every_setting_is_in_the_tables_and_every_row_is_a_setting():
    assert settings_read() == settings_documented()


def test_every_command_the_documents_name_exists():
    known = set(get_commands())
    for text in DOCUMENTS:
        for command in re.findall(r"manage\.py (\w+)", text):
            assert command in known, command


def test_every_command_of_ours_is_named_in_a_document():
    ours = {name for name, app in get_commands().items() if app in OURS}
    named = set(re.findall(r"manage\.py (\w+)", "".join(DOCUMENTS)))
    assert ours <= named, ours - named


def test_every_make_target_the_readme_names_exists():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake (\w+) ", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_link_between_documents_leads_somewhere():
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "bench" / "README.md"]:
        for link in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / link).exists(), f"{path.name} links to {link}"


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
