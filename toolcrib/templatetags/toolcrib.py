"""Template tags and filters: numbers, times, status pills, bars, diffs, schema outlines.

Built in to every template. Presentation only: no database access, no decisions. Text from servers
goes through `visible` and is always escaped.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from django import template
from django.forms import BaseForm, BoundField
from django.http import HttpRequest, QueryDict
from django.template import Context
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from sessions_app.review.source_code import SourceLine
from toolcrib.lib import charts, display, token_counter
from toolcrib.lib.text import escape_hidden, plural

register = template.Library()

# state: (label, tone, glyph). The glyphs are symbols in templates/components/charts/defs.svg.
STATUSES = {
    "connected": ("Connected", "ok", "dot"),
    "connecting": ("Connecting", "quiet", "half"),
    "failing": ("Failing", "bad", "triangle"),
    "disabled": ("Disabled", "off", "ring"),
    "held": ("Hidden", "held", "diamond"),
    "changed": ("Changed", "warn", "pencil"),
    "ok": ("ok", "ok", "check"),
    "error": ("error", "bad", "cross"),
    "new": ("New", "quiet", "ring"),
    "waiting": ("Pending review", "held", "clock"),
    "available": ("Available", "ok", "dot"),
    "missing": ("Missing", "off", "dash"),
    "rejected": ("Rejected", "bad", "cross"),
    "running": ("Running", "quiet", "half"),
    "failed": ("Failed", "bad", "cross"),
    "superseded": ("Superseded", "off", "dash"),
}

# Annotations that a server reports for a tool: (tone, meaning).
BADGES = {
    "read-only": ("quiet", "changes nothing"),
    "destructive": ("bad", "may delete or overwrite data"),
    "open-world": ("quiet", "accesses external systems"),
}

# The hidden text is for screen readers.
SPANS = {
    "added": '<ins><i class="sr-only"> [added: </i>{}<i class="sr-only">] </i></ins>',
    "removed": '<del><i class="sr-only"> [removed: </i>{}<i class="sr-only">] </i></del>',
}

STAGES = ("connecting", "listing")

# Removed when any other query parameter changes: they point into the old list.
CURSORS = ("after", "before")

_AFTER_UNDERSCORE = re.compile(r"(?<=_)(?!_)")
_VARIABLE = re.compile(r"(\$\{[A-Za-z_][A-Za-z0-9_]*\})")
_MAY_BREAK = SafeString("<wbr>")
_SENTENCE_END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\betc)(?<!\bvs)[.!?](?=\s)")


# --- Numbers, times, text -----------------------------------------------------------------------


@register.filter
def thousands(value: object) -> str:
    """Format 1940 as 1,940; leave text unchanged."""
    if value is None:
        return "–"
    return display.group_digits(value) if isinstance(value, int | float) else str(value)


@register.filter
def breakable(name: str) -> SafeString:
    """Allow line breaks in a tool name after its underscores only."""
    return format_html_join(_MAY_BREAK, "{}", ((part,) for part in _AFTER_UNDERSCORE.split(name)))


@register.filter
def tokens(value: int | None) -> str:
    """Format 1940 as ≈1,940 tokens."""
    return "–" if value is None else _with_minus(f"≈{plural(value, 'token')}")


@register.filter
def duration(seconds: float | None) -> str:
    """Format seconds as 420 ms, 1.2 s, 1 min 15 s or 2 h 5 min."""
    if seconds is None:
        return "–"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return _two_units(rounded, 60, "min", "s")
    if rounded < 86400:
        return _two_units(rounded // 60, 60, "h", "min")
    return _two_units(rounded // 3600, 24, "d", "h")


def _two_units(amount: int, size: int, large: str, small: str) -> str:
    quotient, rest = divmod(amount, size)
    return f"{quotient} {large} {rest} {small}" if rest else f"{quotient} {large}"


def _with_minus(number: str) -> str:
    """Replace the hyphen of a negative number with a minus sign."""
    return number.replace("-", "−")


@register.filter
def ago(moment: datetime | None) -> str:
    """Format a time as a distance from now, with the full time as its title."""
    if moment is None:
        return "never"
    return format_html(
        '<time datetime="{}" title="{}">{}</time>',
        moment.isoformat(timespec="seconds"),
        _full_time(display.local(moment)),
        _distance((timezone.now() - moment).total_seconds()),
    )


def _full_time(moment: datetime) -> str:
    return f"{moment:%a} {moment.day} {moment:%b %Y, %H:%M:%S %Z}".strip()


def _distance(seconds: float) -> str:
    size = abs(seconds)
    if size < 10:
        return "just now"
    text = plural(int(size // 86400), "day")
    for limit, unit, word in ((86400, 3600, "h"), (3600, 60, "min"), (60, 1, "s")):
        if size < limit:
            text = f"{int(size // unit)} {word}"
    return f"{text} ago" if seconds > 0 else f"in {text}"


@register.filter
def visible(text: object) -> str:
    """Escape characters that hide or reorder text as ⟨U+202E⟩. Returns plain text."""
    # Concatenation turns a SafeString into a plain str, so that the result is always escaped.
    return escape_hidden(str(text).replace("\r\n", "\n") + "", keep="\n\t")


@register.filter
def mark_variables(text: str) -> SafeString:
    """Mark each ${NAME} of a command line: a value that is filled in and never shown."""
    parts = enumerate(_VARIABLE.split(text))
    marked = '<mark class="variable">{}</mark>'
    return format_html_join(
        "", "{}", ((format_html(marked, part) if odd % 2 else part,) for odd, part in parts)
    )


@register.filter
def first_sentence(text: object, limit: int = 160) -> str:
    """Return the first sentence of the first non-empty line."""
    line = next((line.strip() for line in str(text).splitlines() if line.strip()), "")
    line = " ".join(line.lstrip("#*->•").split())
    if end := _SENTENCE_END.search(line):
        line = line[: end.end()]
    if len(line) <= limit:
        return line
    return line[:limit].rsplit(" ", 1)[0].rstrip(",;:") + "…"


@register.simple_tag(takes_context=True)
def query_string(context: Context, **changes: object) -> str:
    """Return the page's query string with parameters changed; empty ones are left out.

    The context variable `page_query` replaces the parameters of the request, for fragments that
    are rendered for another URL than the one requested.
    """
    request: HttpRequest | None = context.get("request")
    parameters = context.get("page_query", request.GET if request else None)
    query = QueryDict(mutable=True) if parameters is None else parameters.copy()
    for name in CURSORS:
        query.pop(name, None)
    for name, value in changes.items():
        if value is None or value == "":
            query.pop(name, None)
        elif isinstance(value, list | tuple):
            query.setlist(name, [str(item) for item in value])
        else:
            query[name] = str(value)
    for name in [name for name, values in query.lists() if not any(values)]:
        del query[name]
    return f"?{query.urlencode()}"


@register.simple_tag
def delta(change: float | None, points: str = "") -> str:
    """Return a change against the period before; of a rate, in percentage points."""
    if change is None:
        return "no comparison"
    return f"{percent_change(change, points)} vs before"


@register.simple_tag
def percent_change(change: float, points: str = "") -> str:
    sign = "+" if change > 0 else "−" if change < 0 else "±"
    unit = " points" if points == "%" else "%"
    return f"{sign}{abs(change):,.{1 if points == '%' else 0}f}{unit}"


# --- Pills and bars -----------------------------------------------------------------------------


@register.inclusion_tag("components/status.html")
def status(state: object, count: int | None = None, label: str = "") -> dict[str, object]:
    """Render the pill of a state: `{% status server.state count=server.failures %}`."""
    default, tone, glyph = STATUSES.get(str(state), (str(state), "quiet", "ring"))
    return {"label": label or default, "tone": tone, "glyph": glyph, "count": count}


@register.inclusion_tag("components/badge.html")
def badge(kind: str, source: bool = False) -> dict[str, object]:
    """Render an annotation of a tool; `source` adds that the server reports it."""
    tone, meaning = BADGES.get(kind, ("quiet", ""))
    title = meaning and f"Reported by the server, not verified: this tool {meaning}."
    return {"label": kind, "tone": tone, "meaning": title, "source": source}


@register.filter
def claims(annotations: Mapping[str, object]) -> list[str]:
    """Return the badges of a tool's annotations. Only an explicit true counts."""
    badges = {
        "readOnlyHint": "read-only",
        "destructiveHint": "destructive",
        "openWorldHint": "open-world",
    }
    return [badge for hint, badge in badges.items() if annotations.get(hint) is True]


@register.inclusion_tag("components/charts/token_bar.svg")
def token_bar(
    preload: int,
    stub: int,
    rest: int = 0,
    scale: int = 0,
    budget: int | None = None,
    width: int = charts.BAR_WIDTH,
) -> dict[str, object]:
    """Render the token bar with its number. `budget` adds the limit and the excess."""
    initial = preload + stub
    return {
        "bar": charts.token_bar(preload, stub, rest, scale, budget=budget, width=width),
        "initial": initial,
        "preload": preload,
        "stub": stub,
        "rest": rest,
        "budget": budget,
        "over": max(initial - budget, 0) if budget is not None else 0,
        "estimator": token_counter.estimator(),
    }


@register.inclusion_tag("components/charts/cost_bar.svg")
def cost_bar(value: int, maximum: int, width: int = 64) -> dict[str, object]:
    """Render one cost relative to the page's maximum, with its number."""
    bar = charts.cost_bar(value, maximum, width=width)
    return {"bar": bar, "value": value, "estimator": token_counter.estimator()}


@register.inclusion_tag("components/charts/sparkline.svg")
def sparkline(values: Sequence[float | None], label: str = "") -> dict[str, object]:
    """Render a sparkline: an image if it has a label, otherwise decoration beside a number."""
    return {"spark": charts.sparkline(values), "label": label}


# --- Blocks -------------------------------------------------------------------------------------


@register.inclusion_tag("components/field.html")
def field(bound: BoundField) -> dict[str, object]:
    """Render a form field: label, control, help text, errors."""
    return {"field": bound, "checkbox": bound.widget_type == "checkbox"}


@register.inclusion_tag("components/error_summary.html")
def error_summary(form: BaseForm, focus: bool = True) -> dict[str, object]:
    """Render a form's errors as links to their fields; `focus` moves the focus to the summary."""
    invalid = [bound for bound in form.visible_fields() if bound.errors]
    return {"form": form, "invalid_fields": invalid, "focus": focus}


@register.inclusion_tag("components/sort_header.html", takes_context=True)
def sort_header(
    context: Context, key: str, label: str, default: str = "", number: bool = False
) -> dict[str, object]:
    """Render a column header that sorts by `key`; numbers sort descending first."""
    request: HttpRequest | None = context.get("request")
    current = (request.GET.get("sort") if request else None) or default
    order = {key: "ascending", f"-{key}": "descending"}.get(current, "")
    first, second = (f"-{key}", key) if number else (key, f"-{key}")
    href = query_string(context, sort=second if current == first else first)
    return {"label": label, "order": order, "href": href, "number": number}


@register.inclusion_tag("components/code.html")
def code_block(text: object, label: str = "", copy: bool = True) -> dict[str, object]:
    """Render preformatted text with a copy button."""
    return {"text": text, "label": label, "copy": copy}


@register.inclusion_tag("components/code.html")
def json_block(value: object, label: str = "JSON") -> dict[str, object]:
    return code_block(json.dumps(value, indent=2, ensure_ascii=False, default=str), label)


@register.simple_tag
def diff(spans: Iterable[tuple[str, str]]) -> SafeString:
    """Render (kind, text) spans; kind is same, added or removed."""
    parts = ((format_html(SPANS.get(kind, "{}"), visible(text)),) for kind, text in spans)
    return format_html('<div class="diff">{}</div>', format_html_join("", "{}", parts))


@register.simple_tag
def source_lines(lines: Iterable[SourceLine]) -> SafeString:
    """Render lines of source code; their numbers are drawn by the style sheet, and not copied."""
    return format_html_join("", "{}", ((_source_line(line),) for line in lines))


def _source_line(line: SourceLine) -> SafeString:
    text = format_html_join(
        "",
        "{}",
        (
            (
                format_html('<span class="token-{}">{}</span>', kind, visible(text))
                if kind
                else visible(text),
            )
            for kind, text in line.spans
        ),
    )
    if line.is_failing:
        return format_html('<mark class="line" id="line-{}">{}\n</mark>', line.number, text)
    return format_html('<span class="line">{}\n</span>', text)


@register.inclusion_tag("components/progress.html", takes_context=True)
def progress(
    context: Context,
    name: str,
    stage: str,
    failed: bool = False,
    note: str = "",
    retry_url: str = "",
) -> dict[str, object]:
    """Render one row of a running job. `stage` is one of STAGES, saving or done."""
    reached = STAGES.index(stage) if stage in STAGES else len(STAGES)
    reached_state = "failed" if failed else "current"
    states = [
        "done" if index < reached else reached_state if index == reached else "todo"
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
    """Render a JSON Schema as a nested list of fields."""
    return {"fields": outline(schema)}


def outline(schema: object, depth: int = 0) -> list[dict[str, object]]:
    """Return the properties of an object schema, nested. Bounded, since schemas are untrusted."""
    if not isinstance(schema, Mapping) or depth >= OUTLINE_DEPTH:
        return []
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        items = schema.get("items")
        return outline(items, depth + 1) if items else []
    required = schema.get("required")
    required_names = set(map(str, required)) if isinstance(required, list) else set()
    rows = list(properties.items())[:OUTLINE_FIELDS]
    return [
        _outline_row(str(name), body, str(name) in required_names, depth) for name, body in rows
    ]


def _outline_row(name: str, body: object, required: bool, depth: int) -> dict[str, object]:
    row: dict[str, object] = {"name": name, "type": type_name(body), "required": required}
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


def type_name(body: object, depth: int = 0) -> str:
    """Describe a schema's type: string, list of integer, string or null."""
    if not isinstance(body, Mapping) or depth > 3:
        return "any"
    if "$ref" in body:
        return f"as {body['$ref']}"
    for keyword in ("anyOf", "oneOf"):
        if isinstance(parts := body.get(keyword), list):
            return " or ".join(dict.fromkeys(type_name(part, depth + 1) for part in parts[:8]))
    kind = body.get("type")
    if isinstance(kind, list):
        return " or ".join(map(str, kind))
    if kind == "array":
        return f"list of {type_name(body.get('items'), depth + 1)}"
    if kind is None:
        return "one of" if "enum" in body else "any"
    return f"{kind} ({body['format']})" if "format" in body else str(kind)
