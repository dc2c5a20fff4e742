"""Validation of rules beyond their shape: names, globs, conditions. Raises with the path."""

from collections.abc import Iterable, Mapping
from typing import Any

from catalog.models import Group
from servers.models import Server
from sessions_app.models import Agent
from sessions_app.rules.evaluation import OPERATORS, compile_condition, parse_pointer
from sessions_app.rules.schemas import MatchIn
from toolcrib.lib.errors import Invalid
from toolcrib.lib.json_codec import canonical
from toolcrib.lib.payloads import check_value

MAX_MATCH_BYTES = 64 * 1024
MAX_TEXT_LENGTH = 1_000  # of a value, which may be a pattern
MAX_REASON_LENGTH = 500
NAME_FIELDS = {"agents": "name", "groups": "group_id"}
RESERVED_NAMES = {"test", "order", "new"}  # paths of the API and of pages


class InvalidRule(Invalid):
    """A rule that cannot be stored, with the path of every wrong field."""

    def __init__(self, problems: Iterable[tuple[str, str]]) -> None:
        listed = [{"at": at, "problem": problem} for at, problem in problems]
        first = listed[0]
        super().__init__(
            f"{first['at']}: {first['problem']}.",
            hint="Correct the rule and send it again.",
            code="invalid_rule",
            details={"problems": listed[:50]},
        )


def check_name(name: str) -> str:
    name = name.strip()
    if not 0 < len(name) <= 80 or not name.isprintable():
        raise InvalidRule([("name", "a rule's name has 1 to 80 printable characters")])
    if "/" in name or name in (".", "..") or name in RESERVED_NAMES:
        problem = f'the name is part of a URL: it has no "/" and is not {_any_of(RESERVED_NAMES)}'
        raise InvalidRule([("name", problem)])
    return name


def check_reason(reason: str) -> str:
    reason = reason.replace("\r\n", "\n").strip()
    if len(reason) > MAX_REASON_LENGTH:
        raise InvalidRule([("reason", f"a reason has at most {MAX_REASON_LENGTH} characters")])
    check_value(reason, "/reason")
    return reason


def check_match(match: MatchIn, stored: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a match as it is stored: only parts that are set, agents and groups with their ids.

    Names that the `stored` match has are accepted even if what they name was deleted.
    """
    stored = stored or {}
    sent = match.model_dump(exclude_defaults=True, exclude_none=True)
    check_value(sent, "/match")
    if len(canonical(sent).encode()) > MAX_MATCH_BYTES:
        raise InvalidRule([("match", f"a match has at most {MAX_MATCH_BYTES:,} bytes")])
    problems: list[tuple[str, str]] = []
    for part in ("tools", "not_tools"):
        for position, glob in enumerate(sent.get(part, ())):
            if not glob.isprintable() or glob != glob.strip():
                problems.append((f"match.{part}.{position}", "a glob has no spaces around it"))
    for part in ("servers", "not_servers", "after"):
        known = {*_existing(Server, "slug", sent.get(part, ())), *stored.get(part, ())}
        problems += _unknown(part, sent.get(part, ()), known, "server")
    for part, model in (("agents", Agent), ("groups", Group)):
        if part in sent:
            names_now = current_names(part, [stored])
            ids = {names_now.get(row["id"], row["name"]): row["id"] for row in stored.get(part, ())}
            ids |= _existing(model, NAME_FIELDS[part], sent[part])
            problems += _unknown(part, sent[part], ids, part.removesuffix("s"))
            names = dict.fromkeys(sent[part])
            sent[part] = [{"id": ids[name], "name": name} for name in names if name in ids]
    problems += _condition_problems(sent.get("arguments", ()))
    if problems:
        raise InvalidRule(problems)
    return {key: value for key, value in sent.items() if value not in ([], {}, False)}


def current_names(part: str, matches: Iterable[Mapping[str, Any]]) -> dict[int, str]:
    """Return the current names of the agents or groups of stored matches, by id."""
    ids = {row["id"] for match in matches for row in match.get(part, ())}
    if not ids:
        return {}
    model: Any = {"agents": Agent, "groups": Group}[part]
    return dict(model.objects.filter(pk__in=ids).values_list("pk", NAME_FIELDS[part]))


def _existing(model: Any, field: str, names: Iterable[str]) -> dict[str, int]:
    wanted = [name for name in names if name.isprintable()]
    rows = model.objects.filter(**{f"{field}__in": wanted}).values_list(field, "pk")
    return dict(rows) if wanted else {}


def _unknown(
    part: str, names: Iterable[str], known: Iterable[str], noun: str
) -> list[tuple[str, str]]:
    known = set(known)
    return [
        (f"match.{part}.{position}", f"there is no {noun} {name[:80]!r}")
        for position, name in enumerate(names)
        if name not in known
    ]


def _condition_problems(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    problems = []
    for position, row in enumerate(rows):
        field = "path"
        try:
            parse_pointer(row["path"])
            field = "value" if row["op"] in OPERATORS else "op"
            value = row.get("value")
            if isinstance(value, str) and len(value) > MAX_TEXT_LENGTH:
                raise ValueError(f"a text has at most {MAX_TEXT_LENGTH:,} characters")
            compile_condition(row["path"], row["op"], value)
        except ValueError as error:
            problems.append((f"match.arguments.{position}.{field}", str(error)))
    return problems


def _any_of(names: Iterable[str]) -> str:
    return " or ".join(f'"{name}"' for name in sorted(names))
