"""Settings: how does this installation behave? Operators read them, admins change them."""

from collections.abc import Iterable
from typing import Any

from django import forms
from django.conf import settings
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_safe

from catalog import preferences
from catalog.preferences import PREFERENCES, PreferenceSpec
from toolcrib.lib import token_counter
from toolcrib.lib.errors import NotFound, ToolcribError
from toolcrib.lib.roles import Role, actor_of, operator_required, require, role_of
from toolcrib.pages import about
from toolcrib.templatetags.toolcrib import duration

SECTIONS = {
    "general": ("General", "What agents and people meet at the door."),
    "tokens": ("Tokens and budgets", "What an agent starts with. Those that exist keep theirs."),
    "sync": ("Sync", "How servers are asked for their tools."),
    "retention": ("Retention", "How long Toolcrib remembers."),
}
PAGES = (
    *((name, title, "settings-section") for name, (title, _) in SECTIONS.items()),
    ("people", "People", "people"),
    ("about", "About", "about"),
    ("profile", "Your profile", "profile"),
)
# What only the environment says: (variable, attribute, label, unit), by section.
ENVIRONMENT: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    "general": (
        ("TOOLCRIB_PUBLIC_URL", "PUBLIC_URL", "Address in links and snippets", ""),
        ("TOOLCRIB_HOSTS", "ALLOWED_HOSTS", "Host names answered to", ""),
        ("TOOLCRIB_HTTPS", "HTTPS", "Served over HTTPS", ""),
        ("TOOLCRIB_ALLOW_STDIO", "ALLOW_STDIO", "Servers may be programs on this machine", ""),
        ("TOOLCRIB_ALLOW_PLAIN_HTTP", "ALLOW_PLAIN_HTTP", "Servers may be reached without TLS", ""),
        ("TOOLCRIB_ALLOWED_NETWORKS", "ALLOWED_NETWORKS", "Networks besides the internet", ""),
        ("TOOLCRIB_MAX_BODY_BYTES", "MAX_BODY_BYTES", "Largest request to Toolcrib", "bytes"),
        ("TOOLCRIB_LOG_LEVEL", "LOG_LEVEL", "Log level", ""),
    ),
    "tokens": (
        ("TOOLCRIB_MAX_DEFINITION_BYTES", "MAX_DEFINITION_BYTES", "Largest definition", "bytes"),
        ("TOOLCRIB_MAX_DESCRIPTION_BYTES", "MAX_DESCRIPTION_BYTES", "Longest description", "bytes"),
        ("TOOLCRIB_MAX_MESSAGE_BYTES", "MAX_MESSAGE_BYTES", "Largest result of a call", "bytes"),
        ("TOOLCRIB_MAX_CONTENT_ITEMS", "MAX_CONTENT_ITEMS", "Items in one result", "items"),
        ("TOOLCRIB_CALL_TIMEOUT", "CALL_TIMEOUT", "A call to a new server may take", "seconds"),
        ("TOOLCRIB_CALLS_IN_FLIGHT", "CALLS_IN_FLIGHT", "Calls at once to one server", "calls"),
        ("TOOLCRIB_CALLS_QUEUED", "CALLS_QUEUED", "Calls that wait for their turn", "calls"),
    ),
    "sync": (
        ("TOOLCRIB_SYNC_TIMEOUT", "SYNC_TIMEOUT", "A whole list may take", "seconds"),
        ("TOOLCRIB_SYNC_GAP", "SYNC_GAP", "Least time between two notified syncs", "seconds"),
        ("TOOLCRIB_SYNC_WORKERS", "SYNC_WORKERS", "Syncs at once in a process", "syncs"),
        ("TOOLCRIB_CONNECT_TIMEOUT", "CONNECT_TIMEOUT", "Connecting may take", "seconds"),
        ("TOOLCRIB_HANDSHAKE_TIMEOUT", "HANDSHAKE_TIMEOUT", "A handshake may take", "seconds"),
        ("TOOLCRIB_IDLE_DISCONNECT", "IDLE_DISCONNECT", "Close idle connections after", "seconds"),
        (
            "TOOLCRIB_SESSION_DISCONNECT",
            "SESSION_DISCONNECT",
            "Close a session's own after",
            "seconds",
        ),
        (
            "TOOLCRIB_SESSION_CONNECTIONS",
            "SESSION_CONNECTIONS",
            "Sessions that have their own connections",
            "sessions",
        ),
        ("TOOLCRIB_MAX_TOOLS", "MAX_TOOLS", "Tools of one server", "tools"),
        ("TOOLCRIB_MAX_PAGES", "MAX_PAGES", "Pages of one list", "pages"),
        ("TOOLCRIB_MAX_LISTING_BYTES", "MAX_LISTING_BYTES", "Largest list", "bytes"),
        ("TOOLCRIB_STDERR_BYTES", "STDERR_BYTES", "Kept of a program's errors", "bytes"),
        (
            "TOOLCRIB_MAX_PROCESSES",
            "MAX_PROCESSES",
            "Processes and threads of one program",
            "at most",
        ),
    ),
    "retention": (),
}


class PreferencesForm(forms.Form):
    """The preferences of a section that the environment does not fix, in people's units."""

    def __init__(self, section: str, *args: Any, **kwargs: Any) -> None:
        now = preferences.values(section)
        kwargs["initial"] = {name: _typed(PREFERENCES[name], value) for name, value in now.items()}
        super().__init__(*args, **kwargs)
        for known in _known(section):
            if not known.fixed:
                self.fields[known.name] = _field(known)

    def wanted(self) -> dict[str, Any]:
        return {name: value * PREFERENCES[name].per for name, value in self.cleaned_data.items()}

    def rows(self) -> list[tuple[forms.BoundField, PreferenceSpec]]:
        return [(self[name], PREFERENCES[name]) for name in self.fields]


def _known(section: str) -> list[PreferenceSpec]:
    return [known for known in PREFERENCES.values() if known.section == section]


def _field(known: PreferenceSpec) -> forms.Field:
    kind = forms.IntegerField if known.whole else forms.FloatField
    return kind(
        label=known.label,
        help_text=known.effect,
        min_value=_typed(known, known.low),
        max_value=_typed(known, known.high),
    )


def _typed(known: PreferenceSpec, value: Any) -> Any:
    return int(value) // known.per if float(value).is_integer() else value


def _stated(known: PreferenceSpec, value: Any) -> str:
    if known.per > 1:
        return duration(value)
    return f"{value:,} {known.unit}".strip()


# --- Pages --------------------------------------------------------------------------------------


def side(current: str) -> list[dict[str, object]]:
    """List the pages of settings, for the column at the left."""
    return [
        {
            "label": title,
            "url": reverse(name, args=[key] if name == "settings-section" else []),
            "current": key == current,
        }
        for key, title, name in PAGES
    ]


@require_safe
@operator_required
def first(request: HttpRequest) -> HttpResponse:
    return redirect("settings-section", "general")


@require_http_methods(["GET", "HEAD", "POST"])
@operator_required
def section(request: HttpRequest, name: str) -> HttpResponse:
    if name not in SECTIONS:
        raise NotFound("There are no such settings.", hint="The list at the left has them all.")
    if request.method == "POST":
        require(Role.ADMIN, request.user)
    form = PreferencesForm(name, request.POST if request.method == "POST" else None)
    if form.is_bound and form.is_valid():
        try:
            changed = preferences.change(form.wanted(), actor=actor_of(request))
        except ToolcribError as error:
            form.add_error(None, error.sentence)
        else:
            messages.success(request, _said(changed))
            return redirect("settings-section", name)
    title, answer = SECTIONS[name]
    context: dict[str, Any] = {
        "side": side(name),
        "title": title,
        "answer": answer,
        "form": form,
        "may_change": role_of(request.user) == Role.ADMIN,
        "stated": _stated_rows(name, fixed=role_of(request.user) == Role.ADMIN),
        "environment": _environment(name),
        "estimator": token_counter.estimator() if name == "tokens" else "",
    }
    return render(
        request, "toolcrib/pages/settings.html", context, status=422 if form.errors else 200
    )


def _said(changed: Iterable[PreferenceSpec]) -> str:
    names = [known.label.lower() for known in changed]
    return f"Saved: {', '.join(names)}. It holds from now on." if names else "Nothing was changed."


def _stated_rows(section: str, *, fixed: bool) -> list[dict[str, object]]:
    """List values to read: those that are fixed, or all for those who may change none."""
    now = preferences.values(section)
    return [
        {
            "label": known.label,
            "value": _stated(known, now[known.name]),
            "effect": known.effect,
            "variable": known.variable if known.fixed else "",
        }
        for known in _known(section)
        if known.fixed or not fixed
    ]


def _environment(section: str) -> list[dict[str, object]]:
    return [
        {
            "label": label,
            "value": _plain(getattr(settings, attribute), unit),
            "variable": variable,
            "given": variable in settings.FROM_ENVIRONMENT,
        }
        for variable, attribute, label, unit in ENVIRONMENT[section]
    ]


def _plain(value: object, unit: str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, int):
        return duration(value) if unit == "seconds" else f"{value:,} {unit}".strip()
    return str(value)


@require_safe
@operator_required
def about_page(request: HttpRequest) -> HttpResponse:
    facts = about.facts()
    context = {"side": side("about"), "parts": facts, "report": about.report(facts)}
    return render(request, "toolcrib/pages/about.html", context)


@require_http_methods(["GET", "HEAD", "POST"])
@operator_required
def profile(request: HttpRequest) -> HttpResponse:
    """Let a person switch single keys off: those who speak to their machine press them by chance.

    Kept in a cookie, since it belongs to the device as much as to the person.
    """
    if request.method == "POST":
        on = bool(request.POST.get("keys"))
        messages.success(request, f"Single keys are {'on' if on else 'off'} in this browser.")
        response = redirect("profile")
        response.set_cookie("keys", "on" if on else "off", max_age=31_536_000, samesite="Lax")
        return response
    return render(request, "toolcrib/pages/settings_profile.html", {"side": side("profile")})
