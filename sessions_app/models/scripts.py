"""Model for runs of scripts: what an agent ran, how it stands, and what came back."""

import secrets

from django.db import models
from django.db.models import Q

from sessions_app.models.agents import Agent, ApiKey
from sessions_app.models.encryption import EncryptedTextField
from sessions_app.models.sessions import AgentSession


class RunState(models.TextChoices):
    RUNNING = "running"
    HELD = "held"  # a call of it waits for a person
    COMPLETED = "completed"
    FAILED = "failed"


ENDED_RUNS = (RunState.COMPLETED, RunState.FAILED)


class ScriptLanguage(models.TextChoices):
    PYTHON = "python"
    TYPESCRIPT = "typescript"


def new_run_id() -> str:
    return f"run_{secrets.token_hex(12)}"


class ScriptRun(models.Model):
    """One run of a script. Its calls are rows of the ledger with `run` set.

    A run that is held is continued by any process from its snapshot. One that is running belongs
    to its holder; if that process dies, the run has failed.
    """

    run_id = models.CharField(max_length=40, unique=True, default=new_run_id)
    session = models.ForeignKey(  # indexed by run_by_session
        AgentSession, on_delete=models.CASCADE, related_name="script_runs", db_index=False
    )
    agent = models.ForeignKey(Agent, on_delete=models.CASCADE, related_name="script_runs")
    key = models.ForeignKey(
        ApiKey, null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    language = models.CharField(max_length=10, choices=ScriptLanguage.choices)
    engine = models.CharField(max_length=60)  # name and version, which a snapshot depends on
    storage = models.CharField(max_length=7, default="masked")  # nothing, masked or all
    # What people read: as the storage setting has it.
    code = EncryptedTextField()
    input = EncryptedTextField(default="null")  # JSON
    # JSON, for the run and the agent alone, until a day after the end: source, input, answer.
    payload = EncryptedTextField(blank=True)
    idempotency_key = models.CharField(max_length=255, null=True, blank=True)  # noqa: DJ001 - unique allows repeated nulls
    request_digest = models.CharField(max_length=64, blank=True)
    state = models.CharField(max_length=9, choices=RunState.choices, default=RunState.RUNNING)
    started_at = models.DateTimeField()
    finished_at = models.DateTimeField(null=True, blank=True)
    timeout = models.FloatField()  # seconds of running, pauses not counted
    used_seconds = models.FloatField(default=0)
    holder = models.CharField(max_length=200, blank=True)  # the process that runs it
    deadline = models.DateTimeField()  # of the holder; of a held run, when it expires
    # While it is held: encrypted, and the ids of the calls it waits for.
    snapshot = EncryptedTextField(blank=True)
    waiting_for = models.JSONField(default=list)
    # What came back to the model, as the storage setting has it.
    result = EncryptedTextField(default="null")  # JSON
    error = EncryptedTextField(blank=True)  # JSON, or empty
    error_type = models.CharField(max_length=80, blank=True)
    logs = EncryptedTextField(blank=True)
    truncated = models.BooleanField(default=False)
    tokens_given = models.PositiveIntegerField(default=0)
    tokens_spared = models.PositiveIntegerField(default=0)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.CheckConstraint(condition=Q(state__in=RunState.values), name="run_state_known"),
            models.UniqueConstraint(
                fields=["agent", "idempotency_key"], name="run_idempotency_key_once_per_agent"
            ),
        ]
        indexes = [
            models.Index(fields=["session", "id"], name="run_by_session"),
            models.Index(
                fields=["state", "id"],
                condition=Q(state__in=["running", "held"]),
                name="run_unfinished",
            ),
            models.Index(fields=["started_at"], name="run_by_start"),
        ]

    def __str__(self) -> str:
        return f"{self.run_id} {self.state}"
