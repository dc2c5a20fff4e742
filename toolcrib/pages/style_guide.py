"""Style guide page: every UI component in all its states, with sample data.

Also the target of the visual and accessibility tests. Reads no data of this installation.
"""

import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from django import forms
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_safe

from sessions_app.usage.panels import Panel, PanelRow
from toolcrib.lib import charts
from toolcrib.lib.roles import operator_required
from toolcrib.pages import command_palette
from toolcrib.pages.attention import AttentionItem
from toolcrib.templatetags.toolcrib import BADGES, STATUSES

SAMPLES: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())

ATTENTION = [
    AttentionItem(
        "crm: failing for 35 min, 3 retries. Connection refused.",
        "View server",
        "#states",
        "triangle",
    ),
    AttentionItem("The description of get_forecast changed.", "Review change", "#states", "pencil"),
]

CHOICES = [
    command_palette.Choice("Servers", "#palettes", keys="g s"),
    command_palette.Choice("weather__get_forecast", "#palettes", "Pending review", mono=True),
    command_palette.Choice("Sync weather", "#palettes", "fetch its tools now"),
]


class SampleForm(forms.Form):
    name = forms.SlugField(help_text="Lower case. Agents see it as the prefix of tool names.")
    url = forms.URLField(label="URL", assume_scheme="https", required=False)
    transport = forms.ChoiceField(choices=[("http", "http"), ("stdio", "stdio")])
    config = forms.CharField(
        label="mcp.json", widget=forms.Textarea(attrs={"class": "mono", "rows": 4})
    )
    trust = forms.ChoiceField(
        label="When a definition changes",
        choices=[("review", "Require approval"), ("auto", "Accept automatically")],
        widget=forms.RadioSelect,
    )
    confirmed = forms.BooleanField(
        label="Allow this command",
        help_text="It runs on this machine with the permissions of Toolcrib's user.",
    )


@require_safe
@operator_required
def patterns(request: HttpRequest) -> HttpResponse:
    return render(request, "toolcrib/pages/style_guide.html", sample())


def sample() -> dict[str, object]:
    now = timezone.now()
    return {
        **SAMPLES,
        "states": list(STATUSES),
        "badges": list(BADGES),
        "moments": [now, now - timedelta(minutes=2), now - timedelta(hours=5), None],
        "trend_panel": _trend_panel(now),
        "meter": charts.stacked_area(
            {"catalog": [900] * 6, "definitions": [0, 0, 310, 1200, 1200, 1700]}, limit=4000
        ),
        "sections": [
            command_palette.Section("Pages", CHOICES[:2]),
            command_palette.Section("Actions", CHOICES[2:]),
        ],
        "form": SampleForm(initial={"name": "weather", "trust": "review"}),
        "invalid_form": SampleForm({"name": "my server", "url": "nowhere", "transport": "http"}),
        "servers": _servers(),
        "attention": ATTENTION,
    }


def _trend_panel(now: datetime) -> Panel:
    calls, errors = (38, 52, 0, 52, 18, 0, 67), (2, 0, 0, 9, 0, 0, 3)
    days = [now - timedelta(days=back) for back in range(len(calls) - 1, -1, -1)]
    rows = [
        PanelRow(day, (str(ok + bad), str(bad)), f"{day:%a} {day.day}", reverse("sessions"))
        for day, ok, bad in zip(days, calls, errors, strict=True)
    ]
    trend = charts.trend_bars({"ok": calls, "bad": errors})
    legend = (("ok", "Calls"), ("bad", "Errors"))
    summary = "241 calls, 14 errors."
    axis = (str(trend.top), str(trend.top // 2), "0")
    return Panel(
        "sample", "Calls and errors", summary, trend, axis, legend, rows, days[::2], False, False
    )


def _servers() -> list[dict[str, object]]:
    synced = timezone.now() - timedelta(minutes=7)
    row = {"transport": "http", "tools": 14, "p95": 0.42, "synced": synced, "failures": 0}
    return [
        {**row, "name": "crm", "state": "failing", "failures": 3, "p95": None},
        {**row, "name": "files", "state": "connecting", "transport": "stdio", "synced": None},
        {**row, "name": "weather", "state": "connected", "tools": 1214, "p95": 1.31},
        {**row, "name": "archive", "state": "disabled"},
    ]
