"""Models for rules, which decide on calls, and for what rules ask of the past."""

from django.db import models
from django.db.models import Q

from catalog.models import Tool
from sessions_app.models.agents import Agent
from sessions_app.models.sessions import AgentSession


class RuleEffect(models.TextChoices):
    ALLOW = "allow"
    HOLD = "hold"
    DENY = "deny"


class Approver(models.TextChoices):
    OPERATOR = "operator"
    CALLER = "caller"  # the user of the calling client


class Rule(models.Model):
    """A decision on the calls that it matches. The first enabled rule that matches decides."""

    name = models.CharField(max_length=80, unique=True)
    effect = models.CharField(max_length=5, choices=RuleEffect.choices)
    reason = models.TextField(blank=True)  # told to agents and people
    enabled = models.BooleanField(default=True)
    position = models.PositiveIntegerField()
    # As in the API, except agents and groups: [{"id", "name"}], since both can be renamed.
    match = models.JSONField(default=dict)
    approver = models.CharField(max_length=8, choices=Approver.choices, default=Approver.OPERATOR)
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ["position", "id"]
        constraints = [
            models.CheckConstraint(
                condition=Q(effect__in=RuleEffect.values), name="rule_effect_known"
            ),
            models.CheckConstraint(
                condition=Q(approver__in=Approver.values), name="rule_approver_known"
            ),
        ]

    def __str__(self) -> str:
        return self.name


class SessionRead(models.Model):
    """A server whose results a session was given. Copied when the session is forked or resumed."""

    session = models.ForeignKey(  # indexed by one_read_per_session_and_server
        AgentSession, on_delete=models.CASCADE, related_name="reads", db_index=False
    )
    agent = models.ForeignKey(  # indexed by read_by_agent
        Agent, on_delete=models.CASCADE, related_name="+", db_index=False
    )
    server_slug = models.CharField(max_length=40)
    last_at = models.DateTimeField()  # written at most once a minute

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["session", "server_slug"], name="one_read_per_session_and_server"
            )
        ]
        indexes = [models.Index(fields=["agent", "server_slug", "last_at"], name="read_by_agent")]

    def __str__(self) -> str:
        return f"{self.session_id}/{self.server_slug}"


class ToolUse(models.Model):
    """A tool that an agent has used, so that its first use can be recognized."""

    agent = models.ForeignKey(  # indexed by one_use_per_agent_and_tool
        Agent, on_delete=models.CASCADE, related_name="tool_uses", db_index=False
    )
    # Without a constraint: the tool may be deleted while a call of it runs.
    tool = models.ForeignKey(Tool, on_delete=models.CASCADE, related_name="+", db_constraint=False)
    first_at = models.DateTimeField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["agent", "tool"], name="one_use_per_agent_and_tool")
        ]

    def __str__(self) -> str:
        return f"{self.agent_id}/{self.tool_id}"
