"""Models of groups and their members."""

from django.db import models

from catalog.models.definitions import Tool


class Group(models.Model):
    """A named set of tools given to agents together."""

    group_id = models.CharField(max_length=80, unique=True)
    display_name = models.CharField(max_length=120)
    description = models.TextField(blank=True)
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
