"""What pages share: query parameters, redirects, errors in forms, tabs, filters, fragments.

Every list reads its filters through this module, so malformed input is treated alike everywhere.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from django.contrib import messages
from django.forms import BaseForm
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.shortcuts import render
from django.urls import resolve, reverse
from django.utils.http import url_has_allowed_host_and_scheme

from toolcrib.lib.errors import ToolcribError
from toolcrib.lib.roles import required_role_of

MAX_TEXT_LENGTH = 200  # characters
MAX_QUERY_LENGTH = 2_000
MAX_DIGITS = 18  # fits a 64-bit integer column


def text(query: QueryDict, name: str, max_length: int = MAX_TEXT_LENGTH) -> str:
    """Return a parameter as trimmed text without NUL, which PostgreSQL rejects."""
    return query.get(name, "").replace("\0", "").strip()[:max_length]


def number(query: QueryDict, name: str, digits: int = MAX_DIGITS) -> int:
    """Return a parameter as a non-negative integer; 0 if it is not one."""
    value = query.get(name, "")
    return int(value) if value.isdecimal() and len(value) <= digits else 0


def time(query: QueryDict, name: str) -> datetime | None:
    """Return a parameter as a time, UTC unless it says otherwise; None if it is not one."""
    try:
        at = datetime.fromisoformat(query.get(name, "").strip())
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def clean_url(request: HttpRequest) -> str:
    """Return the request's URL without empty query parameters."""
    query = QueryDict(mutable=True)
    for name, values in request.GET.lists():
        if filled := [value for value in values if value]:
            query.setlist(name, filled)
    return f"{request.path}?{query.urlencode()}" if query else request.path


def is_htmx_fragment(request: HttpRequest) -> bool:
    """Return whether htmx requests a fragment rather than a full page through a boosted link."""
    return "HX-Request" in request.headers and "HX-Boosted" not in request.headers


def submitted_query(request: HttpRequest) -> QueryDict:
    """Return the query string of the page that a form was on, from its field `address`."""
    return QueryDict(request.POST.get("address", "")[:MAX_QUERY_LENGTH])


def redirect_back(
    request: HttpRequest, name: str, *args: object, anchor: str = ""
) -> HttpResponseRedirect:
    """Redirect to a page with the query string that it had when its form was submitted."""
    # Only the query string comes from the form, so this cannot redirect to another site.
    query = submitted_query(request)
    return HttpResponseRedirect(reverse(name, args=args, query=query, fragment=anchor or None))


def redirect_next(request: HttpRequest, default: str) -> HttpResponseRedirect:
    """Redirect to the `next` parameter if it is a URL of this site, otherwise to the default."""
    target = request.POST.get("next") or request.GET.get("next") or ""
    local = url_has_allowed_host_and_scheme(target, allowed_hosts={request.get_host()})
    return HttpResponseRedirect(target if local else default)


@contextmanager
def errors_as_messages(request: HttpRequest) -> Iterator[None]:
    try:
        yield
    except ToolcribError as error:
        messages.error(request, error.sentence)


@contextmanager
def errors_in_form(form: BaseForm, field: str | None = None) -> Iterator[None]:
    try:
        yield
    except ToolcribError as error:
        form.add_error(field, error.sentence)


def settings_rows(instance: object, form: BaseForm) -> list[dict[str, object]]:
    """List the settings as label and value, for users who cannot change them."""
    rows = []
    for bound in form.visible_fields():
        value = getattr(instance, bound.name)
        choices = dict(getattr(bound.field, "choices", ()))
        rows.append({"label": bound.label, "value": choices.get(value, value)})
    return rows


def page_tabs(
    labels: Mapping[str, str],
    current: str,
    *args: object,
    counts: Mapping[str, object] | None = None,
) -> list[dict[str, object]]:
    """Return tabs from URL names and labels; `args` are the arguments of each URL."""
    return [
        {
            "label": label,
            "url": reverse(name, args=args),
            "current": name == current,
            "count": (counts or {}).get(name),
            "level": int(required_role_of(resolve(reverse(name, args=args)).func)),
        }
        for name, label in labels.items()
    ]


def facet(
    name: str,
    label: str,
    counts: Mapping[str, int | None],
    chosen: Collection[str],
    *,
    pick: bool = False,
    label_of: Callable[[str], str] = str,
) -> dict[str, object]:
    """Return a filter of a list as chips, or as options to pick from. Chosen values stay visible.

    `counts` has the number of rows per value, or None; chips without rows are omitted.
    """
    listed = {**counts, **{value: counts.get(value) for value in chosen if value}}
    options = [
        {"value": value, "label": label_of(value), "count": count, "selected": value in chosen}
        for value, count in listed.items()
        if pick or count != 0 or value in chosen
    ]
    return {"name": name, "label": label, "options": options, "pick": pick}


def announce(response: HttpResponse, sentence: str) -> HttpResponse:
    """Let screen readers announce a sentence when htmx has inserted the response."""
    response["HX-Trigger"] = json.dumps({"announce": sentence})
    return response


def list_fragment(
    request: HttpRequest, template: str, context: dict[str, Any], announcement: str
) -> HttpResponse:
    """Render a part of a page for htmx, which then shows the URL of the whole page."""
    response = render(request, template, context)
    response["HX-Push-Url"] = clean_url(request)
    return announce(response, announcement)
