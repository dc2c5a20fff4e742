"""Models of tools, their definitions and definition changes."""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

from django.db import models
from django.db.models import Q

JsonSchema = dict[str, object]


class Definition(models.Model):
    """A tool object exactly as its server sent it. Content-addressed and immutable."""

    sha256 = models.CharField(max_length=64, unique=True)
    name = models.CharField(max_length=128)
    # Canonical JSON; as text, since jsonb rejects \u0000 and reorders keys.
    body = models.TextField()
    tokens = models.PositiveIntegerField()
    search_text = models.TextField()
    # The same without hidden characters in texts: what agents get, if they are to be removed.
    readable = models.ForeignKey(
        "self", null=True, blank=True, on_delete=models.PROTECT, related_name="+"
    )
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.name} {self.sha256[:8]}"

    @cached_property
    def tool(self) -> dict[str, Any]:
        """The tool object: name, description, inputSchema, … Shared: do not change it."""
        parsed: dict[str, Any] = json.loads(self.body)
        return parsed

    @property
    def description(self) -> str:
        return str(self.tool.get("description") or "")

    @property
    def input_schema(self) -> JsonSchema:
        schema: JsonSchema = self.tool["inputSchema"]
        return schema

    @property
    def annotations(self) -> dict[str, Any]:
        annotations = self.tool.get("annotations")
        return annotations if isinstance(annotations, dict) else {}


class ToolState(models.TextChoices):
    AVAILABLE = "available"
    WAITING = "waiting"
    HELD = "held"
    MISSING = "missing"
    REJECTED = "rejected"


class CallPolicy(models.TextChoices):
    ALLOW = "allow"
    DENY = "deny"


class PayloadStorage(models.TextChoices):
    """What is stored of the arguments and results of calls. Tool and agent: the stricter counts."""

    DEFAULT = "default", "Default (store masked)"
    NOTHING = "nothing", "Store nothing"
    MASKED = "masked", "Store masked"
    ALL = "all", "Store all"


class ReadOnly(models.TextChoices):
    """Whether a tool only reads: its server's claim, or an admin's word."""

    CLAIMED = "claimed", "As the server claims"
    YES = "yes", "Only reads"
    NO = "no", "May change something"


class ToolQuerySet(models.QuerySet["Tool"]):
    def current(self) -> Self:
        """Exclude tools that the server no longer lists."""
        return self.exclude(state=ToolState.MISSING)

    def servable(self) -> Self:
        """Select tools that agents may get: approved, and listed by an enabled server."""
        return self.filter(
            Q(server=None) | Q(server__enabled=True),
            approved__isnull=False,
            state__in=[ToolState.AVAILABLE, ToolState.WAITING],
        )

    def waiting(self) -> Self:
        return self.filter(state=ToolState.WAITING)

    def with_definitions(self) -> Self:
        return self.select_related("server", "approved", "latest", "effective")

    def by_name(self, names: Sequence[str]) -> dict[str, "Tool"]:
        """Return the tools that exist by the name given: public, original public, or former."""
        valid = [name for name in names if name.isascii() and "\0" not in name]
        found = self.in_bulk(valid, field_name="public_name")
        others = [name for name in valid if name not in found]
        former = FormerName.objects.filter(name__in=others).values_list("tool_id", "name")
        pks = {name: pk for pk, name in former} if others else {}
        rows = self.in_bulk(list(pks.values())) if pks else {}
        return found | {name: rows[pk] for name, pk in pks.items() if pk in rows}


class Tool(models.Model):
    """One tool of a server, or a custom tool that agents run themselves (no server)."""

    server = models.ForeignKey(
        "servers.Server", null=True, blank=True, on_delete=models.CASCADE, related_name="tools"
    )
    name = models.CharField(max_length=128)  # the original name, sent to the server
    public_name = models.CharField(max_length=64, unique=True)
    # The public name derived from the original one, while an alias replaces it; else empty.
    assigned_name = models.CharField(max_length=64, blank=True)
    approved = models.ForeignKey(
        Definition, null=True, blank=True, on_delete=models.PROTECT, related_name="+"
    )
    latest = models.ForeignKey(
        Definition, null=True, blank=True, on_delete=models.PROTECT, related_name="+"
    )
    # The latest definition that was rejected in a review: it is no longer pending.
    kept_against = models.ForeignKey(
        Definition, null=True, blank=True, on_delete=models.PROTECT, related_name="+"
    )
    state = models.CharField(max_length=10, choices=ToolState.choices, default=ToolState.AVAILABLE)
    held_reason = models.TextField(blank=True)
    held_at = models.DateTimeField(null=True, blank=True)
    rejected_reason = models.TextField(blank=True)
    missing_since = models.DateTimeField(null=True, blank=True)
    description_override = models.TextField(blank=True)
    parameter_overrides = models.JSONField(default=dict, blank=True)  # see definitions.effective
    # Of parameters that an approved change removed: [{parameter, override, reason, at}].
    dropped_overrides = models.JSONField(default=list, blank=True)
    # What agents get instead of `approved`, if the two differ by overrides.
    effective = models.ForeignKey(
        Definition, null=True, blank=True, on_delete=models.PROTECT, related_name="+"
    )
    input_examples = models.JSONField(default=list, blank=True)
    call_policy = models.CharField(
        max_length=5, choices=CallPolicy.choices, default=CallPolicy.ALLOW
    )
    payload_storage = models.CharField(
        max_length=7, choices=PayloadStorage.choices, default=PayloadStorage.DEFAULT
    )
    read_only = models.CharField(max_length=7, choices=ReadOnly.choices, default=ReadOnly.CLAIMED)
    # A capability of clients: the server lists the tool only to those that declare it.
    needs = models.CharField(max_length=20, blank=True)
    findings = models.JSONField(default=list, blank=True)  # on `latest`: [{code, text}]
    created_at = models.DateTimeField(auto_now_add=True)
    changed_at = models.DateTimeField(null=True, blank=True)

    objects = ToolQuerySet.as_manager()

    class Meta:
        ordering = ["public_name"]
        constraints = [
            models.UniqueConstraint(fields=["server", "name"], name="tool_name_unique_per_server"),
            models.UniqueConstraint(
                fields=["name"], condition=Q(server=None), name="custom_tool_name_unique"
            ),
            models.CheckConstraint(
                condition=Q(state__in=ToolState.values), name="tool_state_known"
            ),
            models.CheckConstraint(
                condition=~Q(state=ToolState.AVAILABLE) | Q(approved__isnull=False),
                name="available_tool_is_approved",
            ),
        ]
        indexes = [models.Index(fields=["server", "state"], name="tool_by_server_state")]

    def __str__(self) -> str:
        return self.public_name

    @property
    def source(self) -> str:
        return "mcp" if self.server_id else "custom"

    @property
    def definition(self) -> Definition | None:
        """Return the approved definition or, before the first approval, the pending one."""
        return self.approved or self.latest

    @property
    def alias(self) -> str:
        return self.public_name if self.assigned_name else ""

    @property
    def is_overridden(self) -> bool:
        """Return whether agents get another definition than the approved one."""
        return bool(self.description_override or self.parameter_overrides)

    @property
    def served(self) -> Definition | None:
        """Return the definition that agents get, or would get once it is approved."""
        return self.effective or self.definition

    @property
    def description(self) -> str:
        """Return the description agents read: the override if there is one."""
        return self.description_override or (self.definition.description if self.definition else "")

    @property
    def annotations(self) -> dict[str, Any]:
        return self.definition.annotations if self.definition else {}

    @property
    def tokens(self) -> int | None:
        return self.served.tokens if self.served else None

    def derive_state(self) -> ToolState:
        """Derive the state from the other fields. No other code decides it."""
        if self.held_at:
            return ToolState.HELD
        if self.missing_since:
            return ToolState.MISSING
        if self.rejected_reason:
            return ToolState.REJECTED
        reviewed = self.latest_id in (self.approved_id, self.kept_against_id)
        return ToolState.AVAILABLE if self.approved_id and reviewed else ToolState.WAITING


class FormerName(models.Model):
    """A public name that a tool had before: still accepted, and never given to another tool."""

    tool = models.ForeignKey(Tool, on_delete=models.CASCADE, related_name="former_names")
    name = models.CharField(max_length=64, unique=True)

    class Meta:
        ordering = ["pk"]

    def __str__(self) -> str:
        return self.name


class DefinitionChange(models.Model):
    class Outcome(models.TextChoices):
        APPROVED = "approved"
        WAITING = "waiting"
        KEPT_OLD = "kept_old"
        WITHDRAWN = "withdrawn"
        SUPERSEDED = "superseded"

    tool = models.ForeignKey(Tool, on_delete=models.CASCADE, related_name="changes")
    before = models.ForeignKey(Definition, null=True, on_delete=models.PROTECT, related_name="+")
    after = models.ForeignKey(Definition, on_delete=models.PROTECT, related_name="+")
    at = models.DateTimeField()
    outcome = models.CharField(max_length=10, choices=Outcome.choices)
    decided_by = models.CharField(max_length=200, blank=True)
    decided_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-at", "-id"]
        indexes = [models.Index(fields=["tool", "-at"], name="change_by_tool")]

    def __str__(self) -> str:
        return f"{self.tool_id} {self.outcome}"
