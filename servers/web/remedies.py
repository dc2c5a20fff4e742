"""Remedies of failing servers: the one action that may fix a failure, and since when it fails.

Reads the failure that the last connection stored. Text of the server is untrusted: only a name that
looks like an environment variable is taken from it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from django.db.models import prefetch_related_objects
from django.urls import reverse
from django.utils import timezone

from servers.models import Credential, Server, ServerState, Transport
from toolcrib.lib.text import plural
from toolcrib.templatetags.toolcrib import duration

# An upper-case name in a line that says that it is missing: "crm: CRM_TOKEN is not set".
_NAME = r"\b([A-Z][A-Z0-9]*_[A-Z0-9_]{1,60})\b"
_MISSING = re.compile(
    rf"{_NAME}[^\n]{{0,40}}?\b(?:not set|unset|missing|required|not defined|undefined|empty)\b"
    rf"|\b(?:missing|requires?|required|set|provide|expected)\b[^\n]{{0,40}}?{_NAME}"
)
MAX_LINES = 20
# Failures of the address or the command: reconnecting without an edit fails again.
_CONNECTION_CODES = frozenset(
    ("resolve", "not_mcp", "tls", "command_not_found", "not_executable", "redirect")
)


@dataclass(frozen=True)
class Remedy:
    """An action for admins. With `post`, a form that reconnects; otherwise a link to a setting."""

    label: str
    url: str
    post: bool = False


def missing_variable(server: Server) -> str:
    """Return the environment variable that the program said it lacks; empty if it named none."""
    if server.transport != Transport.STDIO:
        return ""
    for line in reversed(server.state_detail.strip().splitlines()[-MAX_LINES:]):
        if match := _MISSING.search(line[:500]):
            return match[1] or match[2]
    return ""


def find_remedy(server: Server, credentials: list[Credential]) -> Remedy:
    """Return the action that may fix a failing server, given its credentials."""
    settings_url = reverse("server-settings", args=[server.slug])
    voided = [credential.name for credential in credentials if credential.voided]
    if voided:
        return Remedy(f"Enter {voided[0]}", f"{settings_url}#credentials")
    name = missing_variable(server)
    if name and name not in {credential.name for credential in credentials}:
        return Remedy(f"Add {name}", f"{settings_url}?credential={name}#credentials")
    if name:
        return Remedy(f"Replace {name}", f"{settings_url}#credentials")
    if server.state_code == "auth":
        return Remedy("Enter credentials", f"{settings_url}#credentials")
    if server.state_code in _CONNECTION_CODES:
        return Remedy("Edit connection", f"{settings_url}#connection")
    return Remedy("Reconnect", reverse("server-sync", args=[server.slug]), post=True)


def find_remedies(servers: Iterable[Server]) -> dict[int, Remedy]:
    """Return the remedies of the failing servers among these, by primary key, in one query."""
    failing = [server for server in servers if server.state == ServerState.FAILING]
    prefetch_related_objects(failing, "credentials")
    return {server.pk: find_remedy(server, list(server.credentials.all())) for server in failing}


def failing_label(server: Server) -> str:
    """Describe a failure: "Failing for 35 min, 51 retries"; empty if the server is not failing."""
    if server.state != ServerState.FAILING:
        return ""
    label = "Failing"
    if server.state_since:
        seconds = max(1, round((timezone.now() - server.state_since).total_seconds()))
        # Seconds do not matter after the first minute, and make the page change all the time.
        label += f" for {duration(seconds if seconds < 60 else seconds // 60 * 60)}"
    if server.failures:
        label += f", {plural(server.failures, 'retry', 'retries')}"
    return label
