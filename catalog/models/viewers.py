"""Model of people who may read pages and figures only."""

from django.contrib.auth.models import User
from django.db import models


class Viewer(models.Model):
    """The role viewer of a person; the flags of Django's user store the other roles."""

    user = models.OneToOneField(
        User, on_delete=models.CASCADE, primary_key=True, related_name="viewer"
    )

    def __str__(self) -> str:
        return self.user.username
