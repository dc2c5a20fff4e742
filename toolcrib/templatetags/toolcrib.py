"""The interface's tags and filters: words, numbers, times, pills, bars, diffs, outlines.

A builtin of every template. Owns how things are said and drawn; reads no database and decides
nothing. Text of servers passes `visible` and is always escaped.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from django import template
from django.forms import BaseForm, BoundField
from django.http import HttpRequest
from django.template import Context
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from toolcrib.lib import charts
from toolcrib.lib import token_counter as token_counts
from toolcrib.lib.text import escape_hidden

register = template.Library()

# state: (word, tone, glyph). The glyphs are symbols of templates/components/charts/defs.svg.
STATUSES = {
    "connected": ("Connected", "ok", "dot"),
    "connecting": ("Connecting", "quiet", "half"),
    "failing": ("Failing", "bad", "triangle"),
    "disabled": ("Disabled", "off", "ring"),
    "held": ("Held", "held", "diamond"),
    "changed": ("Changed", "warn", "pencil"),
    "ok": ("ok", "ok", "check"),
    "error": ("error", "bad", "cross"),
    "new": ("New", "quiet", "ring"),
    "waiting": ("Waiting", "held", "clock"),
    "available": ("Available", "ok", "dot"),
    "missing": ("Missing", "off", "dash"),
    "rejected": ("Rejected", "bad", "cross"),
    "running": ("Running", "quiet", "half"),
    "failed": ("Failed", "bad", "cross"),
    "superseded": ("Superseded", "off", "dash"),
}

# What a server may claim of a tool: (word, tone, meaning).
BADGES = {
    "read-only": ("read-only", "quiet", "The server says this tool changes nothing."),
    "destructive": ("destructive", "bad", "The server says this tool may delete or overwrite."),
    "open-world": ("open-world", "quiet", "The server says this tool reaches beyond its own data."),
}

# The words are for those who hear the page.
SPANS = {
    "added": '<ins><i class="sr-only"> [added: </i>{}<i class="sr-only">] </i></ins>',
    "removed": '<del><i class="sr-only"> [removed: </i>{}<i class="sr-only">] </i></del>',
}

STAGES = ("connecting", "listing")

# Dropped when anything else in the address changes: they point into the old list.
CURSORS = ("after", "before")

_AFTER_UNDERSCORE = re.compile(r"(?<=_)(?!_)")
_MAY_BREAK = SafeString("<wbr>")
_SENTENCE_END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\betc)(?<!\bvs)[.!?](?=\s)")


# --- Numbers, times, text -----------------------------------------------------------------------


@register.filter
def thousands(value: object) -> str:
    """Write 1940 as 1,940; leave text as it is."""
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int | float) else str(value)


@register.filter
def breakable(name: str) -> SafeString:
    """Let the name of a tool break after its underscores, rather than anywhere."""
    return format_html_join(_MAY_BREAK, "{}", ((part,) for part in _AFTER_UNDERSCORE.split(name)))


@register.filter
def tokens(value: int | None) -> str:
    """Write 1940 as ≈1,940 tokens."""
    return "–" if value is None else f"≈{value:,} token{'' if value == 1 else 's'}"


@register.filter
def duration(seconds: float | None) -> str:
    """Write seconds as 420 ms, 1.2 s, 1 min 15 s or 2 h 5 min."""
    if seconds is None:
        return "–"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return _two_units(whole, 60, "min", "s")
    if whole < 86400:
        return _two_units(whole // 60, 60, "h", "min")
    return _two_units(whole // 3600, 24, "d", "h")


def _two_units(amount: int, size: int, large: str, small: str) -> str:
    many, few = divmod(amount, size)
    return f"{many} {large} {few} {small}" if few else f"{many} {large}"


@register.filter
def ago(moment: datetime | None) -> str:
    """Say how long ago, with the full time in the title."""
    if moment is None:
        return "never"
    return format_html(
        '<time datetime="{}" title="{}">{}</time>',
        moment.isoformat(timespec="seconds"),
        f"{moment:%a} {moment.day} {moment:%b %Y, %H:%M:%S %Z}".strip(),
        _distance((timezone.now() - moment).total_seconds()),
    )


def _distance(seconds: float) -> str:
    size = abs(seconds)
    if size < 10:
        return "just now"
    for limit, unit, word in ((60, 1, "s"), (3600, 60, "min"), (86400, 3600, "h")):
        if size < limit:
            text = f"{int(size // unit)} {word}"
            break
    else:
        days = int(size // 86400)
        text = f"{days} day{'' if days == 1 else 's'}"
    return f"{text} ago" if seconds > 0 else f"in {text}"


@register.filter
def visible(text: object) -> str:
    """Write out characters that could hide or reorder text, as ⟨U+202E⟩. Returns plain text."""
    # A plain str even of a SafeString, so that the result is always escaped.
    return escape_hidden(str(text).replace("\r\n", "\n") + "", keep="\n\t")


@register.filter
def first_sentence(text: object, limit: int = 160) -> str:
    """Return the first sentence of the first line that says something."""
    line = next((line.strip() for line in str(text).splitlines() if line.strip()), "")
    line = " ".join(line.lstrip("#*->•").split())
    if end := _SENTENCE_END.search(line):
        line = line[: end.end()]
    if len(line) <= limit:
        return line
    return line[:limit].rsplit(" ", 1)[0].rstrip(",;:") + "…"


@register.simple_tag(takes_context=True)
def query_string(context: Context, **changes: object) -> str:
    """Return this page's query with some parameters changed; None or "" removes one."""
    request: HttpRequest | None = context.get("request")
    query = request.GET.copy() if request else _empty_query()
    for name in CURSORS:
        query.pop(name, None)
    for name, value in changes.items():
        if value is None or value == "":
            query.pop(name, None)
        elif isinstance(value, list | tuple):
            query.setlist(name, [str(one) for one in value])
        else:
            query[name] = str(value)
    return f"?{query.urlencode()}"


def _empty_query() -> Any:
    return HttpRequest().GET.copy()


# --- Pills and bars -----------------------------------------------------------------------------


@register.inclusion_tag("components/status.html")
def status(state: object, count: int | None = None, label: str = "") -> dict[str, object]:
    """Draw the pill of a state: `{% status server.state count=server.failures %}`."""
    word, tone, glyph = STATUSES.get(str(state), (str(state), "quiet", "ring"))
    return {"word": label or word, "tone": tone, "glyph": glyph, "count": count}


@register.inclusion_tag("components/badge.html")
def badge(kind: str, source: bool = False) -> dict[str, object]:
    """Draw a claim of the server about a tool; `source` writes out that the server says so."""
    word, tone, meaning = BADGES.get(kind, (kind, "quiet", ""))
    return {"word": word, "tone": tone, "meaning": meaning, "source": source}


@register.filter
def claims(annotations: Mapping[str, object]) -> list[str]:
    """Name the badges of a tool's annotations. Silence claims nothing."""
    named = {"readOnlyHint": "read-only", "destructiveHint": "destructive"}
    named["openWorldHint"] = "open-world"
    return [word for hint, word in named.items() if annotations.get(hint) is True]


@register.inclusion_tag("components/charts/token_bar.svg")
def token_bar(
    preload: int,
    stub: int,
    rest: int = 0,
    scale: int = 0,
    budget: int | None = None,
    width: int = charts.BAR_WIDTH,
) -> dict[str, object]:
    """Draw the token bar with its number. `budget` adds the limit and what lies over it."""
    paid = preload + stub
    return {
        "bar": charts.token_bar(preload, stub, rest, scale, budget=budget, width=width),
        "paid": paid,
        "preload": preload,
        "stub": stub,
        "rest": rest,
        "budget": budget,
        "over": max(paid - budget, 0) if budget is not None else 0,
        "estimator": token_counts.estimator(),
    }


@register.inclusion_tag("components/charts/cost_bar.svg")
def cost_bar(value: int, maximum: int, width: int = 64) -> dict[str, object]:
    """Draw one cost against the page's largest, with its number."""
    bar = charts.cost_bar(value, maximum, width=width)
    return {"bar": bar, "value": value, "estimator": token_counts.estimator()}


@register.inclusion_tag("components/charts/sparkline.svg")
def sparkline(values: Sequence[float | None], label: str = "") -> dict[str, object]:
    """Draw a small line. With a label it is an image; without one, decoration beside a number."""
    return {"spark": charts.sparkline(values), "label": label}


# --- Blocks -------------------------------------------------------------------------------------


@register.inclusion_tag("components/field.html")
def field(bound: BoundField) -> dict[str, object]:
    """Draw a form field: label, control, help, errors."""
    return {"field": bound, "checkbox": bound.widget_type == "checkbox"}


@register.inclusion_tag("components/error_summary.html")
def error_summary(form: BaseForm, focus: bool = True) -> dict[str, object]:
    """List a form's errors at its top, each a link to its field, and take the focus there."""
    wrong = [bound for bound in form.visible_fields() if bound.errors]
    return {"form": form, "wrong": wrong, "focus": focus}


@register.inclusion_tag("components/sort_header.html", takes_context=True)
def sort_header(
    context: Context, key: str, label: str, default: str = "", number: bool = False
) -> dict[str, object]:
    """Draw a column's head that sorts by `key`; numbers start with the largest."""
    request: HttpRequest | None = context.get("request")
    current = (request.GET.get("sort") if request else None) or default
    order = {key: "ascending", f"-{key}": "descending"}.get(current, "")
    first, second = (f"-{key}", key) if number else (key, f"-{key}")
    href = query_string(context, sort=second if current == first else first)
    return {"label": label, "order": order, "href": href, "number": number}


@register.inclusion_tag("components/code.html")
def code_block(text: object, label: str = "", copy: bool = True) -> dict[str, object]:
    """Draw text that machines read, with a copy button."""
    return {"text": text, "label": label, "copy": copy}


@register.inclusion_tag("components/code.html")
def json_block(value: object, label: str = "JSON", copy: bool = True) -> dict[str, object]:
    """Draw a JSON value, indented."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    return {"text": text, "label": label, "copy": copy}


@register.simple_tag
def diff(spans: Iterable[tuple[str, str]]) -> SafeString:
    """Draw (kind, text) spans; kind is same, added or removed."""
    parts = ((format_html(SPANS.get(kind, "{}"), visible(text)),) for kind, text in spans)
    return format_html('<div class="diff">{}</div>', format_html_join("", "{}", parts))


@register.inclusion_tag("components/progress.html", takes_context=True)
def progress(
    context: Context,
    name: str,
    stage: str,
    failed: bool = False,
    note: str = "",
    retry_url: str = "",
) -> dict[str, object]:
    """Draw one row of a running job. `stage` is one of STAGES, saving or done."""
    reached = STAGES.index(stage) if stage in STAGES else len(STAGES)
    stopped = "failed" if failed else "current"
    states = [
        "done" if index < reached else stopped if index == reached else "todo"
        for index in range(len(STAGES))
    ]
    return {
        "name": name,
        "steps": list(zip(STAGES, states, strict=True)),
        "ended": "failed" if failed else "done" if stage == "done" else "",
        "note": note,
        "retry_url": retry_url,
        "csrf_token": context.get("csrf_token"),
    }


# --- Schema outline -----------------------------------------------------------------------------

OUTLINE_DEPTH = 6
OUTLINE_FIELDS = 200


@register.inclusion_tag("components/schema.html")
def schema_outline(schema: Mapping[str, object]) -> dict[str, object]:
    """Draw a JSON Schema as a nested list that a person can read."""
    return {"fields": outline(schema)}


def outline(schema: object, depth: int = 0) -> list[dict[str, object]]:
    """List the properties of an object schema, nested ones inside; bounded, for hostile ones."""
    if not isinstance(schema, Mapping) or depth >= OUTLINE_DEPTH:
        return []
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        items = schema.get("items")
        return outline(items, depth + 1) if items else []
    required = schema.get("required")
    needed = set(map(str, required)) if isinstance(required, list) else set()
    shown = list(properties.items())[:OUTLINE_FIELDS]
    return [_outline_row(str(name), body, str(name) in needed, depth) for name, body in shown]


def _outline_row(name: str, body: object, required: bool, depth: int) -> dict[str, object]:
    row: dict[str, object] = {"name": name, "type": type_word(body), "required": required}
    if isinstance(body, Mapping):
        choices = body.get("enum")
        row["description"] = str(body.get("description") or "")
        row["choices"] = (
            [json.dumps(c, ensure_ascii=False) for c in choices[:50]]
            if isinstance(choices, list)
            else []
        )
        row["default"] = json.dumps(body["default"]) if "default" in body else ""
        row["fields"] = outline(body, depth + 1)
    return row


def type_word(body: object, depth: int = 0) -> str:
    """Say a schema's type in a few words: string, list of integer, string or null."""
    if not isinstance(body, Mapping) or depth > 3:
        return "anything"
    if "$ref" in body:
        return f"as {body['$ref']}"
    for word in ("anyOf", "oneOf"):
        if isinstance(parts := body.get(word), list):
            return " or ".join(dict.fromkeys(type_word(part, depth + 1) for part in parts[:8]))
    kind = body.get("type")
    if isinstance(kind, list):
        return " or ".join(map(str, kind))
    if kind == "array":
        return f"list of {type_word(body.get('items'), depth + 1)}"
    if kind is None:
        return "one of" if "enum" in body else "anything"
    return f"{kind} ({body['format']})" if "format" in body else str(kind)
