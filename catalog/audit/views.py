"""Audit log page and exports."""

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.utils.http import urlencode
from django.views.decorators.http import require_safe

from catalog import audit
from catalog.audit import chain
from catalog.audit import queries as audit_queries
from catalog.audit.queries import AuditFilter, AuditRow
from toolcrib.lib.display import group_digits
from toolcrib.lib.pagination import page_by_id
from toolcrib.lib.request import clean_url, is_htmx_fragment
from toolcrib.lib.roles import actor_of, operator_required, viewer_required
from toolcrib.lib.time_ranges import range_choices

VERIFIED_ENTRIES = 2_000  # on every view of the page; a link verifies all of them
EXPORTS = {
    "csv": (audit_queries.export_csv, "text/csv; charset=utf-8"),
    "json": (audit_queries.export_json, "application/json"),
}


@require_safe
@viewer_required
def audit_log(request: HttpRequest) -> HttpResponse:
    filters = AuditFilter.read(request.GET)
    dropped = ("before", "after", "times", "verify")
    query = {name: values for name, values in request.GET.lists() if any(values)}
    query = {name: values for name, values in query.items() if name not in dropped}
    page = page_by_id(filters.entries(), before=filters.before, after=filters.after)
    context: dict[str, Any] = {
        "page": page,
        "rows": [AuditRow.from_entry(entry) for entry in page.rows],
        "shown": f"{group_digits(page.total)} {'entry' if page.total == 1 else 'entries'}",
        "filters": filters,
        "ranges": range_choices(filters.within),
        "local": request.GET.get("times") == "local",
        "truncation_note": audit_queries.truncation_note(page.total),
        "query": urlencode(query, doseq=True),
    }
    if is_htmx_fragment(request):
        response = render(request, "catalog/audit/_log_fragment.html", context)
        response["HX-Push-Url"] = clean_url(request)
        return response
    context["facets"] = audit_queries.facets(filters)
    context["chain"] = chain.verify(None if "verify" in request.GET else VERIFIED_ENTRIES)
    return render(request, "catalog/audit/log.html", context)


@require_safe
@operator_required
def export(request: HttpRequest, extension: str) -> HttpResponse:
    write, content_type = EXPORTS[extension]
    response = HttpResponse(write(AuditFilter.read(request.GET)), content_type=content_type)
    audit.record_installation(actor_of(request), "audit.export", after={"format": extension})
    name = f"toolcrib-audit-{timezone.now():%Y-%m-%d}.{extension}"
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    return response
