"""Audit log page and exports."""

from collections.abc import Callable
from typing import Any

from django.http import HttpRequest, HttpResponse, QueryDict
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from catalog.audit import queries as audit_queries
from catalog.audit.queries import AuditFilter, AuditRow
from toolcrib.lib.request import is_htmx_fragment
from toolcrib.lib.roles import operator_required


@require_safe
@operator_required
def audit_log(request: HttpRequest) -> HttpResponse:
    filters = AuditFilter.read(request.GET)
    page = audit_queries.list_entries(filters)
    context: dict[str, Any] = {
        "page": page,
        "rows": [AuditRow.from_entry(entry) for entry in page.rows],
        "shown": f"{page.total:,} {'entry' if page.total == 1 else 'entries'}",
        "filters": filters,
        "local": request.GET.get("times") == "local",
        "truncation_note": audit_queries.truncation_note(page.total),
        "query": _query(request, drop=("before", "after", "times")),
    }
    if is_htmx_fragment(request):
        response = render(request, "catalog/audit/_log.html", context)
        query = _query(request)
        response["HX-Push-Url"] = f"{request.path}?{query}" if query else request.path
        return response
    context["facets"] = audit_queries.facets(filters)
    return render(request, "catalog/audit/log.html", context)


def _query(request: HttpRequest, drop: tuple[str, ...] = ()) -> str:
    """Return the query string without empty fields and the dropped ones."""
    query = QueryDict(mutable=True)
    for name, values in request.GET.lists():
        if name not in drop and (filled := [value for value in values if value]):
            query.setlist(name, filled)
    return query.urlencode()


@require_safe
@operator_required
def export_csv(request: HttpRequest) -> HttpResponse:
    return _download(request, audit_queries.export_csv, "csv", "text/csv; charset=utf-8")


@require_safe
@operator_required
def export_json(request: HttpRequest) -> HttpResponse:
    return _download(request, audit_queries.export_json, "json", "application/json")


def _download(
    request: HttpRequest, export: Callable[[AuditFilter], str], extension: str, content_type: str
) -> HttpResponse:
    body = export(AuditFilter.read(request.GET))
    response = HttpResponse(body, content_type=content_type)
    name = f"toolcrib-audit-{timezone.now():%Y-%m-%d}.{extension}"
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    return response
