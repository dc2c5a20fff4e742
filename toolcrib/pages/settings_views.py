"""Settings pages. Operators read them, admins change them."""

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
from toolcrib.lib.errors import NotFound
from toolcrib.lib.request import errors_in_form
from toolcrib.lib.roles import Role, actor_of, operator_required, require, role_of
from toolcrib.pages import about
from toolcrib.templatetags.toolcrib import duration

SECTIONS = {
    "general": ("General", "General settings."),
    "tokens": (
        "Tokens and budgets",
        "Defaults for new agents. Existing agents keep their settings.",
    ),
    "sync": ("Sync", "Intervals, timeouts and limits for fetching tools from servers."),
    "retention": ("Retention", "Data retention."),
}
PAGES = (
    *((name, title, "settings-section") for name, (title, _) in SECTIONS.items()),
    ("people", "People", "people"),
    ("about", "About", "about"),
    ("profile", "Your profile", "profile"),
)
# Settings that only the environment sets: (variable, label, unit), by section.
ENVIRONMENT: dict[str, tuple[tuple[str, str, str], ...]] = {
    "general": (
        ("TOOLCRIB_PUBLIC_URL", "Public URL (links and snippets)", ""),
        ("TOOLCRIB_HOSTS", "Allowed host names", ""),
        ("TOOLCRIB_HTTPS", "Served over HTTPS", ""),
        ("TOOLCRIB_ALLOW_STDIO", "Allow stdio servers (local programs)", ""),
        ("TOOLCRIB_ALLOW_PLAIN_HTTP", "Allow servers without TLS", ""),
        ("TOOLCRIB_ALLOWED_NETWORKS", "Allowed private networks", ""),
        ("TOOLCRIB_MAX_BODY_BYTES", "Maximum request size", "bytes"),
        ("TOOLCRIB_LOG_LEVEL", "Log level", ""),
    ),
    "tokens": (
        ("TOOLCRIB_MAX_DEFINITION_BYTES", "Maximum definition size", "bytes"),
        ("TOOLCRIB_MAX_DESCRIPTION_BYTES", "Maximum description", "bytes"),
        ("TOOLCRIB_MAX_MESSAGE_BYTES", "Maximum result size", "bytes"),
        ("TOOLCRIB_MAX_CONTENT_ITEMS", "Maximum items in a result", "items"),
        ("TOOLCRIB_CALL_TIMEOUT", "Default call timeout", "seconds"),
        ("TOOLCRIB_CALLS_IN_FLIGHT", "Concurrent calls per server", "calls"),
        ("TOOLCRIB_CALLS_QUEUED", "Queued calls per server", "calls"),
    ),
    "sync": (
        ("TOOLCRIB_SYNC_TIMEOUT", "Sync timeout", "seconds"),
        ("TOOLCRIB_SYNC_GAP", "Minimum interval of notified syncs", "seconds"),
        ("TOOLCRIB_SYNC_WORKERS", "Concurrent syncs per process", "syncs"),
        ("TOOLCRIB_CONNECT_TIMEOUT", "Connect timeout", "seconds"),
        ("TOOLCRIB_HANDSHAKE_TIMEOUT", "Handshake timeout", "seconds"),
        ("TOOLCRIB_IDLE_DISCONNECT", "Idle connection timeout", "seconds"),
        ("TOOLCRIB_SESSION_DISCONNECT", "Idle timeout of session connections", "seconds"),
        ("TOOLCRIB_SESSION_CONNECTIONS", "Sessions with dedicated connections", "sessions"),
        ("TOOLCRIB_MAX_TOOLS", "Maximum tools per server", "tools"),
        ("TOOLCRIB_MAX_PAGES", "Maximum pages per tool list", "pages"),
        ("TOOLCRIB_MAX_LISTING_BYTES", "Maximum tool list size", "bytes"),
        ("TOOLCRIB_STDERR_BYTES", "Stored stderr per program", "bytes"),
        ("TOOLCRIB_MAX_PROCESSES", "Maximum processes and threads per program", ""),
    ),
    "retention": (),
}


class PreferencesForm(forms.Form):
    """Form for the preferences of a section that no environment variable fixes."""

    def __init__(self, section: str, *args: Any, **kwargs: Any) -> None:
        current = preferences.values(section)
        kwargs["initial"] = {
            name: _displayed(PREFERENCES[name], value) for name, value in current.items()
        }
        super().__init__(*args, **kwargs)
        for spec in _specs(section):
            if not spec.is_fixed:
                self.fields[spec.name] = _field(spec)

    def stored_values(self) -> dict[str, Any]:
        """Return the entered values in the units in which they are stored."""
        return {name: value * PREFERENCES[name].scale for name, value in self.cleaned_data.items()}

    def rows(self) -> list[tuple[forms.BoundField, PreferenceSpec]]:
        return [(self[name], PREFERENCES[name]) for name in self.fields]


def _specs(section: str) -> list[PreferenceSpec]:
    return [spec for spec in PREFERENCES.values() if spec.section == section]


def _field(spec: PreferenceSpec) -> forms.Field:
    field_class = forms.IntegerField if spec.is_integer else forms.FloatField
    return field_class(
        label=spec.label,
        help_text=spec.help_text,
        min_value=_displayed(spec, spec.minimum),
        max_value=_displayed(spec, spec.maximum),
    )


def _displayed(spec: PreferenceSpec, value: Any) -> Any:
    return int(value) // spec.scale if float(value).is_integer() else value


def _format_preference(spec: PreferenceSpec, value: Any) -> str:
    return duration(value) if spec.scale > 1 else _with_unit(value, spec.unit)


def _with_unit(value: float, unit: str) -> str:
    return f"{value:,}%" if unit == "%" else f"{value:,} {unit}".strip()


def side(current: str) -> list[dict[str, object]]:
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
def first_section(request: HttpRequest) -> HttpResponse:
    return redirect("settings-section", "general")


@require_http_methods(["GET", "HEAD", "POST"])
@operator_required
def section(request: HttpRequest, name: str) -> HttpResponse:
    if name not in SECTIONS:
        raise NotFound("This settings page does not exist.", hint="Choose a page from the menu.")
    if request.method == "POST":
        require(Role.ADMIN, request.user)
    form = PreferencesForm(name, request.POST if request.method == "POST" else None)
    if form.is_bound and form.is_valid():
        with errors_in_form(form):
            changed = preferences.change(form.stored_values(), actor=actor_of(request))
            messages.success(request, _saved_message(changed))
            return redirect("settings-section", name)
    title, answer = SECTIONS[name]
    context: dict[str, Any] = {
        "side": side(name),
        "title": title,
        "answer": answer,
        "form": form,
        "may_change": role_of(request.user) == Role.ADMIN,
        "read_only": _read_only_rows(name, fixed_only=role_of(request.user) == Role.ADMIN),
        "environment": _environment(name),
        "estimator": token_counter.estimator() if name == "tokens" else "",
    }
    status = 422 if form.errors else 200
    return render(request, "toolcrib/pages/settings.html", context, status=status)


def _saved_message(changed: Iterable[PreferenceSpec]) -> str:
    names = [spec.label.lower() for spec in changed]
    return f"Saved: {', '.join(names)}. Applies immediately." if names else "No changes."


def _read_only_rows(section: str, *, fixed_only: bool) -> list[dict[str, object]]:
    """Return the preferences fixed by the environment, or all of them."""
    current = preferences.values(section)
    return [
        {
            "label": spec.label,
            "value": _format_preference(spec, current[spec.name]),
            "help_text": spec.help_text,
            "variable": spec.variable if spec.is_fixed else "",
        }
        for spec in _specs(section)
        if spec.is_fixed or not fixed_only
    ]


def _environment(section: str) -> list[dict[str, object]]:
    return [
        {
            "label": label,
            "value": _format_setting(_setting(variable), unit),
            "variable": variable,
            "is_set": variable in settings.FROM_ENVIRONMENT,
        }
        for variable, label, unit in ENVIRONMENT[section]
    ]


def _setting(variable: str) -> object:
    name = variable.removeprefix("TOOLCRIB_")
    return getattr(settings, "ALLOWED_HOSTS" if name == "HOSTS" else name)


def _format_setting(value: object, unit: str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, int):
        return duration(value) if unit == "seconds" else _with_unit(value, unit)
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
    """Let a user turn keyboard shortcuts off: voice-control users trigger them by accident.

    Stored in a cookie, since it depends on the device as much as on the user.
    """
    if request.method == "POST":
        state = "on" if request.POST.get("keys") else "off"
        messages.success(request, f"Keyboard shortcuts are {state} in this browser.")
        response = redirect("profile")
        response.set_cookie("keys", state, max_age=31_536_000, samesite="Lax")
        return response
    return render(request, "toolcrib/pages/settings_profile.html", {"side": side("profile")})
