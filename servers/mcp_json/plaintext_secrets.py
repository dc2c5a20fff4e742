"""Detection and extraction of plaintext secrets in arguments and URLs.

Pure. A heuristic by name and format. It prefers false positives: an extracted value still reaches
the server, but a missed secret would be stored and shown unencrypted.
"""

import itertools
import math
import re
from collections.abc import Callable
from urllib.parse import unquote

# Token formats that are recognized whatever the name.
_TOKEN = re.compile(
    r"(?<![\w-])(?:"
    r"gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{16,}|"
    r"xox[abeoprs]-[\w-]{10,}|xapp-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|"
    r"ya29\.[\w-]{20,}|hf_[A-Za-z0-9]{20,}|npm_[A-Za-z0-9]{20,}|pypi-[\w-]{20,}|"
    r"[rsp]k_(?:live|test)_[A-Za-z0-9]{16,}|SG\.[\w-]{16,}\.[\w-]{16,}|"
    r"(?:ntn|secret|figd|lin_api|tvly|fc|pat|dop_v1|shpat|tcb)[_-][A-Za-z0-9]{24,}[\w-]*|"
    r"eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]*)"
)
_STRONG_NAMES = frozenset([
    "token", "secret", "password", "passwd", "pwd", "passphrase", "apikey", "accesskey",
    "credential", "credentials", "pat", "bearer", "authorization", "authtoken", "jwt",
    "apitoken", "accesstoken", "clientsecret", "secretkey", "sig", "signature",
])  # fmt: skip
_WEAK_NAMES = frozenset(["key", "auth", "code", "pass"])
_HARMLESS_NAMES = frozenset([
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

Extract = Callable[[str, str], str]  # (label, secret) -> the ${NAME} that replaces it


def is_secret_name(name: str) -> bool:
    """Return whether an option, header, parameter or variable with this name holds a secret."""
    return _strength(name) > 0


def looks_like_secret(text: str) -> bool:
    return bool(_TOKEN.search(text))


def _strength(name: str) -> int:
    """Return how surely a name means a secret: 0 no, 1 maybe, 2 yes."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name[:200])
    words = [word for word in re.split(r"[^a-z]+", spaced.lower()) if word]
    if not words or _HARMLESS_NAMES.intersection(words):
        return 0
    pairs = {first + second for first, second in itertools.pairwise(words)}
    if _STRONG_NAMES.intersection(words) or _STRONG_NAMES.intersection(pairs):
        return 2
    return 1 if _WEAK_NAMES.intersection(words) else 0


def _is_secret_value(strength: int, value: str) -> bool:
    if not strength or not value.strip() or _REFERENCE.search(value):
        return False
    if strength == 1:  # a key may also be a file, a mode or a column: check the value too
        return not _PATH.fullmatch(value) and len(value) >= 8
    return value.lower() not in ("true", "false", "none", "null")


def extract_from_args(args: list[str], extract: Extract) -> list[str]:
    result: list[str] = []
    option = ""
    for arg in args:
        if option and not arg.startswith("-") and _is_secret_value(_strength(option), arg):
            result.append(extract(option, arg))
        else:
            result.append(_extract_from_arg(arg, extract))
        option = arg if re.fullmatch(r"--?[A-Za-z][\w.-]*", arg) else ""
    return result


def _extract_from_arg(arg: str, extract: Extract, *, nested: int = 0) -> str:
    name, equals, value = arg.partition("=")
    if equals and nested < 4 and re.fullmatch(r"-{0,2}[A-Za-z_][\w.-]*", name):
        if _is_secret_value(_strength(name), value):
            return f"{name}={extract(name, value)}"
        return f"{name}={_extract_from_arg(value, extract, nested=nested + 1)}"
    header = _HEADER.fullmatch(arg)
    if header and "://" not in arg and _is_secret_value(_strength(header["name"]), header["value"]):
        return header["before"] + extract(header["name"], header["value"])
    if "://" in arg:
        arg = _USERINFO.sub(lambda match: _extract_password(match, extract), arg)
        arg = extract_from_url(arg, extract)
    return _TOKEN.sub(lambda match: extract("TOKEN", match[0]), arg)


def _extract_password(match: re.Match[str], extract: Extract) -> str:
    value = match["value"]
    if value and not _REFERENCE.search(value):
        value = extract("PASSWORD", value)
    return f"{match['user']}:{value}"


def extract_from_url(url: str, extract: Extract) -> str:
    base, question_mark, query = url.partition("?")
    segments = re.split(r"(?<=[^/:])/", base)
    segments[1:] = [_extract_from_segment(segment, extract) for segment in segments[1:]]
    if not question_mark:
        return "/".join(segments)
    pairs = [_extract_from_pair(pair, extract) for pair in re.split(r"([&;])", query)]
    return "/".join(segments) + "?" + "".join(pairs)


def _extract_from_segment(segment: str, extract: Extract) -> str:
    if "${" not in segment and len(segment) >= 24 and _is_random(segment):
        return extract("URL_KEY", segment)
    return _TOKEN.sub(lambda match: extract("URL_TOKEN", match[0]), segment)


def _extract_from_pair(pair: str, extract: Extract) -> str:
    name, equals, value = pair.partition("=")
    strength = _strength(unquote(name))
    if equals and _is_secret_value(2 if strength else 0, value):
        return f"{name}={extract(name, value)}"
    return _TOKEN.sub(lambda match: extract("TOKEN", match[0]), pair)


def _is_random(text: str) -> bool:
    """Return whether the text looks randomly generated: digits, letters, high entropy."""
    if not re.fullmatch(r"[\w=+.~-]+", text) or not re.search(r"\d", text):
        return False
    shares = [text.count(c) / len(text) for c in set(text)]
    entropy = -sum(share * math.log2(share) for share in shares)
    longest_word = max(map(len, re.findall(r"[A-Za-z]+", text)), default=0)
    mixed = text != text.lower() and text != text.upper()
    return entropy > 3 and len(re.findall(r"\d", text)) >= 3 and (mixed or longest_word < 10)
