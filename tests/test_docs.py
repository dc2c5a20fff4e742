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
    code = "".join((ROOT / "toolcrib" / name).read_text() for name in ("settings.py", "health.py"))
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
    for path in [ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / link).exists(), f"{path.name} links to {link}"


def test_every_module_the_documents_name_exists():
    for text in [*DOCUMENTS, (ROOT / "docs" / "decisions.md").read_text()]:
        for name in re.findall(r"`((?:catalog|servers|toolcrib|sessions_app)/\w+\.py)", text):
            assert (ROOT / name).exists(), name


def test_every_address_the_documents_name_resolves():
    for text in DOCUMENTS:
        for path in re.findall(r"(/api/v1/[\w./]+|/livez|/readyz)", text):
            assert resolve(path.rstrip("."))


def test_the_readme_fits_one_screen_of_scrolling():
    assert len(README.splitlines()) <= 70
