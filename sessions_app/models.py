"""The callers' nouns. Agents, sessions and calls come with the engine; keys are here now."""

from django.conf import settings
from django.db import models
from django.db.models import Q


class Scope(models.TextChoices):
    ADMIN = "admin"
    OPERATOR = "operator"


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
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    last_used_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.CheckConstraint(condition=Q(scope__in=Scope.values), name="key_scope_known")
        ]

    def __str__(self) -> str:
        return f"{self.name} {self.prefix}…"
