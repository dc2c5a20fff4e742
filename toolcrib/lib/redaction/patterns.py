"""Secrets that are recognized by their form: keys, tokens, passwords in URLs, card numbers.

RE2 only, so the time is linear in the text. Patterns work on UTF-8 bytes, for speed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import re2

from toolcrib.lib.errors import Invalid
from toolcrib.lib.redaction.commands import SUSPICIOUS as COMMANDS
from toolcrib.lib.redaction.issued_tokens import ISSUED, PREFIXES

MASK = b"***"
MAX_PATTERNS, MAX_PATTERN_LENGTH = 50, 500

PEM = r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----"
USER_INFO = r"[A-Za-z][A-Za-z0-9+.\-]*://(?:[^\s/:@\"'<>]*:[^\s/\"'<>]+|[^\s/:@\"'<>]{20,})@"
GAP = "[ ./_\\-\u00a0\u2007-\u2015\u202f]{1,3}"  # between groups of digits
CARD = (
    rf"\d(?:[ \-]?\d){{12,18}}|\d{{4}}(?:{GAP}\d{{4}}){{2}}{GAP}\d{{1,7}}"
    rf"|\d{{4}}{GAP}\d{{6}}{GAP}\d{{4,5}}"
)
IBAN_COUNTRIES = (
    "AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DK18 DO28 "
    "EE20 EG29 ES24 FI18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HR21 HU28 IE22 IL23 IQ23 IS26 "
    "IT27 JO30 KW30 KZ20 LB28 LC32 LI21 LT20 LU20 LV21 LY25 MC27 MD24 ME22 MK19 MR27 MT31 MU30 "
    "NL18 NO15 PK24 PL28 PS29 PT25 QA29 RO24 RS22 SA24 SC31 SE24 SI19 SK24 SM27 ST25 SV28 TL23 "
    "TN24 TR26 UA29 VA22 VG24 XK20"
)
IBAN_LENGTHS = {code[:2]: int(code[2:]) for code in IBAN_COUNTRIES.split()}
IBAN = rf"(?i:{'|'.join(IBAN_LENGTHS)})\d{{2}}"
IBAN_START = re2.compile(rf"\b{IBAN}".encode())
IBAN_LATER = "(?:[ .\\-\u00a0]?[A-Za-z0-9]){6}"
DIGITS = r"\d(?:[ \-]?\d){12}|\d{4}[^\w\"]{1,3}\d{4,6}[^\w\"]{1,3}\d{4}|\d{4}_"  # of a card
SSN = r"\d{3}-\d{2}-\d{4}"
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
    rf"(?i:(?:(?:{NAMES})[^\"'\\]*|{NAMES_AT_END}){BETWEEN}(?:\\*[\"']\s*"
    rf"(?:[:=,;>|\]}}]|\\+[nrt]|value|[\w\-]+=)|[:=,;>|&\r\n\t]|\\+[nrt])"
    rf"|-[\w\-]*(?:{NAMES}|{NAMES_AT_END})[\w\-]*\s)"
)
# A word and, without a sign between, what no word of a sentence looks like.
WORDED = (
    r"(?i:pass(?:word|wd|phrase|code)|pwd|pin|token|secret|key|requirepass|masterauth|identified\s)"
    r"(?:[ ]|\\+t)(?:[ ]*\|)?[ ]*\\*[\"']?[^\s\"']*[0-9!@#$%^&*+=~?]"
    r"|(?i:login\s[^\"]*\spassword|requirepass |masterauth |identified\s"
    r"|(?:encrypted|user|role|login)[^;]*password)"
)
ENCODED = "%[0-9A-Fa-f]{2}"
BASE64 = r"(?:e[yw]|W[yw31]|LS0tLS)[\w+/\-]{18}"
PERCENT_ENCODED = re2.compile(
    rb"[\w.~\-+!*()@$,:/|]*%[0-9A-Fa-f]{2}(?:[\w.~\-+!*()@$,:/|]|%[0-9A-Fa-f]{2})*"
)
BASE64_ENCODED = re2.compile(
    rf"\b(?:{BASE64}[\w+/\-]{{34,56}}\r?\n(?:[\w+/\-]{{60,76}}\r?\n)*[\w+/\-]+={{0,2}}"
    rf"|{BASE64}[\w+/\-]*={{0,2}})".encode()
)
LOOSE = (
    *(NAMED, PREFIXES, PEM, USER_INFO, DIGITS, SSN, f"{IBAN}{IBAN_LATER}", SCHEME, SPOKEN, WORDED),
    *(COMMANDS, ENCODED, BASE64),
)
SUSPICIOUS = re2.compile("|".join(LOOSE).encode())

IBAN_GROUP = re2.compile("([ .\\-\u00a0]?)([A-Za-z0-9]+)".encode())
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
    digits = bytes(char for char in match[0] if 48 <= char <= 57).decode()
    return MASK if CARD_ISSUERS.fullmatch(digits) and _passes_luhn(digits) else match[0]


def _passes_luhn(digits: str) -> bool:
    doubled = [int(digit) * (2 if index % 2 else 1) for index, digit in enumerate(digits[::-1])]
    return sum(number - 9 if number > 9 else number for number in doubled) % 10 == 0


def _ssn(match: Any) -> bytes:
    area, group, serial = match[0].split(b"-")
    impossible = area in (b"000", b"666") or area >= b"900" or group == b"00" or serial == b"0000"
    return match[0] if impossible else MASK


def redact_ibans(data: bytes) -> bytes:
    parts, copied, position = [], 0, 0
    while (match := IBAN_START.search(data, position)) is not None:
        end = _iban_end(data, match.start())
        position = end or match.end()
        if end:
            parts += [data[copied : match.start()], MASK]
            copied = end
    return b"".join((*parts, data[copied:])) if parts else data


def _iban_end(data: bytes, start: int) -> int:
    """Return the end of the account number that starts here; 0 if there is none."""
    length = IBAN_LENGTHS[data[start : start + 2].decode().upper()]
    groups: list[bytes] = []
    end = start
    while (match := IBAN_GROUP.match(data, end, start + 3 * length)) is not None:
        if sum(map(len, groups)) >= length or (groups and not match[1]):
            break
        groups.append(match[2])
        end = match.end()
    number = b"".join(groups)
    if len(number) != length:
        return 0
    is_upper = number == number.upper()
    if not is_upper and any(len(group) != 4 for group in groups[:-1]):
        return 0  # words in a sentence
    rearranged = "".join(str(int(char, 36)) for char in (number[4:] + number[:4]).decode())
    return end if int(rearranged) % 97 == 1 else 0


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
