"""Model of the append-only audit log."""

from typing import Any

from django.db import models
from django.db.models import Q
from django.utils import timezone


class AuditQuerySet(models.QuerySet["AuditEntry"]):
    def update(self, **kwargs: Any) -> int:
        raise TypeError("The audit log is append-only.")

    def delete(self) -> tuple[int, dict[str, int]]:
        raise TypeError("The audit log is append-only.")


class AuditEntry(models.Model):
    """One recorded change. Append-only; names are copied, so deleted actors stay readable.

    The last three fields make changes by SQL detectable (catalog/audit/chain.py).
    """

    at = models.DateTimeField(default=timezone.now)
    actor_kind = models.CharField(max_length=10)  # user, token, agent, system, command
    actor_id = models.BigIntegerField(null=True, blank=True)
    actor_label = models.CharField(max_length=200)
    verb = models.CharField(max_length=60)
    target_kind = models.CharField(max_length=40)
    target_id = models.BigIntegerField(null=True, blank=True)
    target_label = models.CharField(max_length=200)
    before = models.JSONField(default=dict)
    after = models.JSONField(default=dict)
    mac = models.CharField(max_length=100, blank=True)  # of the fields above, set when recorded
    # Place in the chain. Null: not chained yet. 0: recorded before the chain began.
    position = models.BigIntegerField(null=True, blank=True)
    link = models.CharField(max_length=64, blank=True)  # MAC over the previous link and this entry

    objects = AuditQuerySet.as_manager()

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["mac"], condition=~Q(mac=""), name="audit_mac_used_once"
            ),
            models.UniqueConstraint(
                fields=["position"], condition=Q(position__gt=0), name="audit_position_used_once"
            ),
        ]
        indexes = [
            models.Index(fields=["target_kind", "target_id"], name="audit_by_target"),
            models.Index(fields=["id"], condition=Q(position=None), name="audit_not_chained"),
        ]

    def __str__(self) -> str:
        return f"{self.actor_label} {self.verb} {self.target_label}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        if self.pk:
            raise TypeError("The audit log is append-only.")
        super().save(*args, **kwargs)

    def delete(self, *args: Any, **kwargs: Any) -> tuple[int, dict[str, int]]:
        raise TypeError("The audit log is append-only.")
