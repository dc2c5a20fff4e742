"""Filters of the session list that people save under a name, each for themselves."""

from typing import Any

from django.http import HttpRequest, QueryDict

from sessions_app.models import SavedView
from toolcrib.lib.errors import Invalid
from toolcrib.lib.request import submitted_query, text

MAX_VIEWS = 20  # of one person
MAX_QUERY = 2_000
PARAMETERS = (
    *("q", "agent", "tool", "server", "model", "state", "errors"),
    *("range", "since", "until", "sort"),
)


def clean_query(parameters: QueryDict) -> str:
    """Return the filters and the order of a list as a query string, without its page."""
    query = QueryDict(mutable=True)
    for name in PARAMETERS:
        if values := [value for value in parameters.getlist(name) if value]:
            query.setlist(name, values)
    return query.urlencode()


def list_views(request: HttpRequest) -> list[SavedView]:
    return list(SavedView.objects.filter(user=request.user.pk)[:MAX_VIEWS])


def save_view(request: HttpRequest) -> None:
    """Save the filters in the field `address` under a name; the same name is replaced."""
    name = text(request.POST, "name", 60)
    query = clean_query(submitted_query(request))
    if not name:
        raise Invalid("The view needs a name.")
    if not query or len(query) > MAX_QUERY:
        raise Invalid("There is nothing to save.", hint="Set a filter or an order first.")
    user: Any = request.user
    views = SavedView.objects.filter(user=user)
    if views.exclude(name=name).count() >= MAX_VIEWS:
        raise Invalid(f"At most {MAX_VIEWS} views are saved.", hint="Remove one first.")
    SavedView.objects.update_or_create(user=user, name=name, defaults={"query": query})


def remove_view(request: HttpRequest, name: str) -> None:
    SavedView.objects.filter(user=request.user.pk, name=name[:60]).delete()
