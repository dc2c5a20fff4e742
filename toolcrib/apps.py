from django.apps import AppConfig


class ToolcribConfig(AppConfig):
    name = "toolcrib"
