"""Model of the filters of a list that a person saved under a name."""

from django.contrib.auth.models import User
from django.db import models
from django.utils import timezone


class SavedView(models.Model):
    """Filters and order of the session list, as a query string."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="saved_views")
    name = models.CharField(max_length=60)
    query = models.CharField(max_length=2_000)
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["name"]
        constraints = [
            models.UniqueConstraint(fields=["user", "name"], name="saved_view_name_unique")
        ]

    def __str__(self) -> str:
        return self.name
