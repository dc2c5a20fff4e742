"""Rules for what an admin may enter to reach a server: addresses, programs, values.

Pure: no Django, no network, no file. A refusal is `Invalid` with a sentence and a way out, and
never repeats a value. Whether an address may be reached is decided when connecting, not here.
"""

import hashlib
import ipaddress
import json
import re
import shlex
from collections.abc import Sequence
from typing import NoReturn
from urllib.parse import quote

from servers.registration.argv_warnings import argv_warnings
from servers.transports.ssrf import OTHER_PORTS
from toolcrib.lib.errors import Invalid
from toolcrib.lib.text import escape_ambiguous, is_hidden

__all__ = [
    "OWN_HEADERS",
    "PLACEHOLDER",
    "argv_digest",
    "argv_warnings",
    "check_argv",
    "check_env",
    "check_header",
    "check_url",
    "escape_ambiguous",
    "format_argv",
    "url_warnings",
]

MAX_URL = 2000
MAX_COMMAND = 1000
MAX_ARGV_BYTES = 32 * 1024
MAX_VALUE_BYTES = 32 * 1024
MAX_NAME = 200

PLACEHOLDER = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_ENCODED_CONTROL = re.compile(r"%(?:[01][0-9a-f]|7f)", re.IGNORECASE)
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_ASCII = "".join(map(chr, range(33, 127)))


def _bad_url(message: str, hint: str) -> NoReturn:
    raise Invalid(message, hint=hint, code="bad_url")


def check_url(url: str, *, allow_http: bool) -> str:
    """Return the address in its normal form, the host as punycode, `${NAME}` left as it is."""
    url = url.strip(" \t\r\n")
    _refuse_odd_characters(url)
    scheme, authority, rest = _split(url)
    if scheme not in ("http", "https"):
        _bad_url(
            f"{escape_ambiguous(scheme[:20])}: is not an address of an MCP server.",
            "Use an address that begins with https://.",
        )
    if scheme == "http" and not allow_http:
        _bad_url(
            "Plain http would send credentials and results unencrypted.",
            "Use https, or let an operator allow http for this installation.",
        )
    host, port = _host_and_port(authority)
    suffix = "" if port in (None, 443 if scheme == "https" else 80) else f":{port}"
    # Only what is not ASCII is encoded; what the admin encoded already stays as entered.
    return f"{scheme}://{host}{suffix}{quote(rest, safe=_ASCII)}"


def url_warnings(url: str) -> list[str]:
    """Say what to look at twice in an address that `check_url` lets pass."""
    try:
        scheme, authority, _ = _split(url.strip(" \t\r\n"))
        host, _ = _host_and_port(authority)
    except Invalid:
        return []
    warnings = []
    if any(label.startswith("xn--") for label in host.split(".")):
        warnings.append(
            f"The host is {host} when written in plain letters. Characters of other scripts can "
            "look like familiar ones: check that this is the host you mean."
        )
    if scheme == "http" and host not in ("localhost", "127.0.0.1", "[::1]"):
        warnings.append("Plain http: anyone on the way can read credentials and results.")
    return warnings


def _refuse_odd_characters(url: str) -> None:
    if len(url) > MAX_URL:
        _bad_url(f"The address is longer than {MAX_URL:,} characters.", "Shorten it.")
    if any(c.isspace() or is_hidden(c) for c in url):
        _bad_url(
            "The address holds a space, a control character or an invisible one.",
            "Remove it, or type the address by hand.",
        )
    if "\\" in url:
        _bad_url("The address holds a backslash.", "Use / between the parts of the path.")
    if _ENCODED_CONTROL.search(url):
        _bad_url("The address holds an encoded control character such as %00.", "Remove it.")
    if "#" in url:
        _bad_url("The part after # is never sent to a server.", "Remove # and what follows it.")


def _split(url: str) -> tuple[str, str, str]:
    """Split into scheme, authority and the rest, or refuse."""
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):(//)?", url)
    if not found or (not found[2] and re.match(r"\d", url[found.end() :])):
        _bad_url("The address does not say how to connect.", "Begin it with https://.")
    scheme = found[1].lower()
    if not found[2]:
        _bad_url(
            f"{scheme}: is not followed by // and a host.", "Write it like https://example.com/mcp."
        )
    authority, rest = re.fullmatch(r"([^/?]*)(.*)", url[found.end() :], re.DOTALL).groups()  # type: ignore[union-attr]  # matches any text
    return scheme, authority, rest


def _host_and_port(authority: str) -> tuple[str, int | None]:
    if "@" in authority:
        _bad_url(
            "The address holds a user name or password.",
            "Remove everything before @ and enter it as a header instead.",
        )
    if "${" in authority:
        _bad_url(
            "A variable stands in the host or port.",
            "Write host and port out; variables may stand in the path and the query.",
        )
    found = re.fullmatch(r"(\[[^\]]*\]|[^:\[\]]*)(?::(.*))?", authority)
    if not found:
        _bad_url("The host cannot be read.", "Write an IPv6 address in brackets: [::1].")
    return _host(found[1]), _port(found[2])


def _port(text: str | None) -> int | None:
    if not text:
        return None
    port = int(text) if re.fullmatch(r"[0-9]{1,5}", text) else 0
    if not 1 <= port <= 65535:
        _bad_url("The port is not a number from 1 to 65535.", "Correct the port, or leave it out.")
    if port in OTHER_PORTS:
        _bad_url(
            f"Port {port} belongs to {OTHER_PORTS[port]}, which does not speak MCP.",
            "Use the port of the MCP server.",
        )
    return port


def _host(text: str) -> str:
    if not text:
        _bad_url("The address names no host.", "Write it like https://example.com/mcp.")
    if text.startswith("["):
        try:
            # A zone (%eth0) is refused: it means another network on each machine.
            return f"[{ipaddress.IPv6Address(text[1:-1].replace('%', '?')).compressed}]"
        except ValueError:
            _bad_url("The IPv6 address cannot be read.", "Write it like [2001:db8::1].")
    try:
        host = text.encode("idna").decode("ascii").lower() if len(text) <= 253 else ""
    except UnicodeError:
        host = ""
    if host.endswith(".") or text.endswith("."):
        _bad_url("The host ends in a dot.", "Remove the dot.")
    labels = host.split(".")
    if not all(map(_LABEL.fullmatch, labels)):
        _bad_url("The host is not a valid name.", "Check its spelling.")
    if re.fullmatch(r"[0-9]+|0x[0-9a-f]*", labels[-1]):
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError:
            _bad_url(
                "The host is a number in a form that hides which machine it is.",
                "Write an IPv4 address as four numbers, like 192.0.2.7.",
            )
    return host


_LOADER = "It makes a program load code that nobody confirmed."
_SHELL_START = "It makes shells run code that nobody confirmed."
_FINDS = "It decides which program or library is found under a name."
_GIT = "It makes git run another program."
_ENV_DENIED = {
    "PATH": _FINDS, "PATHEXT": _FINDS, "COMSPEC": _FINDS, "SHELL": _FINDS, "IFS": _SHELL_START,
    "ENV": _SHELL_START, "BASH_ENV": _SHELL_START, "ZDOTDIR": _SHELL_START, "PS4": _SHELL_START,
    "SHELLOPTS": _SHELL_START, "BASHOPTS": _SHELL_START, "PROMPT_COMMAND": _SHELL_START,
    "PYTHONSTARTUP": _LOADER, "PYTHONPATH": _FINDS, "PYTHONHOME": _FINDS,
    "PYTHONINSPECT": _LOADER, "PYTHONBREAKPOINT": _LOADER, "PYTHONWARNINGS": _LOADER,
    "PYTHONEXECUTABLE": _FINDS, "PYTHONUSERBASE": _FINDS, "PYTHONPLATLIBDIR": _FINDS,
    "NODE_OPTIONS": _LOADER, "NODE_PATH": _FINDS, "NPM_CONFIG_NODE_OPTIONS": _LOADER,
    "NPM_CONFIG_SCRIPT_SHELL": _FINDS, "ELECTRON_RUN_AS_NODE": _LOADER,
    "PERL5OPT": _LOADER, "PERL5LIB": _FINDS, "PERL5DB": _LOADER, "PERLLIB": _FINDS,
    "RUBYOPT": _LOADER, "RUBYLIB": _FINDS, "LUA_INIT": _LOADER, "PHPRC": _LOADER,
    "PHP_INI_SCAN_DIR": _LOADER, "JAVA_TOOL_OPTIONS": _LOADER, "_JAVA_OPTIONS": _LOADER,
    "JDK_JAVA_OPTIONS": _LOADER, "CLASSPATH": _FINDS, "DOTNET_STARTUP_HOOKS": _LOADER,
    "COR_PROFILER": _LOADER, "CORECLR_PROFILER": _LOADER, "GCONV_PATH": _LOADER,
    "GLIBC_TUNABLES": _LOADER, "LOCPATH": _FINDS, "HOSTALIASES": "It redirects host names.",
    "RES_OPTIONS": "It redirects host names.", "OPENSSL_CONF": _LOADER,
    "OPENSSL_MODULES": _LOADER, "OPENSSL_ENGINES": _LOADER,
    "SSLKEYLOGFILE": "It writes the keys of encrypted connections to a file.",
    "SSH_ASKPASS": "It makes ssh run another program.",
}  # fmt: skip
_ENV_DENIED_STARTS = {
    "LD_": "It makes the system's loader put other code into the program.",
    "DYLD_": "It makes the system's loader put other code into the program.",
    "GIT_SSH": _GIT, "GIT_ASKPASS": _GIT, "GIT_EXTERNAL_DIFF": _GIT, "GIT_CONFIG": _GIT,
    "GIT_PROXY_COMMAND": _GIT, "GIT_EXEC_PATH": _GIT, "GIT_EDITOR": _GIT, "GIT_PAGER": _GIT,
    "BASH_FUNC_": _SHELL_START, "TOOLCRIB_": "It is one of Toolcrib's own settings.",
}  # fmt: skip
_PEM_LINE = r"(?!-----)[A-Za-z0-9+/=:,. -]*\r?\n"
_PEM = re.compile(rf"\s*(?:-----BEGIN ([A-Z0-9 ]+)-----\r?\n(?:{_PEM_LINE})+-----END \1-----\s*)+")


def check_env(name: str, value: str) -> None:
    """Refuse an environment variable that could run code, or that no program can be given."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or len(name) > MAX_NAME:
        raise Invalid(
            f"{_named(name)} is not a name an environment variable can have.",
            hint="Use letters, digits and _, and do not begin with a digit.",
            code="bad_env",
        )
    upper = name.upper()
    starts = (why for start, why in _ENV_DENIED_STARTS.items() if upper.startswith(start))
    if why := _ENV_DENIED.get(upper) or next(starts, ""):
        hint = "Remove it. If a program is not found, give the command as a full path."
        raise Invalid(f"{name} may not be set. {why}", hint=hint, code="bad_env")
    if len(value.encode(errors="replace")) > MAX_VALUE_BYTES:
        raise Invalid(f"The value of {name} is over 32 KB.", hint="Shorten it.", code="bad_env")
    if "\x00" in value:
        raise Invalid(
            f"The value of {name} holds a NUL character.", hint="Enter it again.", code="bad_env"
        )
    if _CONTROL.search(value.replace("\t", "")) and not _PEM.fullmatch(value):
        raise Invalid(
            f"The value of {name} holds a line break or a control character.",
            hint="Put it on one line. Only PEM blocks (keys, certificates) may have several.",
            code="bad_env",
        )


# Written by the transport itself: harmless in a file, and left out with a warning on import.
OWN_HEADERS = frozenset(("accept", "accept-encoding", "content-type", "content-length"))
_HEADERS_DENIED = OWN_HEADERS | frozenset([
    "host", "transfer-encoding", "connection", "keep-alive", "te", "trailer", "upgrade", "expect",
    "content-encoding", "cookie", "set-cookie", "http2-settings", "last-event-id",
])  # fmt: skip
_HEADERS_DENIED_STARTS = ("mcp-", "proxy-", "sec-")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def check_header(name: str, value: str) -> None:
    """Refuse a header that would break the request, or that belongs to the transport."""
    if not _TOKEN.fullmatch(name) or len(name) > MAX_NAME:
        raise Invalid(
            f"{_named(name)} is not a name a header can have.",
            hint="Use letters, digits and -, as in X-Api-Key.",
            code="bad_header",
        )
    if name.lower() in _HEADERS_DENIED or name.lower().startswith(_HEADERS_DENIED_STARTS):
        raise Invalid(
            f"{name} may not be set: the connection sets it itself, or it never sends it.",
            hint="Remove it. Credentials go into Authorization or a header such as X-Api-Key.",
            code="bad_header",
        )
    if _CONTROL.search(value.replace("\t", "")):
        raise Invalid(
            f"The value of {name} holds a line break or a control character.",
            hint="Enter it again, on one line.",
            code="bad_header",
        )
    if not value.isascii() or value != value.strip():
        raise Invalid(
            f"The value of {name} begins or ends with a space, or is not plain ASCII.",
            hint="Enter it again; look for characters that were pasted along.",
            code="bad_header",
        )
    if len(value) > MAX_VALUE_BYTES:
        raise Invalid(f"The value of {name} is over 32 KB.", hint="Shorten it.", code="bad_header")


def check_argv(argv: Sequence[str], cwd: str) -> None:
    """Refuse a command line that cannot be started, or cannot be shown on one line."""
    if not argv or not argv[0].strip():
        raise Invalid("The command is empty.", hint="Name the program to run.", code="bad_argv")
    if any("\x00" in word for word in (*argv, cwd)):
        raise Invalid("The command line holds a NUL character.", hint="Remove it.", code="bad_argv")
    if _CONTROL.search(argv[0]) or _CONTROL.search(cwd):
        raise Invalid(
            "The command or its working folder holds a line break or a control character.",
            hint="Give the program alone as the command, and each argument on its own.",
            code="bad_argv",
        )
    if len(argv[0]) > MAX_COMMAND or len(cwd) > MAX_COMMAND:
        raise Invalid(
            f"The command or its working folder is longer than {MAX_COMMAND:,} characters.",
            hint="Use a shorter path.",
            code="bad_argv",
        )
    if cwd and not cwd.startswith("/"):
        raise Invalid(
            "The working folder is not a full path.",
            hint="Begin it with /, or leave it empty.",
            code="bad_argv",
        )
    if sum(len(word.encode(errors="replace")) + 1 for word in argv) > MAX_ARGV_BYTES:
        raise Invalid(
            "The command line is over 32 KB.", hint="Move long values to a file.", code="bad_argv"
        )


def argv_digest(argv: Sequence[str], cwd: str) -> str:
    """Name this exact command line: an admin's confirmation is bound to it."""
    exact = json.dumps({"argv": list(argv), "cwd": cwd}, sort_keys=True)
    return hashlib.sha256(exact.encode("ascii")).hexdigest()


def format_argv(argv: Sequence[str]) -> str:
    """Write the whole command line on one line, with nothing in it that cannot be seen."""
    return " ".join(escape_ambiguous(shlex.quote(word)) for word in argv)


def _named(name: str) -> str:
    return f"“{escape_ambiguous(name[:40])}”" if name else "An empty text"
