"""Trial pages: call a tool with arguments from a form, or run a script as an agent."""

import json
from collections.abc import Mapping
from typing import Any

from asgiref.sync import async_to_sync
from django import forms
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods

from catalog import audit
from catalog.models import Tool
from catalog.tools.actions import parse_tool_text
from catalog.tools.queries import find_defined_tool
from sessions_app.agents.queries import find_agent
from sessions_app.agents.snippets import curl_call, sample_arguments
from sessions_app.dispatch import dispatcher
from sessions_app.ledger import event_details
from sessions_app.models import Call, ScriptLanguage, ScriptRun
from sessions_app.models.encryption import UNREADABLE
from sessions_app.playground import try_script as trials
from sessions_app.playground.try_tool import EMPTY_VALUES, confirmation_reason, form_fields
from sessions_app.review import content, timeline
from sessions_app.scripts.runner import ScriptRequest
from toolcrib.lib import payloads
from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.json_codec import canonical, digest
from toolcrib.lib.redaction.redactor import redact, redact_text
from toolcrib.lib.request import text
from toolcrib.lib.roles import actor_of, admin_required


class TryForm(forms.Form):
    arguments = forms.CharField(
        strip=False,
        widget=forms.Textarea(
            attrs={"rows": 12, "class": "mono", "spellcheck": "false", "autocapitalize": "off"}
        ),
        help_text="A JSON object. Required arguments are prefilled with empty values.",
    )

    def clean_arguments(self) -> dict[str, Any]:
        try:
            arguments = parse_tool_text(self.cleaned_data["arguments"])
            if not isinstance(arguments, dict):
                raise forms.ValidationError("Arguments must be a JSON object: { … }.")
            payloads.check_value(arguments, "")
        except ToolcribError as error:
            raise forms.ValidationError(error.sentence) from error
        return arguments


@require_http_methods(["GET", "HEAD", "POST"])
@admin_required
def try_tool(request: HttpRequest, public_name: str) -> HttpResponse:
    tool = find_defined_tool(public_name)
    body = tool.served.tool if tool.served else {}
    value = body.get("annotations")
    annotations = value if isinstance(value, dict) else {}
    context: dict[str, Any] = {
        "tool": tool,
        "schema": body["inputSchema"],
        "fields": form_fields(body["inputSchema"]),
        "annotations": annotations,
        "confirmation_reason": confirmation_reason(annotations) if tool.server_id else "",
    }
    status = 200
    if request.method == "POST":
        context["form"] = form = TryForm(request.POST)
        status = _submit(request, tool, form, context)
        arguments = form.cleaned_data.get("arguments")
    else:
        arguments, context["replayed"] = _initial_arguments(request, body["inputSchema"], tool)
        context["form"] = TryForm(initial={"arguments": content.pretty_json(arguments)})
    if isinstance(arguments, dict):
        context["curl"] = curl_call(settings.PUBLIC_URL, tool.public_name, arguments)
    return render(request, "sessions_app/playground/try_tool.html", context, status=status)


def _initial_arguments(request: HttpRequest, schema: Any, tool: Tool) -> tuple[object, Call | None]:
    """Return the stored arguments of the call to repeat, or empty ones."""
    call_id = text(request.GET, "call", 60)
    call = Call.objects.filter(call_id=call_id, tool=tool).first() if call_id else None
    stored = event_details.read_object(call.arguments) if call else {}
    if call is None or not stored or stored.get("cut") is True:
        return sample_arguments(schema, EMPTY_VALUES), None
    if call.session is not None:
        audit.record_read(actor_of(request), "session.read", call.session)
    return stored, call


def _submit(request: HttpRequest, tool: Tool, form: TryForm, context: dict[str, Any]) -> int:
    """Call the tool, or ask for a confirmation; return the status of the page."""
    if not form.is_valid():
        return 422
    arguments = form.cleaned_data["arguments"]
    # A confirmation applies to the confirmed arguments only.
    confirmation = _confirmation_digest(tool, arguments)
    if context["confirmation_reason"] and request.POST.get("seen") != confirmation:
        context |= {"confirmation": confirmation, "to_confirm": content.pretty_json(arguments)}
        return 200
    is_confirmed = request.POST.get("seen") == confirmation
    try:
        response = async_to_sync(dispatcher.try_tool)(
            tool, arguments, actor=actor_of(request), is_confirmed=is_confirmed
        )
    except dispatcher.ConfirmationRequired as error:  # a rule holds the call
        context |= {"confirmation": confirmation, "to_confirm": content.pretty_json(arguments)}
        context["confirmation_reason"] = error.message
        return 200
    except ToolcribError as error:
        form.add_error(None, error.sentence)
        return error.status
    context["result"] = describe_response(json.loads(response.as_json()))
    return 200


def _confirmation_digest(tool: Tool, arguments: Mapping[str, Any]) -> str:
    definition = tool.served.sha256 if tool.served else ""
    return digest(ascii(f"{tool.public_name} {definition} {canonical(arguments)}"))


def describe_response(response: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's response with the status, content parts and error that the page shows."""
    structured = response["structured_content"]
    status, label = timeline.call_outcome(response["state"], response["is_error"])
    error = response.get("error")
    # The content of a call that did not reach the tool repeats Toolcrib's error.
    is_own_error = error is not None and error["code"] != "tool_error"
    return {
        **response,
        "status": status,
        "label": label,
        "parts": [] if is_own_error else content.describe_content(response["content"]),
        "structured": None if structured is None else content.pretty_json(structured),
    }


# --- Scripts --------------------------------------------------------------------------------------


class TryScriptForm(forms.Form):
    agent = forms.ChoiceField(
        choices=lambda: [(agent.name, agent.name) for agent in trials.agents()],
        help_text="The script reaches the tools of this agent, by its rules and within its limits.",
    )
    language = forms.ChoiceField(choices=ScriptLanguage.choices)
    source = forms.CharField(
        label="Code",
        strip=False,
        widget=forms.Textarea(
            attrs={"rows": 18, "class": "mono", "spellcheck": "false", "autocapitalize": "off"}
        ),
    )
    input = forms.CharField(
        strip=False,
        required=False,
        widget=forms.Textarea(attrs={"rows": 3, "class": "mono", "spellcheck": "false"}),
        help_text="Any JSON value, which the script has as input.",
    )

    def clean_source(self) -> str:
        return str(self.cleaned_data["source"]).replace("\r\n", "\n")  # of the text area

    def clean_input(self) -> Any:
        value = self.cleaned_data["input"]
        try:
            return parse_tool_text(value) if value.strip() else None
        except ToolcribError as error:
            raise forms.ValidationError(error.sentence) from error


@require_http_methods(["GET", "HEAD", "POST"])
@admin_required
def try_script(request: HttpRequest) -> HttpResponse:
    """Run a script as an agent, and show its run. `run` in the URL: start from that one."""
    context: dict[str, Any] = {}
    status = 200
    if request.method == "POST":
        context["form"] = form = TryScriptForm(request.POST)
        run, status = _submit_script(request, form, context)
        if run is not None:
            return redirect("script-run", run.session.session_id, run.run_id)
    else:
        context["repeated"] = repeated = _repeated_run(request)
        context["form"] = TryScriptForm(initial=_initial_script(repeated))
    context["has_agents"] = bool(trials.agents())
    return render(request, "sessions_app/playground/try_script.html", context, status=status)


def _repeated_run(request: HttpRequest) -> ScriptRun | None:
    """Return the run to start from, which is recorded as read."""
    run_id = text(request.GET, "run", 60)
    rows = ScriptRun.objects.select_related("session__agent")
    run = rows.filter(run_id=run_id).first() if run_id else None
    if run is not None:
        audit.record_read(actor_of(request), "session.read", run.session)
    return run


def _initial_script(run: ScriptRun | None) -> dict[str, str]:
    if run is None:
        return {}
    value = event_details.read_value(run.input)
    return {
        "agent": run.session.agent.name,
        "language": run.language,
        "source": "" if run.code == UNREADABLE else redact_text(run.code),
        "input": "" if value is None else content.pretty_json(redact(value)),
    }


def _submit_script(
    request: HttpRequest, form: TryScriptForm, context: dict[str, Any]
) -> tuple[ScriptRun | None, int]:
    """Start the script, or ask for a confirmation; return its run and the status of the page."""
    if not form.is_valid():
        return None, 422
    sent = form.cleaned_data
    try:
        agent = find_agent(sent["agent"], with_counts=False)
        # A confirmation applies to this script alone, as to the arguments of a call.
        confirmation = digest(ascii(canonical([agent.name, *sent.values()])))
        changing = trials.named_tools(agent, sent["source"])
        if changing and request.POST.get("seen") != confirmation:
            context |= {"confirmation": confirmation, "changing": changing}
            return None, 200
        script = ScriptRequest(sent["source"], sent["language"], input=sent["input"])
        return trials.start(agent, script, actor=actor_of(request)), 200
    except ToolcribError as error:
        form.add_error(None, error.sentence)
        return None, error.status
