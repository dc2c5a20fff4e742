"""Model of what a server offers besides tools: prompts, resources, resource templates."""

from django.db import models

ASKS = "asks"  # among a server's capabilities: it asks users of clients during calls


class FeatureKind(models.TextChoices):
    PROMPT = "prompt"
    RESOURCE = "resource"
    TEMPLATE = "template"  # of resource URIs


class Feature(models.Model):
    """A prompt, resource or template as its server lists it; replaced by every sync.

    Sessions have the features of the servers whose following group they have.
    """

    server = models.ForeignKey("servers.Server", on_delete=models.CASCADE, related_name="features")
    kind = models.CharField(max_length=8, choices=FeatureKind.choices)
    key = models.TextField()  # the prompt's name, the URI or the URI template, as sent
    key_sha256 = models.CharField(max_length=64)  # of the key, which may be too long for an index
    public_name = models.CharField(max_length=64, blank=True)  # of a prompt
    body = models.TextField()  # canonical JSON, as the server sent it
    position = models.PositiveIntegerField(default=0)  # in the server's list

    class Meta:
        ordering = ["kind", "position"]
        constraints = [
            models.UniqueConstraint(
                fields=["server", "kind", "key_sha256"], name="feature_once_per_server"
            ),
            models.UniqueConstraint(
                fields=["public_name"],
                condition=models.Q(kind="prompt"),
                name="prompt_name_once",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.key}"
