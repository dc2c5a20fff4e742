"""Hints by a language model: export, import, and an endpoint that writes them."""

import io
import json

import pytest
from django.core.management import call_command

from catalog import cache
from catalog.hints import exchange, model_writer
from catalog.models import AuditEntry, ToolHint
from catalog.tasks import write_hints
from tests.support.factories import make_server, make_tool
from toolcrib.lib.errors import Invalid
from toolcrib.lib.roles import SYSTEM

pytestmark = pytest.mark.django_db

HINTS = ["is it going to rain", "plan a dry walk", "how cold will it be?"]


@pytest.fixture
def tools(db):
    server = make_server(slug="weather", trust="auto")
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    make_tool(server, "get_forecast", description="Forecast\nof a city.", inputSchema=schema)
    make_tool(server, "get_alerts", description="Alerts of a state.")
    return server


def run(*arguments):
    output = io.StringIO()
    call_command("hints", *arguments, stdout=output)
    return output.getvalue()


def texts(name):
    return sorted(ToolHint.objects.active().filter(tool__name=name).values_list("text", flat=True))


def test_the_export_has_the_prompt_and_the_tools_without_hints(tools):
    lines = [json.loads(line) for line in run("--export").splitlines()]

    assert "three" in lines[0]["prompt"]
    assert lines[1:] == [
        {
            "name": "weather__get_alerts",
            "server": "weather",
            "description": "Alerts of a state.",
            "parameters": [],
        },
        {
            "name": "weather__get_forecast",
            "server": "weather",
            "description": "Forecast of a city.",
            "parameters": ["city"],
        },
    ]
    exchange.import_hints([{"name": "weather__get_forecast", "hints": HINTS}], actor=SYSTEM)
    assert "get_forecast" not in run("--export")
    assert "get_forecast" in run("--export", "--all")
    assert len(run("--export", "--server", "other").splitlines()) == 1


def test_what_a_model_wrote_is_imported_from_a_file(tools, tmp_path):
    file = tmp_path / "hints.jsonl"
    rows = [
        {"prompt": "ignored"},
        {"name": "weather__get_forecast", "hints": [*HINTS, "x" * 81, "", 5, "a\u202eb"]},
        {"name": "weather__nothing", "hints": ["where is it"]},
    ]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n")

    result = json.loads(run("--import", str(file), "--json"))

    assert result == {"changed": 1, "unchanged": 0, "rejected": 4, "unknown": ["weather__nothing"]}
    assert texts("get_forecast") == sorted(HINTS)
    entry = AuditEntry.objects.get(verb="tool.hint.import")
    assert (entry.actor_label, entry.after) == ("manage.py hints", {"model": HINTS})


@pytest.mark.parametrize("text", ["{", "[]", '{"name": 1, "hints": []}', '{"name": "a"}'])
def test_a_malformed_import_is_rejected_and_changes_nothing(tools, text):
    valid = json.dumps({"name": "weather__get_forecast", "hints": HINTS})
    with pytest.raises(Invalid, match=r"Line 2|A row has no name"):
        exchange.import_hints(exchange.parse_lines(f"{valid}\n{text}"), actor=SYSTEM)
    assert not ToolHint.objects.exists()


def test_the_api_exports_in_pages_and_imports(tools, client, admin_token, operator_token):
    def send(method, path, body=None, token=admin_token):
        headers = {"Authorization": f"Bearer {token}"}
        data = json.dumps(body) if body else ""
        return client.generic(
            method, f"/api/v1{path}", data, content_type="application/json", headers=headers
        )

    first = send("GET", "/hints/export?limit=1", token=operator_token).json()
    assert first["prompt"] == exchange.PROMPT
    rest = send("GET", f"/hints/export?limit=1&cursor={first['next_cursor']}").json()
    names = [item["name"] for page in (first, rest) for item in page["items"]]
    assert names == ["weather__get_alerts", "weather__get_forecast"]
    assert rest["next_cursor"] is None
    body = {"items": [{"name": "weather__get_forecast", "hints": HINTS}]}
    assert send("POST", "/hints/import", body, operator_token).status_code == 403
    assert send("POST", "/hints/import", body).json()["changed"] == 1
    items = send("GET", "/hints?source=model&limit=2").json()["items"]
    assert [item["tool_name"] for item in items] == ["weather__get_forecast"] * 2
    assert send("GET", "/hints?source=nobody").status_code == 422


def test_hints_are_exported_and_imported_on_the_page(tools, admin, operator, page_of, client):
    page = page_of(admin, "/search/hints").content.decode()
    assert "2 tools" in page
    exported = client.get("/search/hints/export.jsonl").content.decode()
    assert len(exported.splitlines()) == 3

    wrong = client.post("/search/hints/import", {"lines": "{<"})
    assert wrong.status_code == 422
    assert "Line 1 is not JSON." in wrong.content.decode()
    assert "{&lt;</textarea>" in wrong.content.decode()
    lines = json.dumps({"name": "weather__get_forecast", "hints": HINTS})
    right = client.post("/search/hints/import", {"lines": lines}, follow=True)
    assert "Changed the hints of 1 tool." in right.content.decode()
    assert texts("get_forecast") == sorted(HINTS)
    assert "Import hints" not in page_of(operator, "/search/hints").content.decode()


# --- An endpoint ----------------------------------------------------------------------------------


@pytest.fixture
def endpoint(settings, monkeypatch):
    settings.HINTS_URL, settings.HINTS_MODEL = "https://llm.example/v1/chat/completions", "small"
    settings.HINTS_KEY = "key-of-the-model"
    monkeypatch.setattr(model_writer, "_checked_revision", -1)
    monkeypatch.setattr(model_writer, "_retry_at", 0.0)
    monkeypatch.setattr(model_writer, "_sent", set())
    return settings


def answer_all(hints=HINTS, extra=""):
    """Return a scripted model that writes the same hints for every tool it is sent."""
    requests = []

    def post(url, headers, body):
        requests.append((url, headers, body))
        sent = [json.loads(line) for line in body["messages"][-1]["content"].splitlines()]
        rows = "\n".join(json.dumps({"name": row["name"], "hints": hints}) for row in sent)
        text = f"Sure!\n```json\n{rows}\n{extra}\n```"
        if url.endswith("/messages"):
            return {"content": [{"type": "text", "text": text}]}
        return {"choices": [{"message": {"role": "assistant", "content": text}}]}

    post.requests = requests
    return post


def test_an_openai_endpoint_writes_hints_for_new_tools_once(tools, endpoint):
    post = answer_all()

    assert model_writer.write_missing(post) == 2

    [(url, headers, body)] = post.requests
    assert (url, body["model"]) == (endpoint.HINTS_URL, "small")
    assert headers == {"authorization": "Bearer key-of-the-model"}
    assert body["messages"][0] == {"role": "system", "content": exchange.PROMPT}
    assert texts("get_forecast") == texts("get_alerts") == sorted(HINTS)
    assert model_writer.write_missing(post) == 0
    make_tool(tools, "get_tides", description="Tides of a harbour.")
    assert model_writer.write_missing(post) == 1
    assert len(post.requests) == 2


def test_an_anthropic_endpoint_is_asked_in_its_format(tools, endpoint):
    endpoint.HINTS_URL = "https://llm.example/v1/messages"
    post = answer_all()

    assert model_writer.write_missing(post) == 2

    [(_, headers, body)] = post.requests
    assert headers["x-api-key"] == "key-of-the-model"
    assert body["system"] == exchange.PROMPT


def test_an_answer_about_other_tools_is_ignored(tools, endpoint):
    other = make_tool(make_server(slug="bank"), "pay", description="Pay a bill.")
    exchange.import_hints([{"name": "bank__pay", "hints": ["pay it"]}], actor=SYSTEM)
    extra = json.dumps({"name": "bank__pay", "hints": ["is it going to rain"]})

    model_writer.write_missing(answer_all(extra=extra))

    assert cache.current().tools[other.pk].phrases == ("pay it",)


def test_a_tool_for_which_the_model_writes_nothing_is_sent_once(tools, endpoint):
    post = answer_all(hints=["x" * 200])

    assert model_writer.write_missing(post) == 0
    make_tool(tools, "get_tides", description="Tides of a harbour.")
    model_writer.write_missing(post)

    assert [len(body["messages"][1]["content"].splitlines()) for _, _, body in post.requests] == [
        2,
        1,
    ]


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": [{"message": None}]}, "text"])
def test_an_endpoint_that_fails_is_asked_again_later(tools, endpoint, answer):
    calls = []

    def post(*request):
        calls.append(request)
        return answer

    assert model_writer.write_missing(post) == 0
    assert model_writer.write_missing(post) == 0
    assert len(calls) == 1
    assert not model_writer.is_due()
    assert not ToolHint.objects.exists()


def test_without_the_setting_nothing_is_sent(tools, monkeypatch):
    def post(*request):
        raise AssertionError("tools were sent")

    monkeypatch.setattr("catalog.tasks.post_json", post)
    write_hints()
    assert model_writer.write_missing(post) == 0
