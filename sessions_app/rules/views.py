"""Rule pages: the ordered list with presets, and one rule with a test against recorded calls."""

import json
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from catalog import audit
from servers.models import Server
from sessions_app.models import Call, Rule
from sessions_app.rules import actions, presets
from sessions_app.rules.agent_rules import compile_rule
from sessions_app.rules.forms import RuleForm
from sessions_app.rules.queries import find_rule, show_rule, show_rules
from sessions_app.rules.replay import replay
from sessions_app.rules.schemas import RuleEdit
from sessions_app.rules.validation import check_match
from toolcrib.lib.errors import NotFound, ToolcribError
from toolcrib.lib.request import errors_as_messages, text
from toolcrib.lib.roles import (
    Role,
    actor_of,
    admin_required,
    operator_required,
    role_of,
    role_required,
    viewer_required,
)

TEST_DAYS = 7


@require_safe
@viewer_required
def rules(request: HttpRequest) -> HttpResponse:
    rows = show_rules(Rule.objects.all())
    context: dict[str, Any] = {"rows": rows, "moved": text(request.GET, "moved")}
    if role_of(request.user) >= Role.ADMIN:
        names = {row.rule.name for row in rows}
        context["presets"] = [
            {"preset": preset, "is_used": preset.name in names}
            for preset in presets.PRESETS.values()
        ]
        context["servers"] = Server.objects.order_by("slug").values_list("slug", flat=True)
    return render(request, "sessions_app/rules/list.html", context)


@require_safe
@operator_required
def export(request: HttpRequest) -> HttpResponse:
    """Download all rules in order, each as `POST /api/v1/rules` accepts it."""
    audit.record_installation(actor_of(request), "rule.export")
    bodies = [shown.body for shown in show_rules(Rule.objects.all())]
    exported = [{name: body[name] for name in actions.FIELDS} for body in bodies]
    return HttpResponse(
        json.dumps({"rules": exported}, indent=2, ensure_ascii=False),
        content_type="application/json",
        headers={"Content-Disposition": 'attachment; filename="rules.json"'},
    )


@require_http_methods(["GET", "HEAD", "POST"])
@admin_required
def add(request: HttpRequest) -> HttpResponse:
    """Create a rule; with `call`, prefilled from a recorded call."""
    if request.method != "POST":
        initial: dict[str, Any] = {}
        if call_id := text(request.GET, "call"):
            call = Call.objects.filter(call_id=call_id).first()
            if call is None:
                raise NotFound("Call not found.", hint="It may have been deleted.")
            initial = presets.rule_from_call(call)
        return _form_page(request, RuleForm(initial=initial))
    form = RuleForm(request.POST)
    return _submit(request, form, None)


@require_http_methods(["GET", "HEAD", "POST"])
@role_required(Role.VIEWER, write=Role.ADMIN)
def rule(request: HttpRequest, rule_name: str) -> HttpResponse:
    found = find_rule(rule_name)
    if request.method == "POST":
        return _submit(request, RuleForm(request.POST, initial=show_rule(found).body), found)
    form = RuleForm(initial=show_rule(found).body) if role_of(request.user) >= Role.ADMIN else None
    return _form_page(request, form, rule=found)


def _submit(request: HttpRequest, form: RuleForm, found: Rule | None) -> HttpResponse:
    """Save or test a rule, or show what is wrong with it."""
    act = request.POST.get("act")
    if form.is_valid() and form.rule is not None:
        if act == "more":  # further condition rows
            return _form_page(request, form, rule=found)
        try:
            if act == "test":
                stored = found.match if found else None
                match = check_match(form.rule.match, stored=stored)
                tested = Rule(name=form.rule.name, effect=form.rule.effect, match=match)
                result = replay(compile_rule(tested), TEST_DAYS)
                return _form_page(request, form, rule=found, result=result)
            if found is None:
                saved = actions.create(form.rule, actor=actor_of(request))
            else:
                body = RuleEdit(**{name: getattr(form.rule, name) for name in actions.FIELDS})
                saved = actions.edit(found, body, actor=actor_of(request))
        except ToolcribError as error:
            form.add_tool_error(error)
        else:
            messages.success(request, f"Saved the rule {saved.name}. It decides from now on.")
            return redirect("rules")
    return _form_page(request, form, rule=found, status=422)


def _form_page(
    request: HttpRequest, form: RuleForm | None, *, status: int = 200, **context: Any
) -> HttpResponse:
    context |= {"form": form, "days": TEST_DAYS}
    if (found := context.get("rule")) is not None:
        context["parts"] = show_rule(found).parts
    return render(request, "sessions_app/rules/rule.html", context, status=status)


@require_POST
@admin_required
def set_enabled(request: HttpRequest, rule_name: str, *, on: bool) -> HttpResponse:
    found = find_rule(rule_name)
    actions.edit(found, RuleEdit.model_validate({"enabled": on}), actor=actor_of(request))
    messages.success(request, f"{'Enabled' if on else 'Disabled'} the rule {found.name}.")
    return redirect("rules")


@require_POST
@admin_required
def move(request: HttpRequest, rule_name: str) -> HttpResponse:
    """Move a rule up or down by one."""
    found = find_rule(rule_name)
    step = -1 if request.POST.get("act") == "up" else 1
    actions.move(found, found.position + step, actor=actor_of(request))
    response = redirect("rules")
    response["Location"] += f"?moved={found.pk}-{'up' if step < 0 else 'down'}"
    return response


@require_POST
@admin_required
def delete(request: HttpRequest, rule_name: str) -> HttpResponse:
    found = find_rule(rule_name)
    actions.delete(found, actor=actor_of(request))
    messages.success(request, f"Deleted the rule {found.name}.")
    return redirect("rules")


@require_POST
@admin_required
def add_preset(request: HttpRequest) -> HttpResponse:
    """Create the rule of a preset."""
    with errors_as_messages(request):
        preset = presets.find_preset(request.POST.get("preset", ""))
        saved = actions.create(preset.rule(text(request.POST, "server")), actor=actor_of(request))
        messages.success(request, f"Created the rule {saved.name}. It decides from now on.")
    return redirect("rules")
