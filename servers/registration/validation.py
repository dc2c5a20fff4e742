"""Validation of server connections: URLs, command lines, environment variables, headers.

Pure: no Django, no network, no files. Errors are `Invalid` with a message and a hint, and never
repeat a value. Whether an address may be connected to (SSRF) is checked when connecting.
"""

import hashlib
import ipaddress
import json
import re
import shlex
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import NoReturn
from urllib.parse import quote

from servers.transports.ssrf import NON_HTTP_PORTS
from toolcrib.lib.errors import Invalid
from toolcrib.lib.text import escape_ambiguous, is_hidden

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


bad_env = partial(Invalid, code="bad_env")
bad_header = partial(Invalid, code="bad_header")
bad_argv = partial(Invalid, code="bad_argv")


def _bad_url(message: str, hint: str) -> NoReturn:
    raise Invalid(message, hint=hint, code="bad_url")


def check_url(url: str, *, allow_http: bool) -> str:
    """Return the normalized URL, with the host in Punycode and each `${NAME}` unchanged."""
    url = url.strip(" \t\r\n")
    _check_characters(url)
    scheme, authority, rest = _split(url)
    if scheme not in ("http", "https"):
        _bad_url(
            f"The scheme {escape_ambiguous(scheme[:20])} is not supported.",
            "Use a URL that starts with https://.",
        )
    if scheme == "http" and not allow_http:
        _bad_url(
            "Plain HTTP would send credentials and results unencrypted.",
            "Use https, or set TOOLCRIB_ALLOW_PLAIN_HTTP=1 where Toolcrib is started.",
        )
    host, port = _host_and_port(authority)
    suffix = "" if port in (None, 443 if scheme == "https" else 80) else f":{port}"
    # Encode only non-ASCII characters; existing percent-encoding stays as entered.
    return f"{scheme}://{host}{suffix}{quote(rest, safe=_ASCII)}"


def url_warnings(url: str) -> list[str]:
    try:
        scheme, authority, _ = _split(url.strip(" \t\r\n"))
        host, _ = _host_and_port(authority)
    except Invalid:
        return []
    warnings = []
    if any(label.startswith("xn--") for label in host.split(".")):
        warnings.append(
            f"The host in Punycode is {host}. Characters of other scripts can look like Latin "
            "letters: check that this is the intended host."
        )
    if scheme == "http" and host not in ("localhost", "127.0.0.1", "[::1]"):
        warnings.append("Plain HTTP: anyone on the network path can read credentials and results.")
    return warnings


def _check_characters(url: str) -> None:
    if len(url) > MAX_URL:
        _bad_url(f"The URL is longer than {MAX_URL:,} characters.", "Shorten it.")
    if any(c.isspace() or is_hidden(c) for c in url):
        _bad_url(
            "The URL contains a space, a control character or an invisible character.",
            "Remove it, or type the URL by hand.",
        )
    if "\\" in url:
        _bad_url("The URL contains a backslash.", "Use / to separate path segments.")
    if _ENCODED_CONTROL.search(url):
        _bad_url("The URL contains an encoded control character such as %00.", "Remove it.")
    if "#" in url:
        _bad_url("The URL contains a fragment (#), which is never sent.", "Remove the fragment.")


def _split(url: str) -> tuple[str, str, str]:
    """Split into scheme, authority and the rest. Raises Invalid."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):(//)?", url)
    if not match or (not match[2] and re.match(r"\d", url[match.end() :])):
        _bad_url("The URL has no scheme.", "Start it with https://.")
    scheme = match[1].lower()
    if not match[2]:
        _bad_url(
            f"{scheme}: is not followed by // and a host.", "Example: https://example.com/mcp."
        )
    authority, rest = re.fullmatch(r"([^/?]*)(.*)", url[match.end() :], re.DOTALL).groups()  # type: ignore[union-attr]  # matches any text
    return scheme, authority, rest


def _host_and_port(authority: str) -> tuple[str, int | None]:
    if "@" in authority:
        _bad_url(
            "The URL contains a user name or password.",
            "Remove everything before @, and send the credentials in a header.",
        )
    if "${" in authority:
        _bad_url(
            "The host or port contains a variable.",
            "Write both out; the path and the query may contain variables.",
        )
    match = re.fullmatch(r"(\[[^\]]*\]|[^:\[\]]*)(?::(.*))?", authority)
    if not match:
        _bad_url("The host is invalid.", "Write an IPv6 address in brackets: [::1].")
    return _host(match[1]), _port(match[2])


def _port(text: str | None) -> int | None:
    if not text:
        return None
    port = int(text) if re.fullmatch(r"[0-9]{1,5}", text) else 0
    if not 1 <= port <= 65535:
        _bad_url("The port must be a number from 1 to 65535.", "Correct the port, or omit it.")
    if port in NON_HTTP_PORTS:
        _bad_url(
            f"Port {port} is the port of {NON_HTTP_PORTS[port]}, which does not support MCP.",
            "Use the port of the MCP server.",
        )
    return port


def _host(text: str) -> str:
    if not text:
        _bad_url("The URL has no host.", "Example: https://example.com/mcp.")
    if text.startswith("["):
        try:
            # Reject a zone id (%eth0): it depends on the machine.
            return f"[{ipaddress.IPv6Address(text[1:-1].replace('%', '?')).compressed}]"
        except ValueError:
            _bad_url("The IPv6 address is invalid.", "Example: [2001:db8::1].")
    try:
        host = text.encode("idna").decode("ascii").lower() if len(text) <= 253 else ""
    except UnicodeError:
        host = ""
    if host.endswith(".") or text.endswith("."):
        _bad_url("The host ends with a dot.", "Remove the dot.")
    labels = host.split(".")
    if not all(map(_LABEL.fullmatch, labels)):
        _bad_url("The host is not a valid host name.", "Check its spelling.")
    if re.fullmatch(r"[0-9]+|0x[0-9a-f]*", labels[-1]):
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError:
            _bad_url(
                "The IPv4 address is not in dotted-decimal form.",
                "Write it as four numbers. Example: 192.0.2.7.",
            )
    return host


# Reasons, and the names that they apply to; * stands for any ending.
_ENV_DENIED = {
    "It changes which program or library a name resolves to.": (
        "PATH PATHEXT COMSPEC SHELL PYTHONPATH PYTHONHOME PYTHONEXECUTABLE PYTHONUSERBASE "
        "PYTHONPLATLIBDIR PYTHONPYCACHEPREFIX NODE_PATH PERL5LIB PERLLIB RUBYLIB GEM_HOME GEM_PATH "
        "CLASSPATH JAVA_HOME LOCPATH LUA_PATH* LUA_CPATH* R_LIBS* R_HOME JULIA_LOAD_PATH "
        "JULIA_DEPOT_PATH JULIA_PROJECT GUILE_LOAD_* TCLLIBPATH GOROOT GOPATH VIRTUAL_ENV CONDA_*"
    ),
    "It changes which configuration files programs read, and these can name code to run.": (
        "HOME USERPROFILE APPDATA XDG_CONFIG_HOME XDG_CONFIG_DIRS XDG_DATA_HOME XDG_DATA_DIRS "
        "NETRC CURL_HOME WGETRC INPUTRC DOCKER_CONFIG"
    ),
    "It changes where package runners download code from, or how they run it.": (
        "NPM_CONFIG_* PNPM_* YARN_* COREPACK_* UV_* PIP_* PIPX_* POETRY_* RUBYGEMS_* BUNDLE_* "
        "BUNDLER_* CARGO_* RUSTUP_* RUSTC* GOFLAGS GOPROXY GOENV GOTOOLCHAIN GONOSUMDB GOPRIVATE "
        "DENO_DIR DENO_INSTALL* DENO_TLS_CA_STORE JSR_URL NPM_REGISTRY*"
    ),
    "It can make shells run code that was not confirmed.": (
        "IFS ENV BASH_ENV ZDOTDIR PS4 SHELLOPTS BASHOPTS PROMPT_COMMAND BASH_FUNC_*"
    ),
    "It can load code that was not confirmed.": (
        "PYTHONSTARTUP PYTHONINSPECT PYTHONBREAKPOINT PYTHONWARNINGS NODE_OPTIONS "
        "NODE_REPL_EXTERNAL_MODULE ELECTRON_RUN_AS_NODE BUN_* PERL5OPT PERL5DB PERL5SHELL RUBYOPT "
        "LUA_INIT* PHPRC PHP_INI_SCAN_DIR JAVA_TOOL_OPTIONS JAVA_OPTS _JAVA_OPTIONS "
        "JDK_JAVA_OPTIONS MAVEN_OPTS GRADLE_OPTS DOTNET_* COMPLUS_* COR_* CORECLR_* ERL_* "
        "ELIXIR_ERL_OPTIONS R_PROFILE* R_ENVIRON* GCONV_PATH GLIBC_TUNABLES OPENSSL_CONF* "
        "OPENSSL_MODULES OPENSSL_ENGINES"
    ),
    "It can make programs run another program.": (
        "EDITOR VISUAL PAGER MANPAGER BROWSER LESSOPEN LESSCLOSE SSH_ASKPASS* SUDO_ASKPASS "
        "RSYNC_RSH CVS_RSH"
    ),
    "It changes host name resolution.": "HOSTALIASES RES_OPTIONS",
    "It writes TLS session keys to a file.": "SSLKEYLOGFILE",
    "It can inject code through the dynamic linker.": "LD_* DYLD_*",
    "It can make git run another program.": "GIT_*",
    "It is a Toolcrib setting.": "TOOLCRIB_*",
}
_DENIED_NAMES = {name: reason for reason, names in _ENV_DENIED.items() for name in names.split()}
# Names that a pattern above includes, and that run and load nothing.
_ENV_HARMLESS = frozenset(
    [
        "NPM_CONFIG_LOGLEVEL",
        "NPM_CONFIG_YES",
        "NPM_CONFIG_UPDATE_NOTIFIER",
        "NPM_CONFIG_FUND",
        "NPM_CONFIG_OFFLINE",
        "NPM_CONFIG_PREFER_OFFLINE",
        "UV_OFFLINE",
        "UV_NO_PROGRESS",
        "UV_HTTP_TIMEOUT",
        "UV_NO_CACHE",
        "PIP_NO_INPUT",
        "PIP_DISABLE_PIP_VERSION_CHECK",
        "GIT_AUTHOR_NAME",
        "GIT_AUTHOR_EMAIL",
        "GIT_COMMITTER_NAME",
        "GIT_COMMITTER_EMAIL",
        "GIT_TERMINAL_PROMPT",
        "GIT_TOKEN",
        "GIT_USERNAME",
        "GIT_PASSWORD",
        "DOTNET_ENVIRONMENT",
        "DOTNET_NOLOGO",
        "DOTNET_CLI_TELEMETRY_OPTOUT",
        "DOTNET_SYSTEM_GLOBALIZATION_INVARIANT",
    ]
)
_PEM_LINE = r"(?!-----)[A-Za-z0-9+/=:,. -]*\r?\n"
_PEM = re.compile(rf"\s*(?:-----BEGIN ([A-Z0-9 ]+)-----\r?\n(?:{_PEM_LINE})+-----END \1-----\s*)+")


def env_denial(name: str) -> str:
    """Return why an environment variable must not be set, or an empty string."""
    name = name.upper()  # npm reads its settings in either case
    if name in _ENV_HARMLESS:
        return ""
    return next((why for denied, why in _DENIED_NAMES.items() if fnmatchcase(name, denied)), "")


def check_env(name: str, value: str) -> None:
    """Reject an environment variable that is invalid or could run code."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or len(name) > MAX_NAME:
        raise bad_env(
            f"{_quote_name(name)} is not a valid environment variable name.",
            hint="Use letters, digits and underscores; the first character is not a digit.",
        )
    if reason := env_denial(name):
        hint = (
            "Remove it. Use an absolute path as the command, and write options such as a package "
            "index in the arguments, where they are confirmed."
        )
        raise bad_env(f"{name} must not be set. {reason}", hint=hint)
    if len(value.encode(errors="replace")) > MAX_VALUE_BYTES:
        raise bad_env(f"The value of {name} exceeds 32 KB.", hint="Shorten it.")
    if "\x00" in value:
        raise bad_env(f"The value of {name} contains a NUL character.", hint="Remove it.")
    if _CONTROL.search(value.replace("\t", "")) and not _PEM.fullmatch(value):
        raise bad_env(
            f"The value of {name} contains a line break or a control character.",
            hint="Use a single line. Only PEM blocks (keys, certificates) can have several lines.",
        )


# Set by the transport itself. An import skips them with a warning.
TRANSPORT_HEADERS = frozenset(("accept", "accept-encoding", "content-type", "content-length"))
_HEADERS_DENIED = TRANSPORT_HEADERS | frozenset([
    "host", "transfer-encoding", "connection", "keep-alive", "te", "trailer", "upgrade", "expect",
    "content-encoding", "cookie", "set-cookie", "http2-settings", "last-event-id",
])  # fmt: skip
_HEADERS_DENIED_PREFIXES = ("mcp-", "proxy-", "sec-")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def check_header(name: str, value: str) -> None:
    """Reject a header that is invalid or that the transport sets."""
    if not _TOKEN.fullmatch(name) or len(name) > MAX_NAME:
        raise bad_header(
            f"{_quote_name(name)} is not a valid header name.",
            hint="Use letters, digits and hyphens. Example: X-Api-Key.",
        )
    if name.lower() in _HEADERS_DENIED or name.lower().startswith(_HEADERS_DENIED_PREFIXES):
        raise bad_header(
            f"The header {name} must not be set: it is reserved for the transport.",
            hint="Remove it. Send credentials in Authorization or a header such as X-Api-Key.",
        )
    if _CONTROL.search(value.replace("\t", "")):
        raise bad_header(
            f"The value of {name} contains a line break or a control character.",
            hint="Use a single line.",
        )
    if not value.isascii() or value != value.strip():
        raise bad_header(
            f"The value of {name} has leading or trailing spaces or non-ASCII characters.",
            hint="Remove these characters.",
        )
    if len(value) > MAX_VALUE_BYTES:
        raise bad_header(f"The value of {name} exceeds 32 KB.", hint="Shorten it.")


def check_argv(argv: Sequence[str], cwd: str) -> None:
    """Reject a command line that cannot be started or cannot be shown on one line."""
    if not argv or not argv[0].strip():
        raise bad_argv("The command is empty.", hint="Enter the program to run.")
    if any("\x00" in text for text in (*argv, cwd)):
        raise bad_argv("The command line contains a NUL character.", hint="Remove it.")
    if _CONTROL.search(argv[0]) or _CONTROL.search(cwd):
        raise bad_argv(
            "The command or working directory contains a line break or a control character.",
            hint="Enter only the program as the command, and each argument separately.",
        )
    if len(argv[0]) > MAX_COMMAND or len(cwd) > MAX_COMMAND:
        raise bad_argv(
            f"The command or working directory is longer than {MAX_COMMAND:,} characters.",
            hint="Use a shorter path.",
        )
    if cwd and not cwd.startswith("/"):
        raise bad_argv(
            "The working directory is not an absolute path.",
            hint="Start it with /, or leave it empty.",
        )
    if sum(len(arg.encode(errors="replace")) + 1 for arg in argv) > MAX_ARGV_BYTES:
        raise bad_argv("The command line exceeds 32 KB.", hint="Move long values to a file.")


def argv_digest(argv: Sequence[str], cwd: str) -> str:
    """Return the digest that an admin's confirmation of this exact command line is bound to."""
    document = json.dumps({"argv": list(argv), "cwd": cwd}, sort_keys=True)
    return hashlib.sha256(document.encode("ascii")).hexdigest()


def format_argv(argv: Sequence[str]) -> str:
    """Format the command line as one shell-quoted line, with invisible characters escaped."""
    return " ".join(escape_ambiguous(shlex.quote(arg)) for arg in argv)


def _quote_name(name: str) -> str:
    return f"“{escape_ambiguous(name[:40])}”" if name else "The empty string"
