"""Forms of the server pages. Each source form produces the text of an mcp.json.

Input may contain secrets, so an invalid form is rendered empty, with its errors.
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

from catalog.groups.forms import CODE_ATTRS
from servers.models import ConnectionPolicy, CredentialKind, Isolation, Server, Transport, Trust
from servers.registration.actions import SETTING_RULES
from servers.secret import Secret

PAIR_ROWS = 3
MORE_PAIR_ROWS = 9
TRANSPORTS = [("http", "Streamable HTTP"), ("sse", "SSE (deprecated)")]


def mcp_json(name: str, entry: Mapping[str, object]) -> Secret:
    """Return an mcp.json with one server, without empty fields."""
    filled = {key: value for key, value in entry.items() if value or key == "args"}
    return Secret(json.dumps({"mcpServers": {name: filled}}))


def _code_field(
    label: str, max_length: int, help_text: str = "", *, required: bool = True, **attrs: object
) -> forms.CharField:
    widget = forms.TextInput(attrs={**CODE_ATTRS, **attrs})
    return forms.CharField(
        label=label, max_length=max_length, required=required, widget=widget, help_text=help_text
    )


def _arguments_field(help_text: str, rows: int) -> forms.CharField:
    widget = forms.Textarea(attrs={**CODE_ATTRS, "rows": rows})
    return forms.CharField(
        label="Arguments", required=False, strip=False, widget=widget, help_text=help_text
    )


def _directory_field() -> forms.CharField:
    return _code_field("Working directory", 1000, "Absolute path.", required=False)


def _name_field(help_text: str = "", *, required: bool = False) -> forms.CharField:
    return forms.CharField(
        label="Name",
        required=required,
        max_length=120,
        widget=forms.TextInput(attrs={"autocomplete": "off"}),
        help_text=help_text,
    )


class SourceForm(forms.Form):
    """Base of the source forms. Subclasses convert their fields to an mcp.json."""

    source = ""
    label = ""
    pairs_field = ""  # the field with name and value rows: headers or env

    def clean(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = super().clean() or {}
        if self.pairs_field:
            cleaned["pairs"] = self._clean_pairs()
        return cleaned

    def _clean_pairs(self) -> dict[str, str]:
        data: Any = self.data
        pairs: dict[str, str] = {}
        rows = zip(data.getlist("pair_name"), data.getlist("pair_value"), strict=False)
        for name, value in ((name.strip(), value) for name, value in rows):
            if not name and not value:
                continue
            if not name or not value:
                missing = "value" if name else "name"
                self.add_error(None, f"One {self.pair_label} has no {missing}.")
            elif name in pairs:
                self.add_error(None, f"Two {self.pair_label}s have the same name.")
            pairs[name] = value
        return pairs

    @property
    def pair_label(self) -> str:
        return "header" if self.pairs_field == "headers" else "environment variable"

    def to_mcp_json(self) -> Secret:
        raise NotImplementedError


class PasteForm(SourceForm):
    source, label = "paste", "Paste mcp.json"

    def clean(self) -> dict[str, Any]:
        text = str(self.data.get("text", ""))
        if not text.strip():
            self.add_error(None, "The text is empty.")
        return {"text": text}

    def to_mcp_json(self) -> Secret:
        return Secret(self.cleaned_data["text"])


class UrlForm(SourceForm):
    source, label, pairs_field = "url", "URL", "headers"
    url = _code_field(
        "URL",
        2000,
        "URL of the MCP endpoint. It often ends in /mcp.",
        inputmode="url",
        autofocus=True,
    )
    name = _name_field("Display name. Default: the host name.")
    transport = forms.ChoiceField(
        label="Transport", choices=TRANSPORTS, help_text="Most servers use Streamable HTTP."
    )

    def to_mcp_json(self) -> Secret:
        cleaned = self.cleaned_data
        url, headers = cleaned["url"], cleaned["pairs"]
        entry = {"type": cleaned["transport"], "url": url, "headers": headers}
        return mcp_json(cleaned["name"] or _host_name(url), entry)


class CommandForm(SourceForm):
    source, label, pairs_field = "command", "Command", "env"
    command = _code_field(
        "Command",
        1000,
        "A program, or a full command line such as npx -y some-server.",
        autofocus=True,
    )
    args = _arguments_field("One per line. If empty, the command is split at spaces.", rows=3)
    cwd = _directory_field()
    name = _name_field("Display name. Default: the program name.")

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean()
        cleaned["argv"] = [cleaned.get("command", ""), *split_lines(cleaned.get("args", ""))]
        if len(cleaned["argv"]) == 1 and not cleaned["argv"][0].startswith("/"):
            try:
                cleaned["argv"] = shlex.split(cleaned["argv"][0]) or [""]
            except ValueError:
                self.add_error("command", "The command has an unclosed quotation mark.")
        return cleaned

    def to_mcp_json(self) -> Secret:
        cleaned = self.cleaned_data
        command, *args = cleaned["argv"]
        entry = {"command": command, "args": args, "cwd": cleaned["cwd"], "env": cleaned["pairs"]}
        return mcp_json(cleaned["name"] or PurePath(command).name or "server", entry)


class DemoForm(SourceForm):
    source, label = "demo", "Demo server"

    def to_mcp_json(self) -> Secret:
        argv = {"command": sys.executable, "args": ["-m", "servers.demo"]}
        return mcp_json("demo", {**argv, "cwd": str(settings.BASE_DIR)})


SOURCES: dict[str, type[SourceForm]] = {
    form.source: form for form in (PasteForm, UrlForm, CommandForm, DemoForm)
}


def split_lines(text: str) -> list[str]:
    return [line for line in text.replace("\r\n", "\n").split("\n") if line]


def _host_name(url: str) -> str:
    try:
        return urlsplit(url).hostname or "server"
    except ValueError:
        return "server"


TRUST_LABELS = {
    Trust.REVIEW_CHANGES.value: "Review changed definitions",
    Trust.AUTO.value: "Approve all definitions automatically",
    Trust.STRICT.value: "Review new and changed definitions",
}
POLICY_LABELS = {
    ConnectionPolicy.ALWAYS.value: "Always connected",
    ConnectionPolicy.ON_DEMAND.value: "On demand, when a tool is called",
}
ISOLATION_LABELS = {
    Isolation.SHARED.value: "One connection shared by all sessions",
    Isolation.PER_SESSION.value: "One connection per session",
}


def _integer_field(label: str, key: str, help_text: str = "") -> forms.IntegerField:
    allowed = SETTING_RULES[key]
    return forms.IntegerField(
        label=label,
        min_value=allowed.start,
        max_value=allowed.stop - 1,
        help_text=f"{help_text} {allowed.start:,} to {allowed.stop - 1:,}.".strip(),
    )


class SettingsForm(forms.Form):
    name = _name_field(required=True)
    description = forms.CharField(
        label="Description",
        required=False,
        max_length=2000,
        widget=forms.Textarea(attrs={"rows": 3}),
    )
    trust = forms.ChoiceField(
        label="Trust",
        choices=list(TRUST_LABELS.items()),
        help_text="Whether an admin must approve tool definitions.",
    )
    connection_policy = forms.ChoiceField(
        label="Connection",
        choices=list(POLICY_LABELS.items()),
        help_text="Only a connected server can notify Toolcrib of changed tools.",
    )
    isolation = forms.ChoiceField(
        label="Isolation",
        choices=list(ISOLATION_LABELS.items()),
        help_text="Use one per session if the server keeps state between calls.",
    )
    call_timeout = _integer_field("Call timeout (seconds)", "call_timeout")
    concurrency = _integer_field("Concurrent calls", "concurrency", "Excess calls are queued.")
    poll_seconds = _integer_field("Sync interval (seconds)", "poll_seconds")

    @classmethod
    def from_server(cls, server: Server) -> "SettingsForm":
        return cls(initial={key: getattr(server, key) for key in cls.base_fields})


class UrlConnectionForm(forms.Form):
    url = _code_field("URL", 2000)
    transport = forms.ChoiceField(label="Transport", choices=TRANSPORTS)

    def to_mcp_json(self, server: Server) -> Secret:
        cleaned = self.cleaned_data
        return mcp_json(server.slug, {"type": cleaned["transport"], "url": cleaned["url"]})


class CommandConnectionForm(forms.Form):
    command = _code_field("Command", 1000)
    args = _arguments_field("One per line.", rows=4)
    cwd = _directory_field()

    def to_mcp_json(self, server: Server) -> Secret:
        args = split_lines(self.cleaned_data["args"])
        return mcp_json(server.slug, {"type": "stdio", **self.cleaned_data, "args": args})


ConnectionForm = UrlConnectionForm | CommandConnectionForm


def connection_form(server: Server, data: Any = None) -> ConnectionForm:
    form = CommandConnectionForm if server.transport == Transport.STDIO else UrlConnectionForm
    initial = {name: getattr(server, name) for name in form.base_fields}
    initial |= {"args": "\n".join(server.args)}
    return form(data, initial=initial, auto_id="connection_%s")


KIND_LABELS = {
    CredentialKind.HEADER.value: "Header",
    CredentialKind.ENV.value: "Environment variable",
    CredentialKind.VARIABLE.value: "Variable in the URL or an argument",
}


KIND_NAMES = {
    CredentialKind.HEADER.value: "header",
    CredentialKind.ENV.value: "environment variable",
    CredentialKind.VARIABLE.value: "variable",
}


class CredentialForm(forms.Form):
    kind = forms.ChoiceField(label="Kind", choices=list(KIND_LABELS.items()))
    name = _code_field("Name", 200)
    value = forms.CharField(
        label="Value",
        strip=False,
        max_length=32 * 1024,
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
        help_text="Stored encrypted and never shown again.",
    )

    def __init__(self, *args: Any, server: Server, **kwargs: Any) -> None:
        super().__init__(*args, **{"auto_id": "credential_%s", **kwargs})
        unused = "header" if server.transport == Transport.STDIO else "env"
        field: Any = self.fields["kind"]
        field.choices = [(kind, label) for kind, label in KIND_LABELS.items() if kind != unused]
