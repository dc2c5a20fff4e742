"""Calls that wait for the user of their client, for the process that receives the answer."""

from django.db import models

from sessions_app.models.encryption import EncryptedTextField


class WaitingConversation(models.Model):
    """A call whose server asks during the call: it waits in one process for an answer.

    Any process may receive the answer. It leaves the answer here, and the process of the call
    leaves what follows: the next question, or the response.
    """

    token = models.CharField(max_length=32, unique=True)  # sealed in what the client carries
    holder = models.CharField(max_length=200)  # the process that runs the call
    answer = EncryptedTextField(blank=True)  # JSON, until the process of the call takes it
    outcome = EncryptedTextField(blank=True)  # JSON, for the process that left the answer
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["id"]

    def __str__(self) -> str:
        return self.token
