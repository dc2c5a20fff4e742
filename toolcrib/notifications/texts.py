"""Notifications as text: for Slack and e-mail."""

from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.urls import reverse

from toolcrib.notifications import DIGEST, RAISED, RESOLVED, TEST

MAX_TEXT = 3000


def sentence(event: str, data: Mapping[str, Any]) -> str:
    """Return what happened, in one line or, for a digest, in several."""
    if event in (RAISED, RESOLVED):
        prefix = "Resolved: " if event == RESOLVED else ""
        return f"{prefix}{data['message']}"
    if event in (DIGEST, TEST):
        return str(data["message"])
    tool = f" {data['tool_name']}" if data.get("tool_name") else ""
    return f"{event}{tool}, agent {data.get('agent', '')}, session {data.get('session_id', '')}"


def link(data: Mapping[str, Any]) -> str:
    if data.get("url"):
        return str(data["url"])
    if data.get("session_id"):
        return settings.PUBLIC_URL + reverse("session", args=[data["session_id"]])
    return ""


def slack_text(event: str, data: Mapping[str, Any]) -> str:
    """Return a message in Slack's format: what servers wrote cannot become a link or mention."""
    text = sentence(event, data)[:MAX_TEXT]
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    url = link(data)
    return f"{escaped}\n<{url}>" if url else escaped


def mail(event: str, data: Mapping[str, Any]) -> tuple[str, str]:
    """Return subject and text of a mail."""
    text = sentence(event, data)[:MAX_TEXT]
    subject = " ".join(text.partition("\n")[0].split())[:150]
    return f"[Toolcrib] {subject}", f"{text}\n\n{link(data)}\n"
