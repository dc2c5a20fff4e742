"""The audit log: who changed what, when? Reads only; nothing writes it but `catalog.audit`."""

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
    wanted = AuditFilter.read(request.GET)
    page = audit_queries.page_of(wanted)
    context: dict[str, Any] = {
        "page": page,
        "rows": [AuditRow.of(entry) for entry in page.rows],
        "shown": f"{page.total:,} {'entry' if page.total == 1 else 'entries'}",
        "wanted": wanted,
        "local": request.GET.get("times") == "local",
        "left_out": audit_queries.left_out(page.total),
        "query": _query(request, drop=("before", "after", "times")),
    }
    if is_htmx_fragment(request):
        response = render(request, "catalog/audit/_log.html", context)
        query = _query(request)
        response["HX-Push-Url"] = f"{request.path}?{query}" if query else request.path
        return response
    context["facets"] = audit_queries.facets(wanted)
    return render(request, "catalog/audit/log.html", context)


def _query(request: HttpRequest, drop: tuple[str, ...] = ()) -> str:
    """Return this address's query without the fields that were left empty."""
    kept = QueryDict(mutable=True)
    for name, values in request.GET.lists():
        if name not in drop and (filled := [value for value in values if value]):
            kept.setlist(name, filled)
    return kept.urlencode()


@require_safe
@operator_required
def export_csv(request: HttpRequest) -> HttpResponse:
    return _file(request, audit_queries.as_csv, "csv", "text/csv; charset=utf-8")


@require_safe
@operator_required
def export_json(request: HttpRequest) -> HttpResponse:
    return _file(request, audit_queries.as_json, "json", "application/json")


def _file(
    request: HttpRequest, write: Callable[[AuditFilter], str], ending: str, kind: str
) -> HttpResponse:
    response = HttpResponse(write(AuditFilter.read(request.GET)), content_type=kind)
    name = f"toolcrib-audit-{timezone.now():%Y-%m-%d}.{ending}"
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    return response
