"""Models: Server, Credential, SyncRun, StateChange."""

import json
from urllib.parse import urlsplit

from django.db import models
from django.db.models import Q

from servers.errors import SEE_STDERR
from toolcrib.lib.errors import NotFound

MAX_QUOTED = 200  # characters of a program's last line


class Transport(models.TextChoices):
    STDIO = "stdio"
    HTTP = "http"
    SSE = "sse"


class ServerState(models.TextChoices):
    NEW = "new"  # never reached yet
    CONNECTING = "connecting"
    CONNECTED = "connected"
    FAILING = "failing"
    DISABLED = "disabled"


class ConnectionPolicy(models.TextChoices):
    ALWAYS = "always"
    ON_DEMAND = "on_demand"


class Isolation(models.TextChoices):
    SHARED = "shared"
    PER_SESSION = "per_session"


class Trust(models.TextChoices):
    AUTO = "auto"
    REVIEW_CHANGES = "review_changes"
    STRICT = "strict"


class Trigger(models.TextChoices):
    ADDED = "added"
    MANUAL = "manual"
    LIST_CHANGED = "list_changed"
    SCHEDULE = "schedule"


class ServerQuerySet(models.QuerySet["Server"]):
    def get_by_slug(self, slug: str) -> "Server":
        # PostgreSQL rejects NUL in a parameter; a slug is ASCII.
        valid = slug.isascii() and "\0" not in slug
        server = self.filter(slug=slug).first() if valid else None
        if server is None:
            raise NotFound(
                f"Server not found: {slug[:80]}.", hint="Check the slug in the list of servers."
            )
        return server


class Server(models.Model):
    """An MCP server Toolcrib connects to. `slug` is set by an admin, never by the server."""

    slug = models.SlugField(max_length=32, unique=True)
    name = models.CharField(max_length=120)
    description = models.TextField(blank=True)
    transport = models.CharField(max_length=5, choices=Transport.choices)
    command = models.CharField(max_length=1000, blank=True)
    args = models.JSONField(default=list, blank=True)  # may contain ${NAME} of a variable
    cwd = models.CharField(max_length=1000, blank=True)
    url = models.CharField(max_length=2000, blank=True)  # may contain ${NAME} too
    # What an admin confirmed, checked at every start of the program: a digest of the argv, and an
    # HMAC of the values of its variables and environment (registration/confirmation.py).
    confirmed_argv = models.CharField(max_length=64, blank=True)
    confirmed_values = models.CharField(max_length=64, blank=True, null=True)  # noqa: DJ001 - null: not recorded
    connection_policy = models.CharField(
        max_length=10, choices=ConnectionPolicy.choices, default=ConnectionPolicy.ALWAYS
    )
    isolation = models.CharField(max_length=11, choices=Isolation.choices, default=Isolation.SHARED)
    trust = models.CharField(max_length=14, choices=Trust.choices, default=Trust.REVIEW_CHANGES)
    call_timeout = models.PositiveIntegerField(default=60)
    concurrency = models.PositiveIntegerField(default=8)
    poll_seconds = models.PositiveIntegerField(default=900)
    enabled = models.BooleanField(default=True)
    unknown_fields = models.JSONField(default=dict, blank=True)  # preserved from an import

    state = models.CharField(max_length=10, choices=ServerState.choices, default=ServerState.NEW)
    state_code = models.CharField(max_length=40, blank=True)  # refused, tls, auth, not_mcp, …
    state_reason = models.TextField(blank=True)
    state_detail = models.TextField(blank=True)  # such as the last lines of stderr
    state_since = models.DateTimeField(null=True, blank=True)
    failures = models.PositiveIntegerField(default=0)
    # Last reconnect claim of any process; null while reachable (connections/coordination.py).
    dialled_at = models.DateTimeField(null=True, blank=True)
    protocol_version = models.CharField(max_length=20, blank=True)
    server_info = models.JSONField(default=dict, blank=True)  # as reported by the server
    instructions = models.TextField(blank=True)
    # What it declares besides tools: prompts, resources, completions, subscribe, asks.
    capabilities = models.JSONField(default=list, blank=True)

    # Incremented by every edit of the connection; older connections and syncs are dropped.
    generation = models.PositiveIntegerField(default=1)
    # The sync lease: only the holder of the newest fence may commit, until the lease expires.
    sync_fence = models.PositiveBigIntegerField(default=0)
    sync_lease_until = models.DateTimeField(null=True, blank=True)
    sync_holder = models.CharField(max_length=200, blank=True)  # host, process id, start time
    sync_due_at = models.DateTimeField(null=True, blank=True)
    sync_sent_at = models.DateTimeField(null=True, blank=True)  # when a task was queued
    sync_trigger = models.CharField(max_length=12, choices=Trigger.choices, default=Trigger.ADDED)
    last_sync_started_at = models.DateTimeField(null=True, blank=True)
    last_synced_at = models.DateTimeField(null=True, blank=True)  # last success
    quiet_syncs = models.PositiveIntegerField(default=0)  # consecutive, notified without changes
    removals_held = models.BooleanField(default=False)  # over half the tools were missing

    # Bytes of new definitions stored on this day (UTC), limited by TOOLCRIB_DEFINITION_BYTES.
    definition_day = models.DateField(null=True, blank=True)
    definition_bytes = models.PositiveBigIntegerField(default=0)

    created_at = models.DateTimeField(auto_now_add=True)

    objects = ServerQuerySet.as_manager()

    class Meta:
        ordering = ["slug"]
        constraints = [
            models.CheckConstraint(
                condition=Q(transport="stdio", url="") & ~Q(command="")
                | Q(transport__in=["http", "sse"], command="") & ~Q(url=""),
                name="server_has_command_or_url",
            )
        ]
        indexes = [models.Index(fields=["enabled", "sync_due_at"], name="server_by_due")]

    def __str__(self) -> str:
        return self.slug

    @property
    def state_cause(self) -> str:
        """Return why the server fails, with what its program said last. For people, not agents."""
        said = self.state_detail.strip().rpartition("\n")[2].strip()[:MAX_QUOTED]
        if not said or SEE_STDERR not in self.state_reason:
            return self.state_reason
        return self.state_reason.replace(SEE_STDERR, f"It said: “{said}”")

    @property
    def argv(self) -> list[str]:
        """The exact program and arguments, with unresolved variables."""
        return [self.command, *self.args]

    @property
    def address(self) -> str:
        """The command line or URL, for display."""
        return " ".join(self.argv) if self.transport == Transport.STDIO else self.url

    @property
    def origin(self) -> str:
        """The recipient that credentials are bound to: a URL's origin, or an exact command."""
        if self.transport == Transport.STDIO:
            return "program:" + json.dumps([self.cwd, *self.argv])
        parts = urlsplit(self.url)
        default = 443 if parts.scheme == "https" else 80
        return f"{parts.scheme}://{parts.hostname}:{parts.port or default}"


class CredentialKind(models.TextChoices):
    HEADER = "header"
    ENV = "env"
    VARIABLE = "variable"  # fills ${NAME} in the URL or an argument


class Credential(models.Model):
    """One encrypted value, bound to the origin it was entered for. Write-only everywhere."""

    server = models.ForeignKey(Server, on_delete=models.CASCADE, related_name="credentials")
    kind = models.CharField(max_length=8, choices=CredentialKind.choices)
    name = models.CharField(max_length=200)
    ciphertext = models.TextField(blank=True)  # empty: removed, must be entered again
    origin_sha256 = models.CharField(max_length=64)
    set_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ["kind", "name"]
        constraints = [
            models.UniqueConstraint(
                fields=["server", "kind", "name"], name="credential_once_per_server"
            )
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def voided(self) -> bool:
        return not self.ciphertext


class SyncRun(models.Model):
    class Outcome(models.TextChoices):
        RUNNING = "running"
        OK = "ok"
        HELD = "held"  # applied, except the removal of over half the tools
        FAILED = "failed"
        SUPERSEDED = "superseded"  # by another run or an edit; nothing was saved

    server = models.ForeignKey(Server, on_delete=models.CASCADE, related_name="sync_runs")
    trigger = models.CharField(max_length=12, choices=Trigger.choices)
    fence = models.PositiveBigIntegerField()
    started_at = models.DateTimeField()
    finished_at = models.DateTimeField(null=True, blank=True)
    outcome = models.CharField(max_length=10, choices=Outcome.choices, default=Outcome.RUNNING)
    phase = models.CharField(max_length=10, default="connecting")  # connecting, listing, saving
    added = models.PositiveIntegerField(default=0)
    changed = models.PositiveIntegerField(default=0)
    removed = models.PositiveIntegerField(default=0)
    unchanged = models.PositiveIntegerField(default=0)
    rejected = models.PositiveIntegerField(default=0)
    pages = models.PositiveIntegerField(default=0)
    code = models.CharField(max_length=40, blank=True)
    error = models.TextField(blank=True)
    detail = models.TextField(blank=True)
    # At most MAX_NAMES_KEPT of each: {added: [], changed: [], removed: [],
    # rejected: [{name, reason}]}
    names = models.JSONField(default=dict, blank=True)
    warnings = models.JSONField(default=list, blank=True)

    class Meta:
        ordering = ["-started_at", "-id"]
        indexes = [models.Index(fields=["server", "-started_at"], name="sync_by_server")]

    def __str__(self) -> str:
        return f"{self.server_id} {self.started_at:%Y-%m-%d %H:%M:%S} {self.outcome}"

    @property
    def seconds(self) -> float | None:
        if not self.finished_at:
            return None
        return (self.finished_at - self.started_at).total_seconds()


class StateChange(models.Model):
    """A server's new state, from `at` until the next change."""

    server = models.ForeignKey(
        Server, on_delete=models.CASCADE, related_name="state_changes", db_index=False
    )
    at = models.DateTimeField()
    state = models.CharField(max_length=10, choices=ServerState.choices)

    class Meta:
        ordering = ["at", "id"]
        indexes = [models.Index(fields=["server", "at"], name="state_change_by_server")]

    def __str__(self) -> str:
        return f"{self.server_id} {self.state}"
