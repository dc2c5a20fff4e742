"""Settings pages. Operators read them, admins change them."""

from collections.abc import Iterable
from typing import Any

from django import forms
from django.conf import settings
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import resolve, reverse
from django.views.decorators.http import require_http_methods, require_safe

from catalog import model_prices, preferences, redaction_patterns
from catalog.preferences import PREFERENCES, PreferenceSpec
from catalog.search.embeddings.store import model_offer
from toolcrib.lib import display, figures, token_counter
from toolcrib.lib.display import group_digits
from toolcrib.lib.errors import NotFound
from toolcrib.lib.request import errors_in_form
from toolcrib.lib.roles import (
    Role,
    actor_of,
    operator_required,
    required_role_of,
    role_of,
    role_required,
    viewer_required,
)
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
    "alerts": ("Alerts", "When Toolcrib raises an alert. Notifications says who receives it."),
}
PAGES = (
    *((name, title, "settings-section") for name, (title, _) in SECTIONS.items()),
    ("notifications", "Notifications", "notifications"),
    ("prices", "Prices", "settings-prices"),
    ("masking", "Masking", "settings-masking"),
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
        ("TOOLCRIB_STDIO_LANDLOCK", "Sandbox programs with Landlock", ""),
        ("TOOLCRIB_STDIO_USER", "User that programs run as", ""),
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
        ("TOOLCRIB_MAX_PROGRAM_MEMORY", "Maximum memory per process of a program", "MB"),
    ),
    "retention": (),
    "alerts": (
        ("TOOLCRIB_EMAIL_HOST", "Mail server", ""),
        ("TOOLCRIB_EMAIL_FROM", "Sender of e-mail", ""),
    ),
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
    return f"{group_digits(value)}%" if unit == "%" else f"{group_digits(value)} {unit}".strip()


def side(current: str) -> list[dict[str, object]]:
    return [
        {
            "label": title,
            "url": reverse(name, args=[key] if name == "settings-section" else []),
            "current": key == current,
            "level": int(_required_role(name, key)),
        }
        for key, title, name in PAGES
    ]


def _required_role(name: str, key: str) -> Role:
    url = reverse(name, args=[key] if name == "settings-section" else [])
    return required_role_of(resolve(url).func)


@require_safe
@operator_required
def first_section(request: HttpRequest) -> HttpResponse:
    return redirect("settings-section", "general")


@require_http_methods(["GET", "HEAD", "POST"])
@role_required(Role.OPERATOR, write=Role.ADMIN)
def section(request: HttpRequest, name: str) -> HttpResponse:
    if name not in SECTIONS:
        raise NotFound("This settings page does not exist.", hint="Choose a page from the menu.")
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
        "model_offer": model_offer() if name == "general" else "",
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


class MaskingForm(forms.Form):
    patterns = forms.CharField(
        label="Patterns",
        required=False,
        strip=False,
        widget=forms.Textarea(attrs={"rows": 8, "class": "mono", "spellcheck": "false"}),
        help_text="One regular expression per line, in RE2 syntax, for example \\bACME-\\d{6}\\b.",
    )

    def lines(self) -> list[str]:
        lines = (line.strip() for line in self.cleaned_data["patterns"].splitlines())
        return [line for line in lines if line]


@require_http_methods(["GET", "HEAD", "POST"])
@role_required(Role.OPERATOR, write=Role.ADMIN)
def masking(request: HttpRequest) -> HttpResponse:
    """Edit the patterns of secrets, besides those that are always masked."""
    stored = redaction_patterns.read()
    form = MaskingForm(request.POST or None, initial={"patterns": "\n".join(stored)})
    if form.is_bound and form.is_valid():
        with errors_in_form(form, "patterns"):
            changed = redaction_patterns.change(form.lines(), actor=actor_of(request))
            messages.success(request, "Saved. Applies to new calls." if changed else "No changes.")
            return redirect("settings-masking")
    context = {
        "side": side("masking"),
        "form": form,
        "patterns": stored,
        "may_change": role_of(request.user) == Role.ADMIN,
    }
    status = 422 if form.errors else 200
    return render(request, "toolcrib/pages/settings_masking.html", context, status=status)


class PricesForm(forms.Form):
    currency = forms.CharField(max_length=3, help_text="A code of three letters, like USD or EUR.")
    prices = forms.CharField(
        label="Prices of a million input tokens",
        required=False,
        strip=False,
        widget=forms.Textarea(attrs={"rows": 8, "class": "mono", "spellcheck": "false"}),
        help_text="One model per line: its name as sessions report it, or a pattern with *, then "
        "the price. The first line that matches counts.",
    )


@require_http_methods(["GET", "HEAD", "POST"])
@role_required(Role.OPERATOR, write=Role.ADMIN)
def prices(request: HttpRequest) -> HttpResponse:
    """Edit the prices of models."""
    table = model_prices.read()
    initial = {"currency": table.currency, "prices": table.as_text()}
    form = PricesForm(request.POST or None, initial=initial)
    if form.is_bound and form.is_valid():
        with errors_in_form(form, "prices"):
            rows = model_prices.parse_text(form.cleaned_data["prices"])
            currency = form.cleaned_data["currency"].strip().upper()
            changed = model_prices.change(currency, rows, actor=actor_of(request))
            messages.success(request, "Saved. Applies immediately." if changed else "No changes.")
            return redirect("settings-prices")
    context = {
        "side": side("prices"),
        "form": form,
        "table": table,
        "definition": figures.COST,
        "may_change": role_of(request.user) == Role.ADMIN,
    }
    status = 422 if form.errors else 200
    return render(request, "toolcrib/pages/settings_prices.html", context, status=status)


@require_safe
@operator_required
def about_page(request: HttpRequest) -> HttpResponse:
    facts = about.facts()
    context = {"side": side("about"), "parts": facts, "report": about.report(facts)}
    return render(request, "toolcrib/pages/about.html", context)


class ProfileForm(forms.Form):
    """Personal settings, kept as cookies: they depend on the device as much as on the person."""

    timezone = forms.ChoiceField(
        label="Time zone",
        required=False,
        help_text="For times on pages. Dates of filters and exports stay in UTC.",
    )
    numbers = forms.ChoiceField(
        label="Number format", required=False, choices=list(display.NUMBER_LABELS.items())
    )
    density = forms.ChoiceField(
        label="Density",
        required=False,
        choices=list(display.DENSITIES.items()),
        help_text="Height of rows and controls. Automatic is large on touch screens.",
    )
    keys = forms.BooleanField(
        label="Keyboard shortcuts",
        required=False,
        help_text="Single-key shortcuts move, open and approve; ? lists them. Turn them off if "
        "they are triggered by accident, for example for voice-control users. Everything is also "
        "available with Tab and Enter.",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["timezone"].choices = [(name, name) for name in display.zone_names()]  # type: ignore[attr-defined]


@require_http_methods(["GET", "HEAD", "POST"])
@viewer_required
def profile(request: HttpRequest) -> HttpResponse:
    """Edit the time zone, number format, density and shortcuts of this browser."""
    initial = {**display.read(request.COOKIES), "keys": request.COOKIES.get("keys") != "off"}
    form = ProfileForm(request.POST if request.method == "POST" else None, initial=initial)
    if form.is_bound and form.is_valid():
        values = form.cleaned_data | {"keys": "on" if form.cleaned_data["keys"] else "off"}
        messages.success(request, "Saved your profile in this browser.")
        response = redirect("profile")
        for name in (*display.COOKIES, "keys"):
            response.set_cookie(name, values[name], max_age=31_536_000, samesite="Lax")
        return response
    context = {"side": side("profile"), "form": form}
    status = 422 if form.errors else 200
    return render(request, "toolcrib/pages/settings_profile.html", context, status=status)
