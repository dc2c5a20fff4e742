"""Text search over sessions: queries, tools, error codes and messages, metadata; no payloads.

Each part looks at the newest rows only, through an index, so that a search costs the same with a
million calls. Metadata that may contain secrets is encrypted and not found.
"""

from django.db.models import Q

from catalog.models import Tool
from sessions_app.models import AgentSession, Call, Event, EventKind

SEARCHED_ROWS = 20_000  # newest searches, errors and sessions that are looked at
MAX_TOOLS = 50  # tools whose name contains the text
MAX_ID_LENGTH = 40


def matching(text: str) -> Q:
    """Return the condition of sessions in which this text occurs."""
    searches = Event.objects.filter(kind=EventKind.SEARCHED).order_by("-at").values("pk")
    queries = Event.objects.filter(pk__in=searches[:SEARCHED_ROWS], details__icontains=text)
    failed = Call.objects.exclude(error_code="").order_by("-pk").values("pk")
    errors = Call.objects.filter(pk__in=failed[:SEARCHED_ROWS]).filter(
        Q(error_code__icontains=text)
        | Q(error_message__icontains=text)
        | Q(tool_name__icontains=text)
    )
    newest = AgentSession.objects.order_by("-pk").values("pk")[:SEARCHED_ROWS]
    about = AgentSession.objects.filter(pk__in=newest).filter(
        Q(metadata__icontains=text) | Q(model__icontains=text)
    )
    condition = (
        Q(pk__in=queries.order_by().values("session"))
        | Q(pk__in=errors.order_by().values("session"))
        | Q(pk__in=about.order_by().values("pk"))
    )
    tools = list(
        Tool.objects.filter(public_name__icontains=text).values_list("pk", flat=True)[:MAX_TOOLS]
    )
    if tools:
        condition |= Q(pk__in=Call.objects.filter(tool__in=tools).order_by().values("session"))
    if text.startswith("ses_") and len(text) <= MAX_ID_LENGTH:
        condition |= Q(session_id__startswith=text)
    return condition
