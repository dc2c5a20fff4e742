"""The callers' nouns: agents, keys, sessions, what was loaded, called and seen.

Values that agents and servers sent are kept as JSON text, never as jsonb, which would refuse
some of them and reorder the rest.
"""

import secrets
from typing import Self

from django.conf import settings
from django.db import models
from django.db.models import Q

from catalog.models import CatalogSnapshot, Definition, Group, Tool
from servers.models import Server


class Strategy(models.TextChoices):
    DISPATCH = "dispatch"
    INJECT = "inject"


class Mode(models.TextChoices):
    AUTO = "auto"
    DEFERRED = "deferred"
    FULL = "full"


class Agent(models.Model):
    """A caller with keys, the groups it may use, and its limits."""

    name = models.CharField(max_length=80, unique=True)
    description = models.TextField(blank=True)
    all_groups = models.BooleanField(default=False)  # including those to come
    groups = models.ManyToManyField(Group, through="AgentGroup", related_name="agents")
    strategy = models.CharField(max_length=8, choices=Strategy.choices, default=Strategy.DISPATCH)
    mode = models.CharField(max_length=8, choices=Mode.choices, default=Mode.AUTO)
    tool_threshold = models.PositiveIntegerField(default=15)
    threshold_tokens = models.PositiveIntegerField(default=10_000)
    threshold_percent = models.FloatField(default=5.0)
    catalog_budget = models.PositiveIntegerField(default=2_000)
    catalog_header = models.TextField(blank=True)  # instead of ours
    budget = models.PositiveIntegerField(null=True, blank=True)  # loaded tokens a session may have
    calls_in_flight = models.PositiveIntegerField(default=20)
    calls_per_minute = models.PositiveIntegerField(default=600)
    searches_per_minute = models.PositiveIntegerField(default=120)
    max_sessions = models.PositiveIntegerField(default=100)
    enabled = models.BooleanField(default=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["name"]
        constraints = [
            models.CheckConstraint(
                condition=Q(strategy__in=Strategy.values), name="agent_strategy_known"
            ),
            models.CheckConstraint(condition=Q(mode__in=Mode.values), name="agent_mode_known"),
        ]

    def __str__(self) -> str:
        return self.name


class AgentGroup(models.Model):
    """A group an agent may use, in the order its catalog has them."""

    agent = models.ForeignKey(Agent, on_delete=models.CASCADE, related_name="group_links")
    group = models.ForeignKey(Group, on_delete=models.CASCADE, related_name="agent_links")
    position = models.PositiveIntegerField(default=0)

    class Meta:
        ordering = ["position", "group__group_id"]
        constraints = [
            models.UniqueConstraint(fields=["agent", "group"], name="group_once_per_agent")
        ]

    def __str__(self) -> str:
        return f"{self.agent_id}/{self.group_id}"


class Scope(models.TextChoices):
    ADMIN = "admin"
    OPERATOR = "operator"
    AGENT = "agent"


class ApiKey(models.Model):
    """A bearer token, kept as a digest. `prefix` is what people recognise it by."""

    name = models.CharField(max_length=120)
    prefix = models.CharField(max_length=12)
    sha256 = models.CharField(max_length=64, unique=True)
    scope = models.CharField(max_length=8, choices=Scope.choices)
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        null=True,
        blank=True,
        on_delete=models.CASCADE,
        related_name="api_keys",
    )
    agent = models.ForeignKey(
        Agent, null=True, blank=True, on_delete=models.CASCADE, related_name="keys"
    )
    created_at = models.DateTimeField(auto_now_add=True)
    created_by = models.CharField(max_length=200, blank=True)
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    last_used_at = models.DateTimeField(null=True, blank=True)
    # Of MCP clients that name none and have no connection of their own.
    rolling_session = models.ForeignKey(
        "AgentSession", null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.CheckConstraint(condition=Q(scope__in=Scope.values), name="key_scope_known"),
            models.CheckConstraint(
                condition=Q(scope=Scope.AGENT, agent__isnull=False)
                | ~Q(scope=Scope.AGENT) & Q(agent=None),
                name="agent_key_has_an_agent",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.name} {self.prefix}…"


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
        """With agent and snapshot, whose body, a megabyte of many tools, is read when asked for."""
        return self.select_related("agent", "snapshot").defer("snapshot__body")


class AgentSession(models.Model):
    """One run of an agent. What its model sees is fixed by the snapshot when it opens."""

    session_id = models.CharField(max_length=40, unique=True, default=new_session_id)
    agent = models.ForeignKey(Agent, on_delete=models.CASCADE, related_name="sessions")
    parent = models.ForeignKey(
        "self", null=True, blank=True, on_delete=models.SET_NULL, related_name="forks"
    )
    strategy = models.CharField(max_length=8, choices=Strategy.choices)
    mode = models.CharField(max_length=8, choices=Mode.choices)  # full or deferred, as decided
    auto_deferred = models.BooleanField(default=False)
    decided_by = models.CharField(max_length=8)
    snapshot = models.ForeignKey(CatalogSnapshot, on_delete=models.PROTECT, related_name="+")
    revision = models.PositiveBigIntegerField()
    state = models.CharField(max_length=8, choices=SessionState.choices, default=SessionState.OPEN)
    model = models.CharField(max_length=200, blank=True)
    context_window = models.PositiveBigIntegerField(null=True, blank=True)
    wanted_groups = models.JSONField(null=True, blank=True)  # ids; null: all the agent has
    wanted_servers = models.JSONField(null=True, blank=True)  # slugs; null: any
    without_mcp = models.BooleanField(default=False)
    metadata = models.TextField(default="{}")  # JSON
    created_at = models.DateTimeField(auto_now_add=True)
    last_used_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)
    # The token ledger: what all schemas would have cost, and what the model was given by what.
    tokens_all = models.PositiveIntegerField(default=0)
    tokens_catalog = models.PositiveIntegerField(default=0)
    tokens_search = models.PositiveIntegerField(default=0)
    tokens_load = models.PositiveIntegerField(default=0)
    tokens_call = models.PositiveIntegerField(default=0)
    tokens_loaded = models.PositiveIntegerField(default=0)  # definitions held, for the budget
    calls = models.PositiveIntegerField(default=0)
    errors = models.PositiveIntegerField(default=0)

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
        ]

    def __str__(self) -> str:
        return self.session_id

    @property
    def tokens_delivered(self) -> int:
        return self.tokens_catalog + self.tokens_search + self.tokens_load + self.tokens_call


class Expansion(models.Model):
    """What a session loaded of one group, and the definitions it will go on seeing.

    `names` is null for all, else the names loaded one by one. `listed` is what a load of the
    whole group answered first. `pins` holds, by public name, what was shown: the definition,
    the admin's text of that moment, the tool's place and the order of loading.
    """

    session = models.ForeignKey(AgentSession, on_delete=models.CASCADE, related_name="expansions")
    group_id = models.CharField(max_length=80)  # as the model knows it
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
    """The newer definition of a tool that a `definition_changed` answer gave to a session.

    From then on it replaces the pinned one when the tool is loaded or described in this session.
    """

    session = models.ForeignKey(
        AgentSession, on_delete=models.CASCADE, related_name="shown_definitions"
    )
    tool = models.ForeignKey(Tool, on_delete=models.CASCADE, related_name="+")
    definition = models.ForeignKey(Definition, on_delete=models.PROTECT, related_name="+")
    override = models.TextField(blank=True)  # the admin's description at that time
    version = models.PositiveIntegerField(default=1)  # increases whenever the row changes

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["session", "tool"], name="one_shown_definition_per_tool"
            )
        ]

    def __str__(self) -> str:
        return f"{self.session_id}/{self.tool_id}"


class CallState(models.TextChoices):
    ACCEPTED = "accepted"
    SENT = "sent"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    REFUSED = "refused"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    CLIENT = "client"  # a custom tool: the agent runs it itself


IN_FLIGHT = (CallState.ACCEPTED, CallState.SENT)


class CallPath(models.TextChoices):
    DISPATCH = "dispatch"
    NATIVE = "native"
    TRY = "try"


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class Call(models.Model):
    """The ledger: one row for each call, committed before a server is touched."""

    call_id = models.CharField(max_length=40, unique=True, default=new_call_id)
    session = models.ForeignKey(
        AgentSession, null=True, blank=True, on_delete=models.CASCADE, related_name="call_rows"
    )
    agent = models.ForeignKey(
        Agent, null=True, blank=True, on_delete=models.CASCADE, related_name="calls"
    )
    actor = models.CharField(max_length=200, blank=True)  # who tried it, where no agent did
    tool = models.ForeignKey(Tool, null=True, blank=True, on_delete=models.SET_NULL)
    tool_name = models.CharField(max_length=200)  # the real tool's public name, or what was asked
    server = models.ForeignKey(Server, null=True, blank=True, on_delete=models.SET_NULL)
    server_slug = models.CharField(max_length=40, blank=True)
    definition = models.ForeignKey(
        Definition, null=True, blank=True, on_delete=models.PROTECT, related_name="+"
    )
    path = models.CharField(max_length=8, choices=CallPath.choices, default=CallPath.DISPATCH)
    idempotency_key = models.CharField(max_length=255, null=True, blank=True)  # noqa: DJ001 - null is "none", and unique lets it repeat
    request_digest = models.CharField(max_length=64, blank=True)
    arguments = models.TextField(default="{}")  # JSON, redacted, cut
    state = models.CharField(max_length=9, choices=CallState.choices)
    is_error = models.BooleanField(default=False)
    implicit_load = models.BooleanField(default=False)
    accepted_at = models.DateTimeField()
    sent_at = models.DateTimeField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)
    deadline = models.DateTimeField()
    holder = models.CharField(max_length=200, blank=True)  # the process that carries it out
    tokens = models.PositiveIntegerField(default=0)
    result_bytes = models.PositiveBigIntegerField(default=0)
    result_sha256 = models.CharField(max_length=64, blank=True)
    result_copy = models.TextField(blank=True)  # JSON, redacted, cut
    error_code = models.CharField(max_length=40, blank=True)
    error_message = models.TextField(blank=True)
    note = models.TextField(blank=True)  # what became known later, such as a late answer

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.CheckConstraint(
                condition=Q(state__in=CallState.values), name="call_state_known"
            ),
            models.UniqueConstraint(
                fields=["agent", "idempotency_key"], name="idempotency_key_once_per_agent"
            ),
        ]
        indexes = [
            models.Index(
                fields=["agent", "deadline"],
                condition=Q(state__in=["accepted", "sent"]),
                name="call_in_flight",
            ),
            models.Index(fields=["session", "id"], name="call_by_session"),
            models.Index(fields=["tool", "-accepted_at"], name="call_by_tool"),
            # Wide, so that use is counted from the index alone: a row is kilobytes of payload.
            models.Index(
                fields=[
                    "accepted_at",
                    "tool_name",
                    "agent",
                    "path",
                    "state",
                    "is_error",
                    "tokens",
                    "tool",
                ],
                name="call_use",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.call_id} {self.tool_name} {self.state}"

    @property
    def duration_ms(self) -> int | None:
        if self.finished_at is None:
            return None
        return round((self.finished_at - self.accepted_at).total_seconds() * 1000)


class CallAnswer(models.Model):
    """The whole answer to a call with an idempotency key, kept a day to be given again."""

    call = models.OneToOneField(Call, on_delete=models.CASCADE, related_name="answer")
    body = models.TextField()  # JSON
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return str(self.call_id)


class EventKind(models.TextChoices):
    OPENED = "opened"
    CATALOG = "catalog"
    SEARCHED = "searched"
    DETAILS = "details"
    LOADED = "loaded"
    IMPLICIT_LOAD = "implicit_load"
    CALLED = "called"
    REFUSED = "refused"
    FORKED = "forked"
    RESUMED = "resumed"
    CLOSED = "closed"
    EXPIRED = "expired"


class Event(models.Model):
    """One line of a session's timeline, with the tokens it gave the model."""

    session = models.ForeignKey(AgentSession, on_delete=models.CASCADE, related_name="events")
    at = models.DateTimeField()
    kind = models.CharField(max_length=13, choices=EventKind.choices)
    tool_name = models.CharField(max_length=200, blank=True)
    group_id = models.CharField(max_length=80, blank=True)
    tokens = models.PositiveIntegerField(default=0)
    details = models.TextField(default="{}")  # JSON: query, strategy, hits, names, …
    call = models.ForeignKey(
        Call, null=True, blank=True, on_delete=models.SET_NULL, related_name="events"
    )

    class Meta:
        ordering = ["id"]
        constraints = [
            models.CheckConstraint(condition=Q(kind__in=EventKind.values), name="event_kind_known")
        ]
        indexes = [
            models.Index(fields=["session", "id"], name="event_by_session"),
            models.Index(fields=["kind", "-at"], name="event_by_kind"),
        ]

    def __str__(self) -> str:
        return f"{self.session_id} {self.kind}"
