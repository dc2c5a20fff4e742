"""Try a tool: call it as a person would, and see what comes back."""

from collections.abc import Mapping
from typing import Any

from asgiref.sync import async_to_sync
from django import forms
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_http_methods

from catalog.models import Tool
from catalog.tools.actions import parse_tool_text
from catalog.tools.queries import find_defined_tool
from sessions_app.dispatch import dispatcher
from sessions_app.ledger import payloads
from sessions_app.playground import try_tool as trying
from sessions_app.review import content, timeline
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.json_codec import canonical, digest
from toolcrib.lib.roles import actor_of, admin_required


class TryForm(forms.Form):
    arguments = forms.CharField(
        strip=False,
        widget=forms.Textarea(
            attrs={"rows": 12, "class": "mono", "spellcheck": "false", "autocapitalize": "off"}
        ),
        help_text="A JSON object. The required arguments are filled in with empty values.",
    )

    def clean_arguments(self) -> dict[str, Any]:
        try:
            given = parse_tool_text(self.cleaned_data["arguments"])
        except ToolcribError as error:
            raise forms.ValidationError(error.sentence) from error
        if not isinstance(given, dict):
            raise forms.ValidationError("Arguments are a JSON object. Start with { and end with }.")
        try:
            payloads.check_value(given, "")
        except ToolcribError as error:
            raise forms.ValidationError(error.sentence) from error
        return given


@require_http_methods(["GET", "HEAD", "POST"])
@admin_required
def try_tool(request: HttpRequest, public_name: str) -> HttpResponse:
    tool = find_defined_tool(public_name)
    body = tool.definition.tool if tool.definition else {}
    claimed = body.get("annotations")
    claims = claimed if isinstance(claimed, dict) else {}
    context: dict[str, Any] = {
        "tool": tool,
        "schema": body["inputSchema"],
        "fields": trying.fields(body["inputSchema"]),
        "annotations": claims,
        "why_twice": trying.why_ask_twice(claims) if tool.server_id else "",
    }
    if request.method == "POST":
        return _tried(request, tool, context)
    start = content.pretty_json(trying.skeleton(body["inputSchema"]))
    form = TryForm(initial={"arguments": start})
    return render(request, "sessions_app/playground/try_tool.html", context | {"form": form})


def _tried(request: HttpRequest, tool: Tool, context: dict[str, Any]) -> HttpResponse:
    form = TryForm(request.POST)
    context["form"] = form
    if not form.is_valid():
        return render(request, "sessions_app/playground/try_tool.html", context, status=422)
    arguments = form.cleaned_data["arguments"]
    # What was seen is what is sent: other arguments ask again.
    seen = _digest(tool, arguments)
    if context["why_twice"] and request.POST.get("seen") != seen:
        asked = {"seen": seen, "asked": content.pretty_json(arguments)}
        return render(request, "sessions_app/playground/try_tool.html", context | asked)
    try:
        answer = async_to_sync(dispatcher.try_tool)(tool, arguments, actor=actor_of(request))
    except ToolcribError as error:
        form.add_error(None, error.sentence)
        return render(
            request, "sessions_app/playground/try_tool.html", context, status=error.status
        )
    return render(
        request, "sessions_app/playground/try_tool.html", context | {"answer": shown(answer)}
    )


def _digest(tool: Tool, arguments: Mapping[str, Any]) -> str:
    definition = tool.definition.sha256 if tool.definition else ""
    return digest(ascii(f"{tool.public_name} {definition} {canonical(arguments)}"))


def shown(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Shape an answer for the page: its pill, its parts, its error."""
    structured = answer["structured_content"]
    facts = timeline.CallFacts(state=str(answer["state"]), is_error=bool(answer["is_error"]))
    pill, word = facts.outcome
    error = answer.get("error")
    # Where the call did not come so far, the content repeats our error.
    ours = error is not None and error["code"] != "tool_error"
    return {
        **answer,
        "pill": pill,
        "word": word,
        "parts": [] if ours else content.parts_of(answer["content"]),
        "structured": None if structured is None else content.pretty_json(structured),
    }
