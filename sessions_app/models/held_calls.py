"""Models for calls that wait for a person, and for grants that let later calls pass."""

import secrets

from django.db import models
from django.db.models import Q

from sessions_app.models.agents import ApiKey
from sessions_app.models.calls import Call
from sessions_app.models.rules import Approver
from sessions_app.models.sessions import AgentSession


class HeldCall(models.Model):
    """What a held call needs beside its ledger row: its exact request, the decision, its answer.

    The request is kept until the call has ended, the answer until the agent has fetched it, both
    encrypted and for at most a day. Only the process with the newest fence may execute the call.
    """

    call = models.OneToOneField(Call, on_delete=models.CASCADE, related_name="hold")
    session = models.ForeignKey(  # indexed by held_call_by_request
        AgentSession, on_delete=models.CASCADE, related_name="held_calls", db_index=False
    )
    digest = models.CharField(max_length=64)  # of the tool and the arguments
    key = models.ForeignKey(
        ApiKey, null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    rule_pk = models.PositiveBigIntegerField(null=True, blank=True)  # the rule may be gone since
    rule_name = models.CharField(max_length=200, blank=True)
    reason = models.TextField(blank=True)
    approver = models.CharField(max_length=8, choices=Approver.choices, default=Approver.OPERATOR)
    held_at = models.DateTimeField()
    expires_at = models.DateTimeField()
    decided_at = models.DateTimeField(null=True, blank=True)
    decided_by = models.CharField(max_length=200, blank=True)
    comment = models.TextField(blank=True)
    request = models.TextField(blank=True)  # JSON, encrypted
    answer = models.TextField(blank=True)  # JSON, encrypted
    # Execution: which process, until when, and how often the call was claimed.
    holder = models.CharField(max_length=200, blank=True)
    lease_until = models.DateTimeField(null=True, blank=True)
    fence = models.PositiveIntegerField(default=0)
    # Delivery of the answer: which process sends it, until when, and whether it has arrived.
    sender = models.CharField(max_length=200, blank=True)
    sending_until = models.DateTimeField(null=True, blank=True)
    fetched_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-id"]
        indexes = [
            models.Index(
                fields=["session", "digest"],
                condition=Q(fetched_at=None),
                name="held_call_by_request",
            ),
            models.Index(fields=["session", "id"], name="held_call_by_session"),
        ]

    def __str__(self) -> str:
        return str(self.call_id)


def new_grant_id() -> str:
    return f"grt_{secrets.token_hex(12)}"


class Grant(models.Model):
    """Lets calls of a session pass a rule that holds them, as a person decided."""

    grant_id = models.CharField(max_length=40, unique=True, default=new_grant_id)
    session = models.ForeignKey(AgentSession, on_delete=models.CASCADE, related_name="grants")
    rule_pk = models.PositiveBigIntegerField(null=True, blank=True)
    rule_name = models.CharField(max_length=200, blank=True)
    tools = models.JSONField()  # patterns of public names
    count = models.PositiveIntegerField(null=True, blank=True)  # null: any number of calls
    used = models.PositiveIntegerField(default=0)
    expires_at = models.DateTimeField(null=True, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    created_by = models.CharField(max_length=200)

    class Meta:
        ordering = ["id"]
        constraints = [
            models.CheckConstraint(
                condition=Q(count=None) | Q(used__lte=models.F("count")),
                name="grant_used_at_most_count",
            )
        ]

    def __str__(self) -> str:
        return self.grant_id
