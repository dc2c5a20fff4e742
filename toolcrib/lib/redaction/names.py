"""Names whose values are secret: of arguments, headers, variables, options and columns."""

import re
from functools import lru_cache

WORDS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")
MAX_LENGTH = 200
# Over the lower-case words of a name, joined by an underscore.
ANYWHERE = (
    r"pass_?(?:word|wd|phrase|code)|passwort|kennwort|secret(?!ar)|authorization|credential"
    r"|cookie|bearer|connection_?string|conn_?str|mnemonic|seed_?phrase"
    r"|(?:recovery|backup|verification|security|one_?time)_?codes?"
    r"|(?:api|access|private|secret|encryption|signing|master|account|shared|auth|service|ssh)_?keys?"
    r"|session_?(?:ids?|keys?)|sess_?ids?$|social_?security|credit_?card|card_?numbers?"
)
AT_END = (
    r"tokens?|pwds?|(?:^|_|user|db|admin|root|store|key|require)(?:pass|pw)"
    r"|(?:^|_|master)(?:o?auth|pins?|t?otps?|mfa|cv[vc]|csc|ssns?|jwts?|sid|creds?|sig|iban|dsn)"
    r"(?:_(?:codes?|numbers?|values?|headers?))?"
)
SECRET = re.compile(f"{ANYWHERE}|(?:{AT_END})$")
TOKEN = re.compile("tokens?$")
HEADER = re.compile("(?:authorization|cookie)$")


@lru_cache(maxsize=8192)
def is_secret_name(name: str) -> bool:
    """Return whether a name announces a secret, in snake, camel or kebab case, also in plural."""
    return SECRET.search(_normalized(name)) is not None


def is_secret_value(name: str, value: object) -> bool:
    """Return whether a value under a secret name is one: numbers of tokens are counts."""
    if isinstance(value, str):
        return value != ""
    if value is None or isinstance(value, bool):
        return False
    return not (isinstance(value, int | float) and TOKEN.search(_normalized(name)))


def is_header_name(name: str) -> bool:
    """Return whether the name's value reaches to the end of its line."""
    return HEADER.search(_normalized(name)) is not None


@lru_cache(maxsize=8192)
def _normalized(name: str) -> str:
    return "_".join(WORDS.findall(name[-MAX_LENGTH:])).lower()
