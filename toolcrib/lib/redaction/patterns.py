"""Secrets that are recognized by their form: keys, tokens, passwords in URLs, card numbers.

RE2 only, so the time is linear in the text. Patterns work on UTF-8 bytes, for speed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import re2

from toolcrib.lib.errors import Invalid

MASK = b"***"
MAX_PATTERNS, MAX_PATTERN_LENGTH = 50, 500

# Keys and tokens with a prefix of their issuer.
ISSUED = "|".join(
    (
        r"(?:AKIA|ASIA|ABIA|ACCA|AGPA|AIDA|AIPA|ANPA|ANVA|AROA)[A-Z0-9]{16}",  # AWS
        r"gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w\-]{16,}",
        r"xox[abceoprs]-[\w\-]{8,}|xapp-[\w\-]{8,}|hooks\.slack\.com/services/[\w/]{8,}",
        r"(?:sk|rk|pk)_(?:live|test)_\w{8,}|whsec_[\w+/=]{8,}",  # Stripe
        r"sk-[\w\-]{16,}",  # OpenAI, Anthropic and others
        r"AIza[\w\-]{30,}|ya29\.[\w\-.]{16,}|GOCSPX-[\w\-]{16,}",  # Google
        r"npm_\w{20,}|pypi-[\w\-]{16,}|hf_\w{16,}|SG\.[\w\-]{16,}\.[\w\-]{16,}",
        r"dop_v1_\w{20,}|shp(?:at|ca|pa|ss)_\w{16,}|hvs\.[\w\-]{16,}|lin_api_\w{16,}",
        r"AGE-SECRET-KEY-1\w{16,}|tcb_[\w\-]{16,}|\d{8,10}:AA[\w\-]{30,}",
        r"eyJ[\w\-]{5,}\.[\w\-]{5,}(?:\.[\w\-]*)*",  # JWT
    )
)
PEM = r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----"
USER_INFO = r"[A-Za-z][A-Za-z0-9+.\-]*://(?:[^\s/:@\"'<>]*:[^\s/\"'<>]+|[^\s/:@\"'<>]{20,})@"
CARD = r"\d(?:[ \-]?\d){12,18}"
SSN = r"\d{3}-\d{2}-\d{4}"
IBAN = r"[A-Z]{2}\d{2}(?: ?[A-Z0-9]){11,30}"
SCHEME = r"(?i:bearer|basic)\s+[\w\-.~+/]{8,}=*"
SPOKEN = r"(?i:password|passcode|passphrase|pwd|pin|otp)\s+(?i:is|was):?\s+"

# Loose: finds every text that a secret name or a rule below may change, and few others. It is
# searched in JSON, where quotes have any number of backslashes and a newline is \n.
BETWEEN = r"[^a-z\"'\\]*"
NAMES = (
    rf"pass{BETWEEN}(?:word|wd|phrase|code)|passwort|kennwort|secret|authorization|credential"
    rf"|cookie|bearer|connection{BETWEEN}string|conn{BETWEEN}str|mnemonic|seed{BETWEEN}phrase"
    rf"|(?:recovery|backup|verification|security|one{BETWEEN}time){BETWEEN}code"
    rf"|social{BETWEEN}security|credit{BETWEEN}card|card{BETWEEN}number|session{BETWEEN}(?:id|key)"
    rf"|(?:api|access|private|encryption|signing|master|account|shared|auth|service|ssh){BETWEEN}key"
)
NAMES_AT_END = (
    rf"(?:tokens?|pass|pwds?|pw|auth|pins?|t?otps?|mfa|cv[vc]|csc|ssns?|jwts?|sid|sess{BETWEEN}ids?"
    rf"|creds?|sig|iban|dsn){BETWEEN}(?:codes?|numbers?|values?|headers?)?"
)
NAMED = (
    rf"(?i:(?:(?:{NAMES})[^\"'\\]*|{NAMES_AT_END}){BETWEEN}(?:\\*[\"']\s*(?:[:=,]|value)|[:=,>])"
    rf"|-[\w\-]*(?:{NAMES}|{NAMES_AT_END})[\w\-]*\s)"
)
SUSPICIOUS = re2.compile(
    "|".join((NAMED, ISSUED, PEM, USER_INFO, CARD, SSN, IBAN, SCHEME, SPOKEN)).encode()
)

IBAN_COUNTRIES = (
    "AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DK18 DO28 "
    "EE20 EG29 ES24 FI18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HR21 HU28 IE22 IL23 IQ23 IS26 "
    "IT27 JO30 KW30 KZ20 LB28 LC32 LI21 LT20 LU20 LV21 LY25 MC27 MD24 ME22 MK19 MR27 MT31 MU30 "
    "NL18 NO15 PK24 PL28 PS29 PT25 QA29 RO24 RS22 SA24 SC31 SE24 SI19 SK24 SM27 ST25 SV28 TL23 "
    "TN24 TR26 UA29 VA22 VG24 XK20"
)
IBAN_LENGTHS = {code[:2]: int(code[2:]) for code in IBAN_COUNTRIES.split()}
CARD_ISSUERS = re2.compile(
    r"4(?:\d{12}|\d{15}|\d{18})|5[1-5]\d{14}|2[2-7]\d{14}|3[47]\d{13}|3(?:0[0-5]|[68]\d)\d{11}"
    r"|6(?:011|5\d\d|4[4-9]\d)\d{12}|35\d{14}|62\d{14,17}|(?:50|5[6-9]|6[37])\d{14}"
)

Rule = tuple[Any, Callable[[Any], bytes]]


def _scheme(match: Any) -> bytes:
    text: bytes = match[0]
    is_word = len(match[2]) < 20 and match[2].isalpha()  # as in "basic authentication"
    return text if is_word else match[1] + MASK


def _card(match: Any) -> bytes:
    digits = match[0].replace(b" ", b"").replace(b"-", b"").decode()
    return MASK if CARD_ISSUERS.fullmatch(digits) and _passes_luhn(digits) else match[0]


def _passes_luhn(digits: str) -> bool:
    doubled = [int(digit) * (2 if index % 2 else 1) for index, digit in enumerate(digits[::-1])]
    return sum(number - 9 if number > 9 else number for number in doubled) % 10 == 0


def _ssn(match: Any) -> bytes:
    area, group, serial = match[0].split(b"-")
    impossible = area in (b"000", b"666") or area >= b"900" or group == b"00" or serial == b"0000"
    return match[0] if impossible else MASK


def _iban(match: Any) -> bytes:
    text: bytes = match[0]
    length = IBAN_LENGTHS.get(text[:2].decode())
    end = seen = 0
    while length and seen < length and end < len(text):
        seen += text[end : end + 1] != b" "
        end += 1
    number = text[:end].replace(b" ", b"")
    if not length or len(number) != length:
        return text
    rearranged = "".join(str(int(char, 36)) for char in (number[4:] + number[:4]).decode())
    return MASK + text[end:] if int(rearranged) % 97 == 1 else text


def _spoken(match: Any) -> bytes:
    text: bytes = match[0]
    is_word = match[2].rstrip(b".:!?").isalpha()  # as in "the password is required"
    return text if is_word else match[1] + MASK


RULES: tuple[Rule, ...] = tuple(
    (re2.compile(pattern.encode()), replace)
    for pattern, replace in (
        (rf"(?s){PEM}.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|\z)", lambda match: MASK),
        (rf"\b(?:{ISSUED})", lambda match: MASK),
        (
            r"([A-Za-z][A-Za-z0-9+.\-]*://[^\s/:@\"'<>]*:)[^\s/\"'<>]+@",
            lambda match: match[1] + MASK + b"@",
        ),
        (  # a token alone, as in https://TOKEN@github.com
            r"([A-Za-z][A-Za-z0-9+.\-]*://)[^\s/:@\"'<>]{20,}@",
            lambda match: match[1] + MASK + b"@",
        ),
        (r"\b((?i:bearer|basic)\s+)([\w\-.~+/]{8,}=*)", _scheme),
        (rf"\b{IBAN}\b", _iban),
        (rf"\b{CARD}\b", _card),
        (rf"\b{SSN}\b", _ssn),
        (rf"\b({SPOKEN})([^\s\"'<>,;]+)", _spoken),
    )
)


def compile_patterns(patterns: Sequence[str]) -> Any:
    """Compile an operator's patterns to one; None without any. Raises Invalid."""
    if len(patterns) > MAX_PATTERNS:
        raise Invalid(f"There are {len(patterns)} patterns; the limit is {MAX_PATTERNS}.")
    for pattern in patterns:
        _check_pattern(pattern)
    if not patterns:
        return None
    return re2.compile("|".join(f"(?:{pattern})" for pattern in patterns).encode(), _options())


def _check_pattern(pattern: str) -> None:
    shown = pattern[:60]
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise Invalid(f"The pattern {shown}… is longer than {MAX_PATTERN_LENGTH} characters.")
    try:
        compiled = re2.compile(pattern.encode(), _options())
    except (re2.error, UnicodeEncodeError) as error:
        reason = error.args[0] if isinstance(error, re2.error) and error.args else "not UTF-8"
        text = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        raise Invalid(
            f"The pattern {shown} is not a valid regular expression: {text}.",
            hint="Use RE2 syntax, which has no backreferences and no lookaround.",
        ) from error
    if compiled.search(b"") is not None:
        raise Invalid(
            f"The pattern {shown} matches an empty text, so it would mask everything.",
            hint="Write a pattern that matches at least one character.",
        )


def _options() -> Any:
    options = re2.Options()
    options.log_errors = False
    options.max_mem = 1 << 20
    return options
