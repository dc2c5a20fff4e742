"""The forms of the servers' pages. Each source ends as the text of one mcp.json.

What is typed may hold secrets, so a refused form comes back empty, with the reason.
"""

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any
from urllib.parse import urlsplit

from django import forms
from django.conf import settings

from servers.models import (
    ConnectionPolicy,
    CredentialKind,
    Isolation,
    Server,
    Transport,
    Trust,
)
from servers.registration.actions import SETTINGS
from servers.secret import Secret

PAIR_ROWS = 3
MORE_PAIR_ROWS = 9
PLAIN = {"autocomplete": "off", "autocapitalize": "off", "spellcheck": "false", "class": "mono"}


def mcp_json(name: str, entry: Mapping[str, object]) -> Secret:
    """Write one server the way every source does."""
    return Secret(json.dumps({"mcpServers": {name: dict(entry)}}))


class SourceForm(forms.Form):
    """Where servers come from. Subclasses say how their fields become a text."""

    source = ""
    label = ""
    pairs_of = ""  # the field that takes name and value rows: headers or env

    def clean(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = super().clean() or {}
        if self.pairs_of:
            cleaned["pairs"] = self._pairs()
        return cleaned

    def _pairs(self) -> dict[str, str]:
        data: Any = self.data
        pairs: dict[str, str] = {}
        rows = zip(data.getlist("pair_name"), data.getlist("pair_value"), strict=False)
        for name, value in ((name.strip(), value) for name, value in rows):
            if not name and not value:
                continue
            if not name or not value:
                lacking = "value" if name else "name"
                self.add_error(None, f"One of the {self.pair_word}s has no {lacking}.")
            elif name in pairs:
                self.add_error(None, f"Two of the {self.pair_word}s have the same name.")
            pairs[name] = value
        return pairs

    @property
    def pair_word(self) -> str:
        return "header" if self.pairs_of == "headers" else "environment variable"

    def text(self) -> Secret:
        raise NotImplementedError


class PasteForm(SourceForm):
    source, label = "paste", "Paste mcp.json"

    def clean(self) -> dict[str, Any]:
        pasted = str(self.data.get("text", ""))
        if not pasted.strip():
            self.add_error(None, "Nothing was pasted.")
        return {"text": pasted}

    def text(self) -> Secret:
        return Secret(self.cleaned_data["text"])


class NameField(forms.CharField):
    def __init__(self, help_text: str) -> None:
        super().__init__(
            label="Name",
            required=False,
            max_length=120,
            help_text=help_text,
            widget=forms.TextInput(attrs={"autocomplete": "off"}),
        )


class UrlForm(SourceForm):
    source, label, pairs_of = "url", "URL", "headers"
    url = forms.CharField(
        label="URL",
        max_length=2000,
        widget=forms.TextInput(attrs={**PLAIN, "inputmode": "url", "autofocus": True}),
        help_text="The address of the MCP endpoint, often ending in /mcp.",
    )
    name = NameField("How people here call it. Left empty, the host's name.")
    transport = forms.ChoiceField(
        label="Transport",
        choices=[("http", "Streamable HTTP"), ("sse", "SSE, the older one")],
        help_text="Nearly every server speaks streamable HTTP.",
    )

    def text(self) -> Secret:
        cleaned = self.cleaned_data
        entry = {"type": cleaned["transport"], "url": cleaned["url"]}
        if cleaned["pairs"]:
            entry["headers"] = cleaned["pairs"]
        return mcp_json(cleaned["name"] or _host(cleaned["url"]), entry)


class CommandForm(SourceForm):
    source, label, pairs_of = "command", "Command", "env"
    command = forms.CharField(
        label="Command",
        max_length=1000,
        widget=forms.TextInput(attrs={**PLAIN, "autofocus": True}),
        help_text="The program, or a whole command line such as npx -y some-server.",
    )
    args = forms.CharField(
        label="Arguments",
        required=False,
        strip=False,
        widget=forms.Textarea(attrs={**PLAIN, "rows": 3}),
        help_text="One per line. Left empty, the command is split at its spaces.",
    )
    cwd = forms.CharField(
        label="Working folder",
        required=False,
        max_length=1000,
        widget=forms.TextInput(attrs=PLAIN),
        help_text="A full path.",
    )
    name = NameField("How people here call it. Left empty, the program's name.")

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean()
        cleaned["argv"] = [cleaned.get("command", ""), *lines(cleaned.get("args", ""))]
        if len(cleaned["argv"]) == 1 and not cleaned["argv"][0].startswith("/"):
            try:
                cleaned["argv"] = shlex.split(cleaned["argv"][0]) or [""]
            except ValueError:
                self.add_error("command", "A quotation mark in the command is not closed.")
        return cleaned

    def text(self) -> Secret:
        cleaned = self.cleaned_data
        command, *args = cleaned["argv"]
        entry: dict[str, object] = {"command": command, "args": args}
        if cleaned["cwd"]:
            entry["cwd"] = cleaned["cwd"]
        if cleaned["pairs"]:
            entry["env"] = cleaned["pairs"]
        return mcp_json(cleaned["name"] or PurePath(command).name or "server", entry)


class DemoForm(SourceForm):
    source, label = "demo", "Demo server"

    def text(self) -> Secret:
        argv = {"command": sys.executable, "args": ["-m", "servers.demo"]}
        return mcp_json("demo", {**argv, "cwd": str(settings.BASE_DIR)})


SOURCES: dict[str, type[SourceForm]] = {
    form.source: form for form in (PasteForm, UrlForm, CommandForm, DemoForm)
}


def lines(text: str) -> list[str]:
    return [line for line in text.replace("\r\n", "\n").split("\n") if line]


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or "server"
    except ValueError:
        return "server"


# --- Settings of one server ---------------------------------------------------------------------


def _choices(words: Mapping[str, str]) -> list[tuple[str, str]]:
    return list(words.items())


TRUST_WORDS = {
    Trust.REVIEW_CHANGES.value: "Changed definitions wait for an approval",
    Trust.AUTO.value: "Every definition is approved at once",
    Trust.STRICT.value: "New and changed definitions wait for an approval",
}
POLICY_WORDS = {
    ConnectionPolicy.ALWAYS.value: "Stay connected",
    ConnectionPolicy.ON_DEMAND.value: "Connect when a tool is called",
}
ISOLATION_WORDS = {
    Isolation.SHARED.value: "One connection for all sessions",
    Isolation.PER_SESSION.value: "A connection for each session",
}


def _number(label: str, key: str, help_text: str) -> forms.IntegerField:
    allowed = SETTINGS[key]
    return forms.IntegerField(
        label=label,
        min_value=allowed.start,
        max_value=allowed.stop - 1,
        help_text=f"{help_text} {allowed.start:,} to {allowed.stop - 1:,}.",
    )


class SettingsForm(forms.Form):
    name = forms.CharField(
        label="Name", max_length=120, widget=forms.TextInput(attrs={"autocomplete": "off"})
    )
    description = forms.CharField(
        label="Description",
        required=False,
        max_length=2000,
        widget=forms.Textarea(attrs={"rows": 3}),
    )
    trust = forms.ChoiceField(
        label="Trust",
        choices=_choices(TRUST_WORDS),
        help_text="What happens when the server offers a tool or rewrites one.",
    )
    connection_policy = forms.ChoiceField(
        label="Connection",
        choices=_choices(POLICY_WORDS),
        help_text="A server that stays connected can say when its tools change.",
    )
    isolation = forms.ChoiceField(
        label="Isolation",
        choices=_choices(ISOLATION_WORDS),
        help_text="Choose one for each session when the server keeps state between calls.",
    )
    call_timeout = _number("Call timeout", "call_timeout", "Seconds a call may take.")
    concurrency = _number("Concurrent calls", "concurrency", "More wait for their turn.")
    poll_seconds = _number("Sync every", "poll_seconds", "Seconds between two syncs.")

    @classmethod
    def of(cls, server: Server) -> "SettingsForm":
        return cls(initial={key: getattr(server, key) for key in cls.base_fields})


class AddressForm(forms.Form):
    """How a server is reached over the network."""

    url = forms.CharField(label="URL", max_length=2000, widget=forms.TextInput(attrs=PLAIN))
    transport = forms.ChoiceField(
        label="Transport",
        choices=[("http", "Streamable HTTP"), ("sse", "SSE, the older one")],
    )

    @classmethod
    def initial_of(cls, server: Server) -> dict[str, object]:
        return {"url": server.url, "transport": server.transport}

    def text(self, server: Server) -> Secret:
        cleaned = self.cleaned_data
        return mcp_json(server.slug, {"type": cleaned["transport"], "url": cleaned["url"]})


class ProgramForm(forms.Form):
    """Which program a server is."""

    command = forms.CharField(label="Command", max_length=1000, widget=forms.TextInput(attrs=PLAIN))
    args = forms.CharField(
        label="Arguments",
        required=False,
        strip=False,
        widget=forms.Textarea(attrs={**PLAIN, "rows": 4}),
        help_text="One per line.",
    )
    cwd = forms.CharField(
        label="Working folder",
        required=False,
        max_length=1000,
        widget=forms.TextInput(attrs=PLAIN),
        help_text="A full path.",
    )

    @classmethod
    def initial_of(cls, server: Server) -> dict[str, object]:
        return {"command": server.command, "args": "\n".join(server.args), "cwd": server.cwd}

    def text(self, server: Server) -> Secret:
        cleaned = self.cleaned_data
        entry = {"type": "stdio", "command": cleaned["command"], "args": lines(cleaned["args"])}
        return mcp_json(server.slug, entry | ({"cwd": cleaned["cwd"]} if cleaned["cwd"] else {}))


ConnectionForm = AddressForm | ProgramForm


def connection_form(server: Server, data: Any = None) -> ConnectionForm:
    form = ProgramForm if server.transport == Transport.STDIO else AddressForm
    return form(data, initial=form.initial_of(server), auto_id="connection_%s")


KIND_WORDS = {
    CredentialKind.HEADER.value: "Header",
    CredentialKind.ENV.value: "Environment variable",
    CredentialKind.VARIABLE.value: "Variable in the address or an argument",
}


class CredentialForm(forms.Form):
    kind = forms.ChoiceField(label="Kind", choices=_choices(KIND_WORDS))
    name = forms.CharField(label="Name", max_length=200, widget=forms.TextInput(attrs=PLAIN))
    value = forms.CharField(
        label="Value",
        strip=False,
        max_length=32 * 1024,
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
        help_text="Kept encrypted and never shown again.",
    )

    def __init__(self, *args: Any, server: Server, **kwargs: Any) -> None:
        super().__init__(*args, **{"auto_id": "credential_%s", **kwargs})
        useless = "header" if server.transport == Transport.STDIO else "env"
        field: Any = self.fields["kind"]
        field.choices = [(kind, word) for kind, word in KIND_WORDS.items() if kind != useless]
