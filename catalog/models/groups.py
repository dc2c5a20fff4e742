"""Models of groups and their members."""

from django.db import models

from catalog.models.definitions import Tool


class Group(models.Model):
    """A named set of tools given to agents together."""

    group_id = models.CharField(max_length=80, unique=True)
    display_name = models.CharField(max_length=120)
    description = models.TextField(blank=True)
    server_description = models.TextField(blank=True)  # made from the server's own texts
    position = models.PositiveIntegerField(default=0)
    preload_default = models.BooleanField(default=False)
    deferred = models.BooleanField(default=True)
    follows = models.OneToOneField(
        "servers.Server", null=True, blank=True, on_delete=models.SET_NULL, related_name="group"
    )
    tools = models.ManyToManyField(Tool, through="Membership", related_name="groups")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["position", "group_id"]

    def __str__(self) -> str:
        return self.group_id

    @property
    def is_described_by_server(self) -> bool:
        """Whether the description is the server's own, which no person has edited."""
        return bool(self.description) and self.description == self.server_description


class Membership(models.Model):
    group = models.ForeignKey(Group, on_delete=models.CASCADE, related_name="memberships")
    tool = models.ForeignKey(Tool, on_delete=models.CASCADE, related_name="memberships")
    position = models.PositiveIntegerField(default=0)
    preload = models.BooleanField(null=True, blank=True)  # null: use the group's default

    class Meta:
        ordering = ["position", "tool__name"]
        constraints = [
            models.UniqueConstraint(fields=["group", "tool"], name="tool_once_per_group")
        ]

    def __str__(self) -> str:
        return f"{self.group_id}/{self.tool_id}"


class ExpectedMember(models.Model):
    """A member that a configuration file names before any sync has brought the tool."""

    group = models.ForeignKey(Group, on_delete=models.CASCADE, related_name="expected")
    tool_name = models.CharField(max_length=64)
    position = models.PositiveIntegerField(default=0)
    preload = models.BooleanField(null=True, blank=True)

    class Meta:
        ordering = ["position", "tool_name"]
        constraints = [
            models.UniqueConstraint(
                fields=["group", "tool_name"], name="expected_tool_once_per_group"
            )
        ]

    def __str__(self) -> str:
        return self.tool_name


class ExpectedTool(models.Model):
    """Settings of a tool that a configuration file names before any sync has brought it."""

    tool_name = models.CharField(max_length=64, unique=True)
    settings = models.JSONField(default=dict)  # as `catalog.tools.settings` takes them

    class Meta:
        ordering = ["tool_name"]

    def __str__(self) -> str:
        return self.tool_name
