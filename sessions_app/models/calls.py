"""Models for the call ledger and the events of the timeline."""

import secrets
from typing import Self

from django.db import models
from django.db.models import F, Func, Q

from catalog.models import Definition, Tool
from servers.models import Server
from sessions_app.models.agents import Agent
from sessions_app.models.encryption import EncryptedTextField
from sessions_app.models.scripts import ScriptRun
from sessions_app.models.sessions import AgentSession


class CallState(models.TextChoices):
    HELD = "held"  # waits for a person
    APPROVED = "approved"  # waits for a process that executes it
    ACCEPTED = "accepted"
    SENT = "sent"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    REFUSED = "refused"
    DENIED = "denied"  # by a person
    EXPIRED = "expired"  # nobody decided in time
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    CLIENT = "client"  # a custom tool, which the agent runs itself


IN_FLIGHT = (CallState.ACCEPTED, CallState.SENT)
WAITING = (CallState.HELD, CallState.APPROVED)
UNFINISHED = (*WAITING, *IN_FLIGHT)
NOT_RUN = (CallState.REFUSED, CallState.DENIED, CallState.EXPIRED)


class CallPath(models.TextChoices):
    DISPATCH = "dispatch"
    NATIVE = "native"
    TRY = "try"
    PROMPT = "prompt"  # a prompt that was got
    RESOURCE = "resource"  # a resource that was read
    SCRIPT = "script"


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


# The condition of the index of waiting calls, in its words: SQLite uses a partial index only for a
# query that has them, with literals.
IS_WAITING = Func(
    F("state"),
    template="%(expressions)s IN ('held', 'approved')",
    output_field=models.BooleanField(),
)


class CallQuerySet(models.QuerySet["Call"]):
    def held(self) -> Self:
        """Filter the calls that wait for a person, by their index."""
        return self.filter(IS_WAITING, state=CallState.HELD)


class Call(models.Model):
    """Ledger row of a call, committed before the call is sent to the server."""

    call_id = models.CharField(max_length=40, unique=True, default=new_call_id)
    # Without indexes of their own where one below starts with the column: each costs every call.
    session = models.ForeignKey(
        AgentSession, null=True, blank=True, on_delete=models.CASCADE, related_name="call_rows",
        db_index=False,
    )  # fmt: skip
    agent = models.ForeignKey(
        Agent, null=True, blank=True, on_delete=models.CASCADE, related_name="calls",
        db_index=False,
    )  # fmt: skip
    run = models.ForeignKey(  # indexed by call_by_run
        ScriptRun, null=True, blank=True, on_delete=models.SET_NULL, related_name="calls",
        db_index=False,
    )  # fmt: skip
    actor = models.CharField(max_length=200, blank=True)  # the user, for calls without an agent
    tool = models.ForeignKey(Tool, null=True, blank=True, on_delete=models.SET_NULL, db_index=False)
    tool_name = models.CharField(max_length=200)  # public name, or the requested name if unknown
    server = models.ForeignKey(Server, null=True, blank=True, on_delete=models.SET_NULL)
    server_slug = models.CharField(max_length=40, blank=True)
    definition = models.ForeignKey(
        Definition, null=True, blank=True, on_delete=models.PROTECT, related_name="+"
    )
    path = models.CharField(max_length=8, choices=CallPath.choices, default=CallPath.DISPATCH)
    idempotency_key = models.CharField(max_length=255, null=True, blank=True)  # noqa: DJ001 - unique allows repeated nulls
    request_digest = models.CharField(max_length=64, blank=True)
    arguments = EncryptedTextField(default="{}")  # JSON, redacted, truncated; "" is not stored
    state = models.CharField(max_length=9, choices=CallState.choices)
    is_error = models.BooleanField(default=False)
    implicit_load = models.BooleanField(default=False)
    accepted_at = models.DateTimeField()
    sent_at = models.DateTimeField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)
    deadline = models.DateTimeField()
    holder = models.CharField(max_length=200, blank=True)  # the process that runs it
    tokens = models.PositiveIntegerField(default=0)
    result_bytes = models.PositiveBigIntegerField(default=0)
    result_sha256 = models.CharField(max_length=64, blank=True)
    result_copy = EncryptedTextField(blank=True)  # JSON, redacted, truncated
    error_code = models.CharField(max_length=40, blank=True)
    error_message = models.TextField(blank=True)
    note = models.TextField(blank=True)  # added later, for example for a late response

    objects = CallQuerySet.as_manager()

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
            models.Index(
                fields=["state", "id"],
                condition=Q(state__in=["held", "approved"]),
                name="call_waiting",
            ),
            models.Index(fields=["session", "id"], name="call_by_session"),
            models.Index(fields=["run", "id"], condition=Q(run__isnull=False), name="call_by_run"),
            models.Index(fields=["id"], condition=~Q(error_code=""), name="call_failed"),
            models.Index(fields=["tool", "-accepted_at"], name="call_by_tool"),
            # Covering index for usage statistics: a row holds kilobytes of payload.
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
        return f"{self.call_id} {self.tool_name}"

    @property
    def duration_ms(self) -> int | None:
        if self.finished_at is None:
            return None
        return round((self.finished_at - self.accepted_at).total_seconds() * 1000)


class CallAnswer(models.Model):
    """The full response to a call with an idempotency key, stored for a day to be replayed.

    For the calling agent alone: on no page, in no export and in no backup.
    """

    call = models.OneToOneField(Call, on_delete=models.CASCADE, related_name="answer")
    body = EncryptedTextField()  # JSON
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
    HELD = "held"
    DECIDED = "decided"
    SCRIPT = "script"
    FORKED = "forked"
    RESUMED = "resumed"
    CLOSED = "closed"
    EXPIRED = "expired"


class Event(models.Model):
    """An event of a session's timeline, with the tokens it added to the model's context."""

    session = models.ForeignKey(  # indexed by event_by_session
        AgentSession, on_delete=models.CASCADE, related_name="events", db_index=False
    )
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
