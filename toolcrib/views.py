"""The overview: is everything all right, and what needs me?"""

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse

from catalog.models import Tool, ToolState
from catalog.people import operator_required
from servers.models import Server, ServerState


@operator_required
def overview(request: HttpRequest) -> HttpResponse:
    failing = list(Server.objects.filter(state=ServerState.FAILING, enabled=True)[:20])
    attention = [
        {
            "sentence": f"{server.name} is failing: {server.state_reason}",
            "url": reverse("server", args=[server.slug]),
            "verb": "Look at server",
            "glyph": "triangle",
        }
        for server in failing
    ]
    waiting = Tool.objects.filter(state=ToolState.WAITING).count()
    if waiting:
        attention.append(
            {
                "sentence": f"{waiting} definitions wait for a decision."
                if waiting > 1
                else "1 definition waits for a decision.",
                "url": reverse("tools") + "?state=waiting",
                "verb": "Review changes",
                "glyph": "pencil",
            }
        )
    last = Server.objects.exclude(last_synced_at=None).order_by("-last_synced_at").first()
    tools = Tool.objects.servable().select_related("approved")
    tokens = sum(tools.values_list("approved__tokens", flat=True))
    return render(
        request,
        "toolcrib/overview.html",
        {
            "first_run": not Server.objects.exists(),
            "attention": attention,
            "last_sync": last.last_synced_at if last else None,
            "numbers": [
                {"label": "Servers", "value": Server.objects.count(), "url": reverse("servers")},
                {"label": "Tools", "value": tools.count(), "url": reverse("tools")},
                {
                    "label": "Tokens if every tool were preloaded",
                    "value": tokens,
                    "approximate": True,
                },
            ],
        },
    )
