"""Turn one entry of an mcp.json into a draft of a server, or say why not.

Pure. `importing` finds the entries; this reads a single one.
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping

from servers.mcp_json import plaintext_secrets
from servers.mcp_json.jsonc import JsonMap, repeated_keys
from servers.mcp_json.placeholders import Bindings, Reference, References, written
from servers.registration.argv_warnings import runs_inline_code
from servers.registration.drafts import ServerDraft, target_of
from servers.registration.validation import (
    OWN_HEADERS,
    PLACEHOLDER,
    argv_warnings,
    check_argv,
    check_env,
    check_header,
    check_url,
    escape_ambiguous,
    url_warnings,
)
from servers.secret import Secret

MAX_PAIRS = 200
MAX_MOVED = 50
HOLDS_SECRETS = frozenset({"headers", "env", "auth", "authorization", "oauth", "credentials"})
MAX_UNKNOWN = 16 * 1024  # of JSON

_TRANSPORTS = {
    "stdio": "stdio", "local": "stdio", "http": "http", "https": "http", "sse": "sse",
    "streamable-http": "http", "streamablehttp": "http", "streamable_http": "http",
    "remote": "http",
}  # fmt: skip
_URL_FIELDS = ("url", "serverUrl", "httpUrl")
_KNOWN = frozenset([
    "name", "type", "transport", "command", "args", "cwd", "env", "headers", "description",
    "disabled", "enabled", "isActive", *_URL_FIELDS,
])  # fmt: skip
_SINGLE_ONLY = frozenset(["inputs", "$schema"])
_PATH_VALUE = re.compile(r"/[\w./@+ -]*")


class Refused(Exception):
    """This entry cannot become a server."""

    def __init__(self, message: str, hint: str = "", code: str = "bad_server") -> None:
        super().__init__(message)
        self.hint = hint
        self.code = code


class Drafting:
    """Reads entries of one file, which share their variables and inputs."""

    def __init__(self, references: References, *, allow_http: bool) -> None:
        self.references = references
        self.allow_http = allow_http

    def draft(self, name: str, slug: str, entry: object, targets: Mapping[str, str]) -> ServerDraft:
        """Read one entry. Raises `Refused` or `Invalid`."""
        if not isinstance(entry, JsonMap):
            raise Refused("This is not an object in braces.", "Give it a command or a url.")
        for key, line in repeated_keys(entry)[:1]:
            raise Refused(
                f"It names {escape_ambiguous(key[:40])} twice, again on line {line}.",
                "Keep the one you mean.",
                "duplicate_key",
            )
        draft = _Entry(entry, slug, Bindings(self.references), allow_http=self.allow_http).read()
        same = targets.get(target_of(draft))
        warnings = [f"This is the same as {same}."] if same else []
        shown = escape_ambiguous(name)[:120] or slug
        if shown != name:
            warnings.append("The name was shortened, or hidden characters in it were escaped.")
        return dataclasses.replace(draft, name=shown, warnings=(*warnings, *draft.warnings))


class _Entry:
    """One entry while it is read: what was found so far."""

    def __init__(self, entry: JsonMap, slug: str, bindings: Bindings, *, allow_http: bool) -> None:
        self.entry = entry
        self.slug = slug
        self.bindings = bindings
        self.allow_http = allow_http
        self.warnings: list[str] = []
        self.moved: list[str] = []
        self.literal_secrets = 0

    def read(self) -> ServerDraft:
        for field in ("command", "args", "cwd", "env", "headers", *_URL_FIELDS):
            for text in _texts(self.entry.get(field)):
                self.bindings.learn_defaults(text)
        transport = self.transport()
        stdio = transport == "stdio"
        draft = ServerDraft(
            name="",
            slug=self.slug,
            transport=transport,
            env=self.env() if stdio else self.unused("env"),
            headers=self.unused("headers") if stdio else self.headers(),
            description=self.text("description")[:2000],
            disabled=self.disabled(),
        )
        if stdio:
            command, args, cwd = self.program()
            draft = dataclasses.replace(draft, command=command, args=args, cwd=cwd)
        else:
            draft = dataclasses.replace(draft, url=self.address())
        self.check_variables(transport)
        unknown = self.unknown()
        self.warn_of_variables()
        return dataclasses.replace(
            draft,
            variables={name: Secret(value) for name, value in self.bindings.used.items()},
            missing=tuple(self.bindings.missing),
            warnings=tuple(self.warnings),
            unknown=unknown,
            secrets_found=self.literal_secrets + len(self.moved),
        )

    def text(self, field: str) -> str:
        value = self.entry.get(field)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise Refused(f"{field} must be a text in double quotes.", "Correct it.", "bad_type")
        if "\x00" in value and field == "description":
            raise Refused("The description holds a NUL character.", "Remove it.", "bad_type")
        return value

    def transport(self) -> str:
        has_command = bool(self.text("command").strip())
        address = next((self.text(f) for f in _URL_FIELDS if self.text(f).strip()), "")
        if has_command and address:
            raise Refused(
                "It has both a command and a url.", "Keep the one that is meant.", "ambiguous"
            )
        if not has_command and not address:
            raise Refused(
                "It has neither a command nor a url.",
                "Give a command to run a program here, or a url to reach a server.",
                "no_target",
            )
        claimed = self.text("type") or self.text("transport")
        transport = _TRANSPORTS.get(claimed.strip().lower())
        if claimed and not transport:
            raise Refused(
                f"The type {escape_ambiguous(claimed[:30])} is not known.",
                "Use stdio, http or sse.",
                "bad_transport",
            )
        if transport and (transport == "stdio") != has_command:
            needs = "a command" if transport == "stdio" else "a url"
            raise Refused(
                f"Its type is {transport}, which needs {needs}.", "Correct one.", "ambiguous"
            )
        if transport:
            return transport
        path = re.split(r"[?#]", address)[0]
        return "stdio" if has_command else "sse" if path.rstrip("/").endswith("/sse") else "http"

    def program(self) -> tuple[str, tuple[str, ...], str]:
        command = self.path("command")
        cwd = self.path("cwd")
        if plaintext_secrets.looks_like_secret(command):
            raise Refused("The command holds a secret.", "Move it to env or args.", "bad_argv")
        args = [self.bindings.kept(arg) for arg in self.args()]
        check_argv([command, *args], "")
        if runs_inline_code([command, *args]):
            # All of the code must be there to be read: nothing is moved out of it.
            if any(PLACEHOLDER.search(arg) for arg in args):
                raise Refused(
                    "It runs code written in its arguments, and a variable would hide a part.",
                    "Write the code out, and pass values by env.",
                    "bad_argv",
                )
        else:
            args = plaintext_secrets.out_of_args(args, self.move)
        check_argv([command, *args], "" if "${" in cwd else cwd)
        self.warnings += argv_warnings([command, *args])
        return command, tuple(args), cwd

    def args(self) -> list[str]:
        value = self.entry.get("args")
        if value is None:
            return []
        if not isinstance(value, list):
            raise Refused(
                "args must be a list of texts.", 'Write it like ["--port", "80"].', "bad_type"
            )
        return [self.as_text(item, f"Argument {at}") for at, item in enumerate(value, 1)]

    def path(self, field: str) -> str:
        """Read a path with its variables written out: what runs is confirmed by its real path."""

        def write(reference: Reference) -> str:
            value = self.bindings.value(reference)
            if value is None:
                return written(reference.name)
            if value != self.bindings.defaults.get(reference.name) and not (
                _PATH_VALUE.fullmatch(value) and not plaintext_secrets.looks_like_secret(value)
            ):
                raise Refused(
                    f"{field} is to be filled in from {reference.name}, which is not a full path.",
                    f"Write the {field} out.",
                    "bad_argv",
                )
            return value

        return self.bindings.references.replace(self.text(field), write)

    def address(self) -> str:
        field = next(f for f in _URL_FIELDS if self.text(f).strip())
        text = self.text(field).strip()

        def write_base(reference: Reference) -> str:
            value = self.bindings.value(reference)
            if value is None:
                raise Refused(
                    f"The address begins with the variable {reference.name}, which has no value.",
                    f"Give {reference.name} a value, or write the address out.",
                    "missing_variable",
                )
            # Only what is an address itself is written out. Anything else may be a secret.
            if not re.match(r"https?://", value):
                raise Refused(
                    f"The address begins with {reference.name}, whose value is not an address.",
                    "Write the address out.",
                    "bad_url",
                )
            return value.rstrip("/")

        if base := re.match(r"\$\{[^{}]*\}", text):
            text = self.bindings.references.replace(base[0], write_base) + text[base.end() :]
        url = check_url(self.bindings.kept(text), allow_http=self.allow_http)
        self.warnings += url_warnings(url)
        return plaintext_secrets.out_of_url(url, self.move)

    def env(self) -> dict[str, Secret]:
        values = {}
        for name, text in self.pairs("env"):
            value = self.bindings.filled(text)
            check_env(name, value)
            values[name] = Secret(value)
            self.count(name, text)
        return values

    def headers(self) -> dict[str, Secret]:
        values: dict[str, Secret] = {}
        for name, text in self.pairs("headers"):
            if name.lower() in OWN_HEADERS:
                self.warnings.append(f"The header {name} was left out: the connection sets it.")
                continue
            value = self.bindings.filled(text).strip(" \t")
            check_header(name, value)
            if name.lower() in map(str.lower, values):
                raise Refused(f"It names the header {name} twice.", "Keep one.", "bad_header")
            values[name] = Secret(value)
            self.count(name, text)
        return values

    def pairs(self, field: str) -> list[tuple[str, str]]:
        value = self.entry.get(field)
        if value is None:
            return []
        if not isinstance(value, JsonMap):
            raise Refused(
                f"{field} must be an object of names and texts.",
                'Write it like {"NAME": "value"}.',
                "bad_type",
            )
        if len(value) > MAX_PAIRS:
            raise Refused(f"{field} has over {MAX_PAIRS} names.", "Shorten it.", "too_many")
        return [
            (n, self.as_text(v, f"{field} {escape_ambiguous(n[:60])}")) for n, v in value.items()
        ]

    def as_text(self, value: object, what: str) -> str:
        if isinstance(value, str):
            return value
        if isinstance(value, bool | int | float):
            self.warnings.append(f"{what} is a number or a yes/no; it was read as a text.")
            return str(value).lower() if isinstance(value, bool) else str(value)
        raise Refused(f"{what} must be a text in double quotes.", "Correct it.", "bad_type")

    def unused(self, field: str) -> dict[str, Secret]:
        if self.entry.get(field):
            self.warnings.append(f"{field} was left out: this kind of server does not use it.")
        return {}

    def disabled(self) -> bool:
        for field in ("disabled", "enabled", "isActive"):
            if not isinstance(self.entry.get(field, False), bool):
                raise Refused(f"{field} must be true or false.", "Correct it.", "bad_type")
        return (
            self.entry.get("disabled") is True
            or self.entry.get("enabled") is False
            or self.entry.get("isActive") is False
        )

    def move(self, wanted: str, secret: str) -> str:
        if len(self.moved) >= MAX_MOVED:
            raise Refused(
                f"Over {MAX_MOVED} secrets stand in plain text.", "Move them to env.", "too_many"
            )
        name = re.sub(r"[^A-Z0-9]+", "_", f"{self.slug}_{wanted}".upper()).strip("_")
        written = self.bindings.move(name, secret)
        self.moved.append(written)
        self.warnings.append(f"A secret stood in plain text. It is kept encrypted as {written}.")
        return written

    def count(self, name: str, text: str) -> None:
        """Count the secrets that stood in the text itself."""
        plain = re.sub(r"\$\{[^{}]*\}|^(?:Bearer|Basic|Token) ", "", text, flags=re.IGNORECASE)
        speaks = plaintext_secrets.is_secret_name(name) or plaintext_secrets.looks_like_secret(
            plain
        )
        self.literal_secrets += bool(plain.strip() and speaks)

    def check_variables(self, transport: str) -> None:
        refused = r"\x00" if transport == "stdio" else r"[\x00-\x20\x7f]"
        for name, value in self.bindings.used.items():
            if re.search(refused, value):
                raise Refused(
                    f"The value of {name} holds a space, a line break or a control character.",
                    "Enter it again.",
                    "bad_variable",
                )

    def unknown(self) -> dict[str, object]:
        single = "name" in self.entry or "inputs" in self.entry
        left = _SINGLE_ONLY if single else frozenset[str]()
        unknown = {k: v for k, v in self.entry.items() if k not in _KNOWN and k not in left}
        if "envFile" in unknown:
            self.warnings.append("envFile is not read. Enter the variables it holds instead.")
        if unknown:
            names = ", ".join(escape_ambiguous(name[:40]) for name in list(unknown)[:10])
            self.warnings.append(f"Not known to Toolcrib, kept but unused: {names}.")
        if len(json.dumps(unknown)) > MAX_UNKNOWN:
            self.warnings.append("These fields are over 16 KB together, and were not kept.")
            return {}
        return {_without_nul(key): self.without_secrets(key, v) for key, v in unknown.items()}

    def without_secrets(self, name: str, value: object, *, among: bool = False) -> object:
        """Copy a value that is kept but never used: a secret in it is worth nothing here.

        `among`: below a field such as headers, every text may be one.
        """
        among = among or name.lower() in HOLDS_SECRETS
        if isinstance(value, dict):
            return {
                _without_nul(key): self.without_secrets(key, item, among=among)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self.without_secrets(name, item, among=among) for item in value]
        if not isinstance(value, str):
            return value
        speaks = among or plaintext_secrets.is_secret_name(name)
        speaks = speaks and not re.fullmatch(r"\$\{.*\}", value)
        if value and (speaks or plaintext_secrets.looks_like_secret(value) or "://" in value):
            kept = "•••" if speaks else plaintext_secrets.out_of_args([value], lambda *_: "•••")[0]
            if kept != value:
                self.warnings.append(
                    f"{escape_ambiguous(name[:40])} held a secret, which was not kept."
                )
            return _without_nul(kept)
        return _without_nul(value)

    def warn_of_variables(self) -> None:
        for name in self.bindings.editor_only:
            self.warnings.append(f"{name} is filled in by an editor; give it a value here.")
        for name in self.bindings.conflicting:
            self.warnings.append(f"{name} has two different defaults; the first one is used.")


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)


def _without_nul(text: str) -> str:
    return text.replace("\x00", "")
