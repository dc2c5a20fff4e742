"""Model of settings that admins change in the dashboard."""

from django.db import models


class Preference(models.Model):
    """One installation-wide setting; `catalog.preferences` defines all of them."""

    name = models.CharField(max_length=60, unique=True)
    value = models.TextField()  # JSON

    def __str__(self) -> str:
        return self.name
