"""Settings that admins change in the dashboard."""

from django.db import models


class Preference(models.Model):
    """One choice an admin made for the whole installation; `catalog.preferences` knows them all."""

    name = models.CharField(max_length=60, unique=True)
    value = models.TextField()  # JSON

    def __str__(self) -> str:
        return self.name
