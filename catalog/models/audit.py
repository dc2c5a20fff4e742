"""Model of the append-only audit log."""

from typing import Any

from django.db import models


class AuditQuerySet(models.QuerySet["AuditEntry"]):
    def update(self, **kwargs: Any) -> int:
        raise TypeError("The audit log is append-only.")

    def delete(self) -> tuple[int, dict[str, int]]:
        raise TypeError("The audit log is append-only.")


class AuditEntry(models.Model):
    """One recorded change. Append-only; names are copied, so deleted actors stay readable."""

    at = models.DateTimeField(auto_now_add=True)
    actor_kind = models.CharField(max_length=10)  # user, token, system, command
    actor_id = models.BigIntegerField(null=True, blank=True)
    actor_label = models.CharField(max_length=200)
    verb = models.CharField(max_length=60)
    target_kind = models.CharField(max_length=40)
    target_id = models.BigIntegerField(null=True, blank=True)
    target_label = models.CharField(max_length=200)
    before = models.JSONField(default=dict)
    after = models.JSONField(default=dict)

    objects = AuditQuerySet.as_manager()

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["target_kind", "target_id"], name="audit_by_target")]

    def __str__(self) -> str:
        return f"{self.actor_label} {self.verb} {self.target_label}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        if self.pk:
            raise TypeError("The audit log is append-only.")
        super().save(*args, **kwargs)

    def delete(self, *args: Any, **kwargs: Any) -> tuple[int, dict[str, int]]:
        raise TypeError("The audit log is append-only.")
