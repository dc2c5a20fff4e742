"""Find secrets that stand in plain text in arguments and addresses, and move them out.

Pure. A guess by names and shapes: it errs on the side of moving, since a value that is moved still
reaches the server, while one that is missed would be stored and shown in the clear.
"""

import itertools
import math
import re
from collections.abc import Callable
from urllib.parse import unquote

# Told by the text itself, whatever its name.
_TOKEN = re.compile(
    r"(?<![\w-])(?:"
    r"gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{16,}|"
    r"xox[abeoprs]-[\w-]{10,}|xapp-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|"
    r"ya29\.[\w-]{20,}|hf_[A-Za-z0-9]{20,}|npm_[A-Za-z0-9]{20,}|pypi-[\w-]{20,}|"
    r"[rsp]k_(?:live|test)_[A-Za-z0-9]{16,}|SG\.[\w-]{16,}\.[\w-]{16,}|"
    r"(?:ntn|secret|figd|lin_api|tvly|fc|pat|dop_v1|shpat|tcb)[_-][A-Za-z0-9]{24,}[\w-]*|"
    r"eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]*)"
)
_STRONG = frozenset([
    "token", "secret", "password", "passwd", "pwd", "passphrase", "apikey", "accesskey",
    "credential", "credentials", "pat", "bearer", "authorization", "authtoken", "jwt",
    "apitoken", "accesstoken", "clientsecret", "secretkey", "sig", "signature",
])  # fmt: skip
_WEAK = frozenset(["key", "auth", "code", "pass"])
_HARMLESS = frozenset([
    "file", "path", "dir", "limit", "max", "min", "count", "length", "size", "name", "id", "env",
    "var", "url", "uri", "type", "public", "budget", "window", "store", "provider", "prefix",
])  # fmt: skip
_HEADER = re.compile(
    r"(?P<before>(?P<name>[A-Za-z][\w-]*)\s*:\s*(?:(?:Bearer|Basic|Token|ApiKey)\s+)?)(?P<value>\S.*)",
    re.IGNORECASE,
)
_USERINFO = re.compile(r"(?<=://)(?P<user>[^\s/?#@:]*):(?P<value>[^\s/?#]*)(?=@)")
_REFERENCE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")
_PATH = re.compile(r"(?:[~.]{0,2}/|[A-Za-z]:\\)[^\s]*")

Move = Callable[[str, str], str]  # (wanted name, secret) -> the ${NAME} to write instead


def is_secret_name(name: str) -> bool:
    """Say whether an option, header, parameter or variable of this name holds a secret."""
    return _strength(name) > 0


def looks_like_secret(text: str) -> bool:
    return bool(_TOKEN.search(text))


def _strength(name: str) -> int:
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name[:200])
    words = [word for word in re.split(r"[^a-z]+", spaced.lower()) if word]
    if not words or _HARMLESS.intersection(words):
        return 0
    pairs = {first + second for first, second in itertools.pairwise(words)}
    if _STRONG.intersection(words) or _STRONG.intersection(pairs):
        return 2
    return 1 if _WEAK.intersection(words) else 0


def _is_secret_value(strength: int, value: str) -> bool:
    if not strength or not value.strip() or _REFERENCE.search(value):
        return False
    if strength == 1:  # a key may be a file, a mode, a column: ask for more than the name
        return not _PATH.fullmatch(value) and len(value) >= 8
    return value.lower() not in ("true", "false", "none", "null")


def out_of_args(args: list[str], move: Move) -> list[str]:
    """Return the arguments with `${NAME}` in place of each secret found."""
    result: list[str] = []
    option = ""
    for arg in args:
        if option and not arg.startswith("-") and _is_secret_value(_strength(option), arg):
            result.append(move(option, arg))
        else:
            result.append(_out_of_arg(arg, move))
        option = arg if re.fullmatch(r"--?[A-Za-z][\w.-]*", arg) else ""
    return result


def _out_of_arg(arg: str, move: Move, *, nested: int = 0) -> str:
    name, equals, value = arg.partition("=")
    if equals and nested < 4 and re.fullmatch(r"-{0,2}[A-Za-z_][\w.-]*", name):
        if _is_secret_value(_strength(name), value):
            return f"{name}={move(name, value)}"
        return f"{name}={_out_of_arg(value, move, nested=nested + 1)}"
    header = _HEADER.fullmatch(arg)
    if header and "://" not in arg and _is_secret_value(_strength(header["name"]), header["value"]):
        return header["before"] + move(header["name"], header["value"])
    if "://" in arg:
        arg = _USERINFO.sub(lambda found: f"{found['user']}:{_kept(found, move)}", arg)
        arg = out_of_url(arg, move)
    return _TOKEN.sub(lambda found: move("TOKEN", found[0]), arg)


def _kept(found: re.Match[str], move: Move) -> str:
    value = found["value"]
    return value if not value or _REFERENCE.search(value) else move("PASSWORD", value)


def out_of_url(url: str, move: Move) -> str:
    """Return the address with `${NAME}` in place of each secret in its path and query."""
    address, question, query = url.partition("?")
    parts = re.split(r"(?<=[^/:])/", address)
    parts[1:] = [_out_of_segment(part, move) for part in parts[1:]]
    if not question:
        return "/".join(parts)
    pairs = [_out_of_pair(pair, move) for pair in re.split(r"([&;])", query)]
    return "/".join(parts) + "?" + "".join(pairs)


def _out_of_segment(segment: str, move: Move) -> str:
    if "${" not in segment and len(segment) >= 24 and _is_random(segment):
        return move("URL_KEY", segment)
    return _TOKEN.sub(lambda found: move("URL_TOKEN", found[0]), segment)


def _out_of_pair(pair: str, move: Move) -> str:
    name, equals, value = pair.partition("=")
    strength = _strength(unquote(name))
    if equals and _is_secret_value(2 if strength else 0, value):
        return f"{name}={move(name, value)}"
    return _TOKEN.sub(lambda found: move("TOKEN", found[0]), pair)


def _is_random(text: str) -> bool:
    """Say whether the text is drawn by lot rather than written: digits, letters, no words."""
    if not re.fullmatch(r"[\w=+.~-]+", text) or not re.search(r"\d", text):
        return False
    shares = [text.count(c) / len(text) for c in set(text)]
    entropy = -sum(share * math.log2(share) for share in shares)
    longest_word = max(map(len, re.findall(r"[A-Za-z]+", text)), default=0)
    mixed = text != text.lower() and text != text.upper()
    return entropy > 3 and len(re.findall(r"\d", text)) >= 3 and (mixed or longest_word < 10)
