"""Models for sessions, their loaded tools and shown definitions."""

import secrets
from datetime import timedelta
from typing import Self

from django.db import models
from django.db.models import Q
from django.utils import timezone

from catalog.models import CatalogSnapshot, Definition, Tool
from sessions_app.models.agents import Agent, ApiKey, Mode, Strategy
from sessions_app.models.encryption import EncryptedTextField
from toolcrib.lib.figures import TokenFigures


class SessionState(models.TextChoices):
    OPEN = "open"
    CLOSED = "closed"
    EXPIRED = "expired"


def new_session_id() -> str:
    return f"ses_{secrets.token_hex(16)}"


class SessionQuerySet(models.QuerySet["AgentSession"]):
    def open(self) -> Self:
        return self.filter(state=SessionState.OPEN)

    def with_catalog(self) -> Self:
        """Join agent and snapshot. The snapshot's body can be a megabyte, so it is deferred."""
        return self.select_related("agent", "snapshot").defer("snapshot__body")


class AgentSession(models.Model):
    """One run of an agent. The snapshot fixes its catalog when it opens."""

    session_id = models.CharField(max_length=40, unique=True, default=new_session_id)
    agent = models.ForeignKey(  # indexed by session_by_agent_state
        Agent, on_delete=models.CASCADE, related_name="sessions", db_index=False
    )
    parent = models.ForeignKey(
        "self", null=True, blank=True, on_delete=models.SET_NULL, related_name="forks"
    )
    strategy = models.CharField(max_length=8, choices=Strategy.choices)
    mode = models.CharField(max_length=8, choices=Mode.choices)  # full or deferred, never auto
    auto_deferred = models.BooleanField(default=False)
    decided_by = models.CharField(max_length=8)
    snapshot = models.ForeignKey(CatalogSnapshot, on_delete=models.PROTECT, related_name="+")
    revision = models.PositiveBigIntegerField()
    state = models.CharField(max_length=8, choices=SessionState.choices, default=SessionState.OPEN)
    model = models.CharField(max_length=200, blank=True)
    context_window = models.PositiveBigIntegerField(null=True, blank=True)
    tool_threshold = models.PositiveIntegerField(null=True, blank=True)  # null: the agent's
    wanted_groups = models.JSONField(null=True, blank=True)  # group keys; null: all of the agent's
    wanted_servers = models.JSONField(null=True, blank=True)  # slugs; null: any
    without_mcp = models.BooleanField(default=False)
    # Opened over MCP by an agent that does not run custom tools.
    without_custom = models.BooleanField(default=False)
    # Whether its client can ask its user, so that it gets tools which need that.
    elicits = models.BooleanField(default=False)
    # JSON. Given back to its agent as it was, and redacted for people.
    metadata = EncryptedTextField(default="{}", only_with_secrets=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    last_used_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)
    # Token ledger: baseline (all schemas), tokens sent by source, and loaded definitions.
    tokens_all = models.PositiveIntegerField(default=0)
    tokens_catalog = models.PositiveIntegerField(default=0)
    tokens_search = models.PositiveIntegerField(default=0)
    tokens_load = models.PositiveIntegerField(default=0)
    tokens_call = models.PositiveIntegerField(default=0)
    tokens_loaded = models.PositiveIntegerField(default=0)  # counts towards the budget
    calls = models.PositiveIntegerField(default=0)
    errors = models.PositiveIntegerField(default=0)
    # Increases whenever the loaded tools or the shown definitions change.
    loads_version = models.PositiveIntegerField(default=0)
    # Increases whenever a call of the session is held; 0 if none ever was.
    holds_version = models.PositiveIntegerField(default=0)

    objects = SessionQuerySet.as_manager()

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.CheckConstraint(
                condition=Q(state__in=SessionState.values), name="session_state_known"
            ),
            models.CheckConstraint(
                condition=Q(mode__in=[Mode.FULL, Mode.DEFERRED]), name="session_mode_decided"
            ),
        ]
        indexes = [
            models.Index(fields=["agent", "state", "last_used_at"], name="session_by_agent_state"),
            models.Index(fields=["state", "last_used_at"], name="session_by_state"),
            models.Index(fields=["created_at"], name="session_by_creation"),
        ]

    def __str__(self) -> str:
        return self.session_id

    @property
    def token_figures(self) -> TokenFigures:
        return TokenFigures(
            baseline=self.tokens_all,
            catalog=self.tokens_catalog,
            searches=self.tokens_search,
            definitions=self.tokens_load,
            results=self.tokens_call,
        )

    @property
    def duration(self) -> timedelta:
        """Return the time from the session's start to its end or last use."""
        return max((self.ended_at or self.last_used_at) - self.created_at, timedelta(0))


class Expansion(models.Model):
    """The tools that a session loaded from one group, with their pinned definitions.

    `names` is null if the whole group is loaded, otherwise the names loaded individually.
    `listed` is the result of the first load of the whole group. `pins` holds by public name what
    the session was shown: definition, description override, position and load order.
    """

    session = models.ForeignKey(  # indexed by one_expansion_per_group
        AgentSession, on_delete=models.CASCADE, related_name="expansions", db_index=False
    )
    group_id = models.CharField(max_length=80)  # as in the session's catalog
    names = models.JSONField(null=True, blank=True)
    listed = models.JSONField(null=True, blank=True)
    pins = models.TextField(default="{}")  # JSON
    sequence = models.PositiveIntegerField()

    class Meta:
        ordering = ["sequence"]
        constraints = [
            models.UniqueConstraint(fields=["session", "group_id"], name="one_expansion_per_group")
        ]

    def __str__(self) -> str:
        return f"{self.session_id}/{self.group_id}"


class ShownDefinition(models.Model):
    """A newer definition of a tool, returned to a session with a `definition_changed` error.

    It replaces the pinned definition when the session loads the tool or reads its details.
    """

    session = models.ForeignKey(  # indexed by one_shown_definition_per_tool
        AgentSession, on_delete=models.CASCADE, related_name="shown_definitions", db_index=False
    )
    tool = models.ForeignKey(Tool, on_delete=models.CASCADE, related_name="+")
    definition = models.ForeignKey(Definition, on_delete=models.PROTECT, related_name="+")
    override = models.TextField(blank=True)  # the description override at that time

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["session", "tool"], name="one_shown_definition_per_tool"
            )
        ]

    def __str__(self) -> str:
        return f"{self.session_id}/{self.tool_id}"


def new_connection_id() -> str:
    return secrets.token_hex(16)


class RollingSession(models.Model):
    """The session of stateless MCP clients that name no session: one for each label of a key."""

    key = models.ForeignKey(ApiKey, on_delete=models.CASCADE, related_name="rolling_sessions")
    label = models.CharField(max_length=64)  # digest of client, name of the session, and mode
    session = models.ForeignKey(AgentSession, on_delete=models.CASCADE, related_name="+")

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(fields=["key", "label"], name="rolling_session_once_per_label")
        ]

    def __str__(self) -> str:
        return self.label


class McpConnection(models.Model):
    """A connection of an MCP client that did the handshake (protocol versions before 2026).

    Kept in the database, so that every process serves it, also after a restart. Its session is
    opened by the first request that needs one.
    """

    connection_id = models.CharField(max_length=40, unique=True, default=new_connection_id)
    key = models.ForeignKey(ApiKey, on_delete=models.CASCADE, related_name="mcp_connections")
    session = models.ForeignKey(
        AgentSession, null=True, blank=True, on_delete=models.CASCADE, related_name="+"
    )
    protocol_version = models.CharField(max_length=20)
    client = models.TextField(default="{}")  # JSON: name and version, as the client reports them
    capabilities = models.TextField(default="{}")  # JSON, as the client declared them
    strategy = models.CharField(max_length=8, choices=Strategy.choices, blank=True)  # from the URL
    mode = models.CharField(max_length=8, choices=Mode.choices, blank=True)  # likewise
    cancelled = models.TextField(default="[]")  # JSON: ids of requests to cancel
    # JSON: [id, response] of what its user answered, for the process that asked.
    answers = EncryptedTextField(default="[]")
    subscriptions = models.TextField(default="[]")  # JSON: URIs of resources
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return self.connection_id
