"""The connection snippets in the documentation; test_views.py shows them on the pages."""

import json
import os
import re
import subprocess
from pathlib import Path

from sessions_app.agents import snippet_templates, snippets

ROOT = Path(__file__).resolve().parents[3]
CONNECT_HEAD = """\
# Connect

A snippet for each client and framework; an agent's page has the same ones with its URL, one of its
tools, and its key while that is displayed. [Agents](agents.md) explains the URL's options,
[clients](clients.md) what each client can do. Programs read the name of a model from `MODEL`.
"""


def test_the_documentation_has_the_same_snippets():
    parts = [CONNECT_HEAD]
    for item in snippets.for_agent("http://localhost:8000"):
        parts.append(f"**{item.title}.** {item.note}\n```{item.language}\n{item.text}```\n")
    text, document = "\n".join(parts), ROOT / "docs" / "connect.md"
    if os.environ.get("UPDATE_GOLDEN"):
        document.write_text(text)
    assert document.read_text() == text, "UPDATE_GOLDEN=1 updates it"


def test_no_document_names_a_model_that_its_provider_may_end():
    pattern = re.compile(r"\b(?:claude-[a-z]+-\d|gpt-\d|gemini-\d|o\d-mini)")
    documents = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs" / "examples").glob("*.py")]
    documents += [ROOT / "README.md", Path(snippet_templates.__file__), Path(snippets.__file__)]
    documents = [path for path in documents if path.name != "clients.md"]  # names what it ran
    assert [path.name for path in documents if pattern.search(path.read_text())] == []


def test_a_call_as_curl_survives_the_shell_with_any_arguments(tmp_path):
    arguments = {"q": "it's $(touch pwned) `id` \\ \" \n ✓", "n": [1, None]}
    text = snippets.curl_call("http://localhost:8000/", "weather__get_forecast", arguments)
    shell = "curl() { printf '%s\\0' \"$@\" >> sent; echo ses_" + "0" * 32 + "; }\n" + text
    subprocess.run(["bash", "-eu", "-c", shell], cwd=tmp_path, check=True, capture_output=True)
    sent = (tmp_path / "sent").read_text().split("\0")
    assert f"http://localhost:8000/api/v1/sessions/ses_{'0' * 32}/call" in sent
    assert json.loads(sent[-2]) == {"tool_name": "weather__get_forecast", "arguments": arguments}
    assert sent.count("Authorization: Bearer tcb_…") == 2
    assert not (tmp_path / "pwned").exists()
