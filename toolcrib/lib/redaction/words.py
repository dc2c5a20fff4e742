"""Secrets that follow a word without a sign between, as in `login ada password hunter2`."""

import re2

# A word and the space before its value; what always has a password; what has one in quotes.
WORD = re2.compile(
    rb"(?m)(?:"
    rb"\b((?i:password|passwd|passphrase|passcode|pwd|pin|token|secret|(?:api|access)[ _\-]?key))"
    rb"(?:[ \t]+\|[ \t]+|[ \t]+)"
    rb"|((?i:\bmachine\s+\S+\s+login\s+\S+\s+password|\bconfig[ \t]+set[ \t]+requirepass"
    rb"|^(?:requirepass|masterauth))[ \t]+)"
    rb"|((?i:\bidentified[ \t]+(?:with[ \t]+\S+[ \t]+)?by|\bencrypted[ \t]+password"
    rb"|\b(?:alter|create)[ \t]+(?:user|role|login)[ \t][^;\r\n'\"]{0,99}[ \t]password)"
    rb"[ \t]*=?[ \t]*)"
    rb")"
)
ALWAYS, QUOTED_ONLY = 2, 3  # groups of words after which any value, or one in quotes, is secret
MIN_LENGTHS = {b"token": 8, b"secret": 8, b"key": 8}
# Characters that words do not have inside, and those at their ends that are not part of them.
MARKS = re2.compile(rb"[!@#$%^&*+=~?]")
AROUND = b".,:;!?)(]['\"`*_"
DIGIT, LETTER = re2.compile(rb"\d"), re2.compile(rb"[^\W\d_]|[\x80-\xff]")
# Technical terms and references with digits: names of algorithms, versions, dates, amounts,
# placeholders, paths, addresses, numbered things.
ORDINARY = re2.compile(
    rb"(?i:(?:sha|md|hs|rs|es|ps|aes|rsa|ed|base|utf|iso|cp|win|ipv?|http|h|oauth|saml|tls|ssl|rfc|x|web"
    rb"|argon|pbkdf|bcrypt|scrypt|pkcs|des|curve|secp|crc|sm|oidc|jwt|v|python|py|node|java|gpt|o|cl)"
    rb"[\-_/ ]?\d+(?:[\-_./]?\w{1,5}){0,3}"
    rb"|\d+(?:st|nd|rd|th|fa|x|h|s|m|d|k|mb|kb|gb|ms|min|px|%)|\d+(?:[\-\x80-\xff]+[a-z]+)+"
    rb"|v?\d+(?:[.:/,\-]\d+)+[a-z]?|[$#+\-<>=~]*\d[\d.,]*%?"
    rb"|(?:field|step|rule|part|test|level|version|phase|option|type|group|page|line|item|row|day|week"
    rb"|chapter|section|table|figure|user|agent|tool|id|no|number|issue|case|example|type|slot|token"
    rb"|password|secret|key|pin)[\-_#]?\d{1,6}"
    rb"|\$\{?\w+\}?|%\w+%|\{+.*\}+|<.*>?|%[sdr]|[\w.+\-]+@[\w\-]+(?:\.[\w\-]+)+|[a-z]+://.*|[./~].*"
    rb"|[a-z][\w]*\(.*|[a-z]+(?:[/&+|][a-z]+)+|[=!<>&|+\-*]+|\w+[=!?]+|[a-z]\+\+|#[a-z0-9\-]+|@\w+|\*+)"
)


def looks_secret(value: bytes, word: bytes = b"") -> bool:
    """Return whether a value after a word is a secret, and not the next word of a sentence."""
    text = value.strip(AROUND)
    kind = word.lower().split(b"_")[-1].split(b"-")[-1].split(b" ")[-1]
    if kind == b"pin":
        return text.isdigit() and 4 <= len(text) <= 8
    for short in (b"token", b"secret", b"key"):
        if kind.endswith(short):
            kind = short
    if len(text) < MIN_LENGTHS.get(kind, 5) or ORDINARY.fullmatch(text) is not None:
        return False
    has_digit, has_letter = DIGIT.search(text) is not None, LETTER.search(text) is not None
    if kind in MIN_LENGTHS:
        return has_digit and has_letter
    return has_letter and (has_digit or MARKS.search(text[1:-1]) is not None)
