"""Parse one server entry of an mcp.json into a `ServerDraft`.

Pure. `parser` finds the entries of a file.
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from servers.mcp_json import plaintext_secrets
from servers.mcp_json.jsonc import JsonMap, repeated_keys
from servers.mcp_json.placeholders import Bindings, Reference, References, format_reference
from servers.registration.argv_warnings import argv_warnings, runs_inline_code
from servers.registration.drafts import MASK, ServerDraft
from servers.registration.validation import (
    PLACEHOLDER,
    TRANSPORT_HEADERS,
    check_argv,
    check_env,
    check_header,
    check_url,
    url_warnings,
)
from servers.registration.variable_positions import find_misplaced_variables, misplaced_variable
from servers.secret import Secret
from toolcrib.lib.errors import Invalid
from toolcrib.lib.text import escape_ambiguous

MAX_PAIRS = 200
MAX_EXTRACTED_SECRETS = 50
SECRET_CONTAINERS = frozenset({"headers", "env", "auth", "authorization", "oauth", "credentials"})
MAX_UNKNOWN_BYTES = 16 * 1024  # as JSON

_TRANSPORTS = {
    "stdio": "stdio", "local": "stdio", "http": "http", "https": "http", "sse": "sse",
    "streamable-http": "http", "streamablehttp": "http", "streamable_http": "http",
    "remote": "http",
}  # fmt: skip
_URL_FIELDS = ("url", "serverUrl", "httpUrl")
_KNOWN_FIELDS = frozenset([
    "name", "type", "transport", "command", "args", "cwd", "env", "headers", "description",
    "disabled", "enabled", "isActive", *_URL_FIELDS,
])  # fmt: skip
_SINGLE_ONLY_FIELDS = frozenset(["inputs", "$schema"])
_PATH_VALUE = re.compile(r"/[\w./@+ -]*")


class EntryError(Invalid):
    def __init__(self, message: str, hint: str = "", code: str = "bad_server") -> None:
        super().__init__(message, hint=hint, code=code)


def parse_entry(
    name: str,
    slug: str,
    entry: object,
    *,
    references: References,
    targets: Mapping[str, str],
    allow_http: bool,
) -> ServerDraft:
    """Parse one entry or raise Invalid. `targets` maps each known `target_string` to its slug."""
    if not isinstance(entry, JsonMap):
        raise EntryError("The entry is not a JSON object.", "Use an object with command or url.")
    for key, line in repeated_keys(entry)[:1]:
        raise EntryError(
            f"Duplicate key {escape_ambiguous(key[:40])} on line {line}.",
            "Keep one of them.",
            "duplicate_key",
        )
    draft = _Entry(entry, slug, Bindings(references), allow_http).parse()
    duplicate = targets.get(draft.target)
    warnings = [f"Duplicate of {duplicate}."] if duplicate else []
    display_name = escape_ambiguous(name)[:120] or slug
    if display_name != name:
        warnings.append("The name was shortened, or invisible characters in it were escaped.")
    return dataclasses.replace(draft, name=display_name, warnings=(*warnings, *draft.warnings))


@dataclasses.dataclass
class _Entry:
    entry: JsonMap
    slug: str
    bindings: Bindings
    allow_http: bool
    warnings: list[str] = dataclasses.field(default_factory=list)
    extracted: list[str] = dataclasses.field(
        default_factory=list
    )  # references to plaintext secrets
    literal_secrets: int = 0

    def parse(self) -> ServerDraft:
        for field in ("command", "args", "cwd", "env", "headers", *_URL_FIELDS):
            for text in _strings(self.entry.get(field)):
                self.bindings.collect_defaults(text)
        transport = self.parse_transport()
        stdio = transport == "stdio"
        draft = ServerDraft(
            name="",
            slug=self.slug,
            transport=transport,
            env=self.parse_env() if stdio else self.ignore("env"),
            headers=self.ignore("headers") if stdio else self.parse_headers(),
            description=self.get_string("description")[:2000],
            disabled=self.is_disabled(),
            **(self.parse_command() if stdio else {"url": self.parse_url()}),
        )
        self.check_variables(transport)
        unknown = self.collect_unknown_fields()
        for name in self.bindings.editor_only:
            self.warnings.append(f"{name} is an editor variable; enter a value for it.")
        for name in self.bindings.conflicting:
            self.warnings.append(f"{name} has conflicting defaults; the first one is used.")
        return dataclasses.replace(
            draft,
            variables={name: Secret(value) for name, value in self.bindings.used.items()},
            missing=tuple(self.bindings.missing),
            warnings=tuple(self.warnings),
            unknown=unknown,
            secrets_found=self.literal_secrets + len(self.extracted),
        )

    def get_string(self, field: str) -> str:
        value = self.entry.get(field)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise EntryError(f"{field} must be a string.", "Correct it.", "bad_type")
        if "\x00" in value and field == "description":
            raise EntryError("The description contains a NUL character.", "Remove it.", "bad_type")
        return value

    def parse_transport(self) -> str:
        has_command = bool(self.get_string("command").strip())
        url = next((self.get_string(f) for f in _URL_FIELDS if self.get_string(f).strip()), "")
        if has_command and url:
            raise EntryError(
                "The entry has both a command and a url.", "Keep one of them.", "ambiguous"
            )
        if not has_command and not url:
            raise EntryError(
                "The entry has neither a command nor a url.",
                "Set command to run a local server, or url to connect to a remote one.",
                "no_target",
            )
        declared = self.get_string("type") or self.get_string("transport")
        transport = _TRANSPORTS.get(declared.strip().lower())
        if declared and not transport:
            raise EntryError(
                f"Unknown type: {escape_ambiguous(declared[:30])}.",
                "Use stdio, http or sse.",
                "bad_transport",
            )
        if transport and (transport == "stdio") != has_command:
            required = "a command" if transport == "stdio" else "a url"
            raise EntryError(
                f"The type {transport} requires {required}.", "Correct the type.", "ambiguous"
            )
        if transport:
            return transport
        path = re.split(r"[?#]", url)[0]
        return "stdio" if has_command else "sse" if path.rstrip("/").endswith("/sse") else "http"

    def parse_command(self) -> dict[str, Any]:
        command = self.expand_path("command")
        cwd = self.expand_path("cwd")
        if plaintext_secrets.looks_like_secret(command):
            raise EntryError(
                "The command contains a secret.", "Move it to env or args.", "bad_argv"
            )
        args = [self.bindings.normalize(arg) for arg in self.parse_args()]
        check_argv([command, *args], "")
        if runs_inline_code([command, *args]):
            # The admin must see all of the code, so no secret is extracted from it.
            if any(PLACEHOLDER.search(arg) for arg in args):
                raise EntryError(
                    "Inline code in the arguments must not contain variables.",
                    "Write the code out in full, and pass values in env.",
                    "bad_argv",
                )
        else:
            args = plaintext_secrets.extract_from_args(args, self.extract)
            args = self.expand_misplaced_variables(command, args)
        check_argv([command, *args], "" if "${" in cwd else cwd)
        self.warnings += argv_warnings([command, *args])
        return {"command": command, "args": tuple(args), "cwd": cwd}

    def expand_misplaced_variables(self, command: str, args: list[str]) -> list[str]:
        """Write out paths where no variable may stand, so that the admin confirms them.

        Any other value there is rejected; a missing one is checked once it is known.
        """

        def expand(match: re.Match[str]) -> str:
            value = self.bindings.used.get(match[1])
            if value is None:
                return match[0]
            if match[0] in self.extracted:
                raise EntryError(
                    "An argument contains a plaintext secret, and is not the value of an option.",
                    "Pass the secret in env, or as the value of an option such as --token.",
                    "bad_argv",
                )
            if not _PATH_VALUE.fullmatch(value) or plaintext_secrets.looks_like_secret(value):
                raise misplaced_variable(match[0])
            return value

        args = list(args)
        for position in find_misplaced_variables([command, *args]):
            if position > 0:
                args[position - 1] = PLACEHOLDER.sub(expand, args[position - 1])
        remaining = {name for arg in args for name in PLACEHOLDER.findall(arg)}
        for name in self.bindings.used.keys() - remaining:
            del self.bindings.used[name]
        return args

    def parse_args(self) -> list[str]:
        value = self.entry.get("args")
        if value is None:
            return []
        if not isinstance(value, list):
            raise EntryError(
                "args must be a list of strings.", 'Example: ["--port", "80"].', "bad_type"
            )
        return [self.to_string(item, f"Argument {number}") for number, item in enumerate(value, 1)]

    def expand_path(self, field: str) -> str:
        """Return a path with its variables expanded, so that the admin confirms the real path."""

        def expand(reference: Reference) -> str:
            value = self.bindings.resolve(reference)
            if value is None:
                return format_reference(reference.name)
            if value != self.bindings.defaults.get(reference.name) and not (
                _PATH_VALUE.fullmatch(value) and not plaintext_secrets.looks_like_secret(value)
            ):
                raise EntryError(
                    f"{field} uses {reference.name}, whose value is not an absolute path.",
                    f"Write the {field} out in full.",
                    "bad_argv",
                )
            return value

        return self.bindings.references.replace(self.get_string(field), expand)

    def parse_url(self) -> str:
        field = next(f for f in _URL_FIELDS if self.get_string(f).strip())
        text = self.get_string(field).strip()

        def expand_base(reference: Reference) -> str:
            value = self.bindings.resolve(reference)
            if value is None:
                raise EntryError(
                    f"The URL starts with the variable {reference.name}, which has no value.",
                    f"Provide a value for {reference.name}, or write the URL out.",
                    "missing_variable",
                )
            # Expand only a value that is a URL itself. Any other value may be a secret.
            if not re.match(r"https?://", value):
                raise EntryError(
                    f"The URL starts with {reference.name}, whose value is not a URL.",
                    "Write the URL out.",
                    "bad_url",
                )
            return value.rstrip("/")

        if base := re.match(r"\$\{[^{}]*\}", text):
            text = self.bindings.references.replace(base[0], expand_base) + text[base.end() :]
        url = check_url(self.bindings.normalize(text), allow_http=self.allow_http)
        self.warnings += url_warnings(url)
        return plaintext_secrets.extract_from_url(url, self.extract)

    def parse_env(self) -> dict[str, Secret]:
        values = {}
        for name, text in self.parse_pairs("env"):
            value = self.bindings.expand(text)
            check_env(name, value)
            values[name] = Secret(value)
            self.count_literal_secret(name, text)
        return values

    def parse_headers(self) -> dict[str, Secret]:
        values: dict[str, Secret] = {}
        for name, text in self.parse_pairs("headers"):
            if name.lower() in TRANSPORT_HEADERS:
                self.warnings.append(f"Skipped header {name}: the transport sets it.")
                continue
            value = self.bindings.expand(text).strip(" \t")
            check_header(name, value)
            if name.lower() in map(str.lower, values):
                raise EntryError(f"Duplicate header {name}.", "Keep one of them.", "bad_header")
            values[name] = Secret(value)
            self.count_literal_secret(name, text)
        return values

    def parse_pairs(self, field: str) -> list[tuple[str, str]]:
        value = self.entry.get(field)
        if value is None:
            return []
        if not isinstance(value, JsonMap):
            raise EntryError(
                f"{field} must be an object with string values.",
                'Example: {"NAME": "value"}.',
                "bad_type",
            )
        if len(value) > MAX_PAIRS:
            raise EntryError(
                f"{field} has more than {MAX_PAIRS} names.", "Remove some.", "too_many"
            )
        return [
            (n, self.to_string(v, f"{field} {escape_ambiguous(n[:60])}")) for n, v in value.items()
        ]

    def to_string(self, value: object, label: str) -> str:
        if isinstance(value, str):
            return value
        if isinstance(value, bool | int | float):
            self.warnings.append(f"{label} is not a string; it was converted to one.")
            return str(value).lower() if isinstance(value, bool) else str(value)
        raise EntryError(f"{label} must be a string.", "Correct it.", "bad_type")

    def ignore(self, field: str) -> dict[str, Secret]:
        if self.entry.get(field):
            self.warnings.append(f"Skipped {field}: this transport does not use it.")
        return {}

    def is_disabled(self) -> bool:
        for field in ("disabled", "enabled", "isActive"):
            if not isinstance(self.entry.get(field, False), bool):
                raise EntryError(f"{field} must be true or false.", "Correct it.", "bad_type")
        return (
            self.entry.get("disabled") is True
            or self.entry.get("enabled") is False
            or self.entry.get("isActive") is False
        )

    def extract(self, label: str, secret: str) -> str:
        """Store a plaintext secret as a variable, and return the reference that replaces it."""
        if len(self.extracted) >= MAX_EXTRACTED_SECRETS:
            raise EntryError(
                f"The entry has more than {MAX_EXTRACTED_SECRETS} plaintext secrets.",
                "Move them to env.",
                "too_many",
            )
        name = re.sub(r"[^A-Z0-9]+", "_", f"{self.slug}_{label}".upper()).strip("_")
        reference = self.bindings.extract(name, secret)
        self.extracted.append(reference)
        self.warnings.append(f"Plaintext secret found. It will be stored encrypted as {reference}.")
        return reference

    def count_literal_secret(self, name: str, text: str) -> None:
        literal = re.sub(r"\$\{[^{}]*\}|^(?:Bearer|Basic|Token) ", "", text, flags=re.IGNORECASE)
        is_secret = plaintext_secrets.is_secret_name(name) or plaintext_secrets.looks_like_secret(
            literal
        )
        self.literal_secrets += bool(literal.strip() and is_secret)

    def check_variables(self, transport: str) -> None:
        invalid = r"\x00" if transport == "stdio" else r"[\x00-\x20\x7f]"
        for name, value in self.bindings.used.items():
            if re.search(invalid, value):
                raise EntryError(
                    f"The value of {name} contains a space, a line break or a control character.",
                    "Correct the value.",
                    "bad_variable",
                )

    def collect_unknown_fields(self) -> dict[str, object]:
        single = "name" in self.entry or "inputs" in self.entry
        known = _KNOWN_FIELDS | (_SINGLE_ONLY_FIELDS if single else frozenset[str]())
        unknown = {key: value for key, value in self.entry.items() if key not in known}
        if "envFile" in unknown:
            self.warnings.append("envFile is not supported. Enter its variables instead.")
        if unknown:
            names = ", ".join(escape_ambiguous(name[:40]) for name in list(unknown)[:10])
            self.warnings.append(f"Unknown fields, stored but not used: {names}.")
        if len(json.dumps(unknown)) > MAX_UNKNOWN_BYTES:
            self.warnings.append("The unknown fields exceed 16 KB and were dropped.")
            return {}
        return {_without_nul(key): self.redact(key, value) for key, value in unknown.items()}

    def redact(self, name: str, value: object, *, all_secret: bool = False) -> object:
        """Copy an unknown field without its secrets. `all_secret`: below headers or the like."""
        all_secret = all_secret or name.lower() in SECRET_CONTAINERS
        if isinstance(value, dict):
            return {
                _without_nul(key): self.redact(key, item, all_secret=all_secret)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self.redact(name, item, all_secret=all_secret) for item in value]
        if not isinstance(value, str):
            return value
        is_secret = all_secret or plaintext_secrets.is_secret_name(name)
        is_secret = is_secret and not re.fullmatch(r"\$\{.*\}", value)
        if value and (is_secret or plaintext_secrets.looks_like_secret(value) or "://" in value):
            if is_secret:
                redacted = MASK
            else:
                [redacted] = plaintext_secrets.extract_from_args([value], lambda *_: MASK)
            if redacted != value:
                self.warnings.append(
                    f"{escape_ambiguous(name[:40])} contained a secret, which was dropped."
                )
            return _without_nul(redacted)
        return _without_nul(value)


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)


def _without_nul(text: str) -> str:
    return text.replace("\x00", "")
