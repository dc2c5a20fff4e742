"""Models for agents, their groups and API keys."""

from django.conf import settings
from django.db import models
from django.db.models import Q

from catalog.models import Group, PayloadStorage


class Strategy(models.TextChoices):
    DISPATCH = "dispatch"
    INJECT = "inject"


class Mode(models.TextChoices):
    AUTO = "auto"
    DEFERRED = "deferred"
    FULL = "full"


class ExistingAgents(models.Manager["Agent"]):
    """Leaves out deleted agents, whose rows stay as a record."""

    def get_queryset(self) -> models.QuerySet["Agent"]:
        return super().get_queryset().filter(deleted_at=None)


class Agent(models.Model):
    """A caller with API keys, its groups and its limits."""

    name = models.CharField(max_length=80)
    description = models.TextField(blank=True)
    all_groups = models.BooleanField(default=False)  # including future ones
    groups = models.ManyToManyField(Group, through="AgentGroup", related_name="agents")
    strategy = models.CharField(max_length=8, choices=Strategy.choices, default=Strategy.DISPATCH)
    mode = models.CharField(max_length=8, choices=Mode.choices, default=Mode.AUTO)
    tool_threshold = models.PositiveIntegerField(default=15)
    threshold_tokens = models.PositiveIntegerField(default=10_000)
    threshold_percent = models.FloatField(default=5.0)
    catalog_budget = models.PositiveIntegerField(default=2_000)
    catalog_header = models.TextField(blank=True)  # replaces the default header
    budget = models.PositiveIntegerField(null=True, blank=True)  # loaded tokens per session
    calls_in_flight = models.PositiveIntegerField(default=20)
    calls_per_minute = models.PositiveIntegerField(default=600)
    searches_per_minute = models.PositiveIntegerField(default=120)
    cost_per_minute = models.PositiveIntegerField(default=3_000)  # of all requests
    max_sessions = models.PositiveIntegerField(default=100)
    payload_storage = models.CharField(
        max_length=7, choices=PayloadStorage.choices, default=PayloadStorage.DEFAULT
    )
    code_mode = models.BooleanField(default=False)  # it may run scripts
    # It runs custom tools itself, so it gets them over MCP too.
    runs_custom_tools = models.BooleanField(default=False)
    enabled = models.BooleanField(default=True)
    created_at = models.DateTimeField(auto_now_add=True)
    deleted_at = models.DateTimeField(null=True, blank=True)

    objects = ExistingAgents()
    with_deleted = models.Manager["Agent"]()

    class Meta:
        ordering = ["name"]
        constraints = [
            models.UniqueConstraint(
                fields=["name"], condition=Q(deleted_at=None), name="agent_name_unique"
            ),
            models.CheckConstraint(
                condition=Q(strategy__in=Strategy.values), name="agent_strategy_known"
            ),
            models.CheckConstraint(condition=Q(mode__in=Mode.values), name="agent_mode_known"),
        ]

    def __str__(self) -> str:
        return self.name


class AgentGroup(models.Model):
    """A group that an agent may use, with its position in the agent's catalog."""

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


class KeyScope(models.TextChoices):
    ADMIN = "admin"
    OPERATOR = "operator"
    AGENT = "agent"


class ApiKey(models.Model):
    """A bearer token, stored as a digest. `prefix` identifies it to people."""

    name = models.CharField(max_length=120)
    prefix = models.CharField(max_length=12)
    sha256 = models.CharField(max_length=64, unique=True)
    scope = models.CharField(max_length=8, choices=KeyScope.choices)
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

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.CheckConstraint(condition=Q(scope__in=KeyScope.values), name="key_scope_known"),
            models.CheckConstraint(
                condition=Q(scope=KeyScope.AGENT, agent__isnull=False)
                | ~Q(scope=KeyScope.AGENT) & Q(agent=None),
                name="agent_key_has_an_agent",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.name} {self.prefix}…"
