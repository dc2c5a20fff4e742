"""Passwords in command lines: options of known programs, such as `curl -u user:password`.

Options whose name says what they are, such as `--password`, belong to `names`.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import re2

from toolcrib.lib.redaction.spans import QUOTE, UNQUOTED, quoted_end

# The programs, their options with a password, those with `user:password`, and a word that has to
# follow the program.
TABLE = (
    ("curl curl.exe", "", "uUE", ""),
    ("sshpass cqlsh psexec crackmapexec nxc evil-winrm", "p", "", ""),
    ("mysql mysqldump mysqladmin mysqlimport mysqlshow mysqlcheck", "p", "", ""),
    ("mariadb mariadb-dump mariadb-admin 7z 7za 7zz rar unrar", "p", "", ""),
    ("mongo mongosh mongodump mongorestore mongoexport mongoimport", "p", "", ""),
    ("docker podman nerdctl buildah skopeo helm oras crane az oc cf ibmcloud", "p", "", "login"),
    ("twine", "p", "", "upload"),
    ("redis-cli", "a", "", ""),
    ("ldapsearch ldapadd ldapmodify ldapdelete ldapwhoami ldappasswd", "w", "", ""),
    ("sqlcmd bcp zip unzip ipmitool", "P", "", ""),
    ("snmpget snmpset snmpwalk snmpbulkwalk", "AX", "", ""),
    ("smbclient rpcclient winexe", "", "U", ""),
    ("lftp xh httpie", "", "ua", ""),
    ("nmcli", "", "", ""),
)
PAIR_NAMES = {b"user", b"proxy-user", b"cert", b"auth"}  # of long options with `user:password`
PROGRAMS = {
    name.encode(): (passwords.encode(), pairs.encode(), word.encode())
    for names, passwords, pairs, word in TABLE
    for name in names.split()
}
# Programs in which the word password alone is an option.
WORDED = {b"nmcli", b"mysqladmin"}
NAMES = "|".join(sorted((name.decode() for name in PROGRAMS), key=len, reverse=True))
NAMES = NAMES.replace(".", r"\.")
# A command ends with its line; a line that ends with a backslash, comma or bracket is continued.
COMMAND = re2.compile(rf"\b({NAMES})((?:\\*[\"']|[ \t])(?:[\\,\[{{][ \t]*\r?\n|[^\r\n])*)".encode())
SUSPICIOUS = rf"(?:{NAMES})[ \t\"'\\]"
# In a command: a long option with `user:password`, short options, the word, another program.
OPTION = re2.compile(
    (
        r"[\s\"']--(user|proxy-user|cert|auth)(?:[ \t]*=|\\*[\"']?[\s,])"
        r"|[\s\"']-([A-Za-z]+)|[\s\"'](password)[\s\"']"
        rf"|\b({NAMES})(?:\\*[\"']|[ \t])"
    ).encode()
)
LONG, SHORT, WORD, PROGRAM = 1, 2, 3, 4
BETWEEN = re2.compile(rb"\\*[\"']?[ \t]*,?\s*")  # an option and its argument
SEPARATOR = re2.compile(rb"[:%,]")
PATH = re.compile(r"[/\\]")
MAX_PATH_LENGTH = 200
PAIR_USER = re.compile("[^:%,]*[:%,]")


def find_passwords(match: Any) -> Iterator[tuple[int, int]]:
    """Yield where the passwords in a match of COMMAND start and end in its second group."""
    program, text = match[1], match[2]
    words = {word: text.rfind(word) for _, _, word in PROGRAMS.values() if word}
    passwords, pairs = _options(program, words, 0)
    position = 0
    while (option := OPTION.search(text, position)) is not None:
        kind = option.lastindex
        position = option.end(kind)
        if kind == PROGRAM:
            program = option[PROGRAM]
            passwords, pairs = _options(program, words, position)
            continue
        is_pair = kind == LONG
        if kind == SHORT:
            letters = option[SHORT]
            at = next((at for at, char in enumerate(letters) if char in passwords + pairs), None)
            if at is None:
                continue
            is_pair = letters[at] in pairs
            position = option.start(SHORT) + at + 1
        elif (kind == WORD and program not in WORDED) or (kind == LONG and not pairs):
            continue
        start, end = _argument(text, option.end() if kind == LONG else position)
        if is_pair:
            separator = SEPARATOR.search(text, start, end)
            start = end if separator is None else separator.end()
        position = max(position, end)
        if end > start:
            yield start, end


def _options(program: bytes, words: dict[bytes, int], position: int) -> tuple[bytes, bytes]:
    """Return the options of a program with a password and with a pair, if its word follows."""
    passwords, pairs, word = PROGRAMS[program]
    return (passwords, pairs) if not word or words[word] >= position else (b"", b"")


def find_program(items: Iterable[object], program: object = None) -> str:
    """Return the known program that a list of arguments starts, or \"\"; `program` may name it."""
    texts = [item for item in items if isinstance(item, str)]
    for text in (program, *texts):
        if isinstance(text, str) and len(text) < MAX_PATH_LENGTH:
            name = PATH.split(text)[-1]
            if name.encode("utf-8", "replace") in PROGRAMS:
                word = PROGRAMS[name.encode()][2].decode()
                return name if not word or word in texts else ""
    return ""


def split_argument(program: str, option: str, argument: str) -> tuple[str, str]:
    """Return an argument as what stays of it and its password, empty if there is none.

    The option before it decides, or the one that it starts with, as in `-psecret`.
    """
    passwords, pairs, _ = (value.decode() for value in PROGRAMS[program.encode()])
    start = 0
    if argument.startswith("-"):
        at = next((at for at, char in enumerate(argument) if at and char in passwords + pairs), 0)
        if not at or not argument[1 : at + 1].isalpha():
            return argument, ""
        option, start = argument[: at + 1], at + 1
    is_long = option.startswith("--")
    if option.lstrip("-").encode() in PAIR_NAMES if is_long else option[-1:] in tuple(pairs):
        user = PAIR_USER.match(argument, start)
        start = len(argument) if user is None else user.end()
    elif is_long or option[-1:] not in tuple(passwords):
        return argument, ""
    return argument[:start], argument[start:]


def _argument(text: bytes, position: int) -> tuple[int, int]:
    start = BETWEEN.match(text, position).end()
    quote = QUOTE.match(text, start)
    if quote is not None:
        return quote.end(), quoted_end(text, quote)
    if text[position:start].strip(b" \t") == b"" and text[start : start + 1] == b"-":
        return start, start  # the next option
    value = UNQUOTED.match(text, start)
    return (start, start) if value is None else (start, value.end())
