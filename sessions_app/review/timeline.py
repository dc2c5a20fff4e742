"""Session timeline: numbered steps with a sentence each, idle gaps, tokens in context. Pure.

Owns the wording of recorded events; imports neither models nor views.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import cycle
from typing import TYPE_CHECKING

from sessions_app.ledger.event_details import describe_query, read_count, read_names
from toolcrib.lib.display import group_digits
from toolcrib.lib.text import plural

if TYPE_CHECKING:
    from sessions_app.models import Call

ALWAYS_IDLE = timedelta(minutes=5)
IDLE_SHARE = 0.05  # of the run
MIN_IDLE = timedelta(seconds=10)  # shorter pauses are never idle, however short the run
NAMES_IN_SENTENCE = 3

Spans = list[tuple[str, str]]  # (kind, text); kind is "text" or "name"

# state: (status of the pill, label)
CALL_STATES = {
    "held": ("waiting", "held"),
    "approved": ("running", "allowed"),
    "denied": ("rejected", "denied"),
    "expired": ("missing", "expired"),
    "accepted": ("waiting", "accepted"),
    "sent": ("running", "sent"),
    "succeeded": ("ok", "ok"),
    "failed": ("error", "failed"),
    "refused": ("rejected", "rejected"),
    "timed_out": ("error", "timed out"),
    "cancelled": ("missing", "cancelled"),
    "unknown": ("changed", "outcome unknown"),
    "client": ("ok", "run by the agent"),
}
DECIDED_BY = {
    "count": "tool count reaches the threshold",
    "tokens": "definition tokens exceed the threshold",
    "percent": "definitions exceed the share of the context window",
    "forced": "as requested",
    "below": "below all thresholds",
}
LOADED_BY = {
    "load": "loaded",
    "search": "loaded by search",
    "preload": "preloaded",
    "resume": "carried over",
    "added": "listed new",
}


def call_outcome(state: str, is_error: bool) -> tuple[str, str]:
    """Return the pill's status and the label of a call's outcome."""
    if state == "succeeded" and is_error:
        return "error", "tool returned an error"
    return CALL_STATES.get(state, ("missing", state))


@dataclass(frozen=True)
class TimelineEvent:
    """One recorded event. `until` is later than `at` for a call with a duration."""

    id: int
    kind: str
    at: datetime
    until: datetime
    tokens: int = 0
    tool_name: str = ""
    group_id: str = ""
    details: Mapping[str, object] = field(default_factory=dict)
    call: "Call | None" = None


@dataclass(frozen=True)
class Step:
    """One row of the timeline."""

    number: int
    event: TimelineEvent
    spans: Spans
    context: int  # tokens in context after it

    @property
    def sentence(self) -> str:
        return "".join(text for _, text in self.spans)


@dataclass(frozen=True)
class Gap:
    """An idle period between two steps."""

    since: datetime
    until: datetime

    @property
    def seconds(self) -> float:
        return (self.until - self.since).total_seconds()


def lay_out(
    events: Iterable[TimelineEvent],
    *,
    run: timedelta,
    first: int = 1,
    context: int = 0,
    last_end: datetime | None = None,
) -> list[Step | Gap]:
    """Number the steps, add up their tokens and insert the idle gaps between them.

    A later page of a long session passes the state at its start: `first`, `context`, `last_end`.
    """
    rows: list[Step | Gap] = []
    for number, event in enumerate(events, first):
        if last_end is not None and is_idle(event.at - last_end, run):
            rows.append(Gap(last_end, event.at))
        context += event.tokens
        rows.append(Step(number, event, describe_event(event), context))
        ends = (last_end, event.until, event.at)
        last_end = max(end for end in ends if end is not None)
    return rows


def is_idle(pause: timedelta, run: timedelta) -> bool:
    """Return whether a pause exceeds five minutes, or both ten seconds and 5% of the run."""
    return pause > ALWAYS_IDLE or (pause > run * IDLE_SHARE and pause > MIN_IDLE)


def describe_event(event: TimelineEvent) -> Spans:
    """Describe an event as spans; names are marked so that a page can set them in monospace."""
    describe = _SENTENCES.get(event.kind)
    return describe(event) if describe else _spans(event.kind)


def _spans(*parts: str) -> Spans:
    """Return text and names in turn, without empty parts."""
    kinds = cycle(("text", "name"))
    return [(kind, part) for kind, part in zip(kinds, parts, strict=False) if part]


def _opened(event: TimelineEvent) -> Spans:
    tools, groups = read_count(event.details, "tools"), read_names(event.details, "groups")
    mode, parent = (str(event.details.get(name) or "") for name in ("mode", "forked_from"))
    text = f"opened in {mode} mode" if mode else "opened"
    if tools or not parent:  # a fork has the catalog of its parent, and records no counts
        text += f" with {plural(tools, 'tool')} from {plural(len(groups), 'group')}"
    return _spans(f"{text}, forked from ", parent) if parent else _spans(text)


def _catalog(event: TimelineEvent) -> Spans:
    name = str(event.details.get("format") or "")
    return _spans(f"fetched the catalog in {name} format" if name else "fetched the catalog")


def _searched(event: TimelineEvent) -> Spans:
    hits, total = len(read_names(event.details, "hits")), read_count(event.details, "total")
    results = plural(total, "result") if total else "no results"
    if total > hits:
        results = f"{group_digits(hits)} of {plural(total, 'result')}"
    if loaded := read_count(event.details, "newly_loaded"):
        results += f", {group_digits(loaded)} loaded"
    return _spans(f"searched {describe_query(event.details)}: {results}")


def _details(event: TimelineEvent) -> Spans:
    end = "" if event.details.get("found", True) else ": not found"
    return _spans("requested details of ", event.tool_name, end)


def _loaded(event: TimelineEvent) -> Spans:
    names, verb = read_names(event.details, "names"), str(event.details.get("how") or "load")
    tools = _list_names(names) if names else _spans("no tools")
    if event.details.get("all") and event.group_id:
        tools = _spans("all tools of ", event.group_id)
    end = f" (≈{group_digits(event.tokens)})" if event.tokens else ""
    if unknown := len(read_names(event.details, "unknown")):
        end += f"; {plural(unknown, 'unknown name')}"
    return [*_spans(f"{LOADED_BY.get(verb, 'loaded')} "), *tools, *_spans(end)]


def _called(event: TimelineEvent) -> Spans:
    end = ""
    if event.call is not None:
        if event.call.duration_ms is not None:
            end = f" · {format_milliseconds(event.call.duration_ms)}"
        end += f" · {call_outcome(event.call.state, event.call.is_error)[1]}"
    return _spans("called ", event.tool_name, end)


def _refused(event: TimelineEvent) -> Spans:
    code = str(event.details.get("code") or "")
    reason = (event.call.error_message.strip() if event.call else "") or code.replace("_", " ")
    end = f" rejected: {shorten(reason)}" if reason else " rejected"
    request = str(event.details.get("request") or "")
    if request == "search":
        return _spans(f"search {describe_query(event.details)}{end}")
    if request:  # load, preload, details
        names = [event.group_id] if event.group_id else read_names(event.details, "names")
        names = names or [str(event.details.get("name") or "")]
        return [*_spans(f"{request} of "), *_list_names(names), *_spans(end)]
    return _spans("call to ", event.tool_name, end) if event.tool_name else _spans(f"request{end}")


def _held(event: TimelineEvent) -> Spans:
    rule = str(event.details.get("rule") or "")
    return _spans("call to ", event.tool_name, f" held by the rule “{rule}”")


def _decided(event: TimelineEvent) -> Spans:
    verb = "denied" if event.details.get("decision") == "deny" else "allowed"
    who = str(event.details.get("by") or "somebody")
    comment = shorten(str(event.details.get("comment") or ""))
    return _spans(f"{who} {verb} the call to ", event.tool_name, f": {comment}" if comment else "")


def _script(event: TimelineEvent) -> Spans:
    text = f"ran a script: {plural(read_count(event.details, 'calls'), 'call')}"
    if spared := read_count(event.details, "spared"):
        text += f", ≈{spared:,} tokens spared"
    error = str(event.details.get("error") or "")
    return _spans(f"{text} · failed with {error}" if error else text)


def _resumed(event: TimelineEvent) -> Spans:
    groups = read_names(event.details, "groups")
    return _spans("resumed with ") + (_list_names(groups) if groups else _spans("no groups loaded"))


_SENTENCES: dict[str, Callable[[TimelineEvent], Spans]] = {
    "opened": _opened,
    "catalog": _catalog,
    "searched": _searched,
    "details": _details,
    "loaded": _loaded,
    "implicit_load": lambda event: _spans("called ", event.tool_name, " directly"),
    "called": _called,
    "refused": _refused,
    "held": _held,
    "decided": _decided,
    "script": _script,
    "forked": lambda event: _spans("forked to ", str(event.details.get("to") or "another session")),
    "resumed": _resumed,
    "closed": lambda event: _spans("closed"),
    "expired": lambda event: _spans("expired after inactivity"),
}


def problem_status(event: TimelineEvent) -> str:
    """Return the pill's status of a step that did not succeed; empty for all others."""
    if event.kind == "refused":
        return "rejected"
    if event.kind == "script":
        return "error" if event.details.get("state") == "failed" else ""
    if event.kind != "called" or event.call is None:
        return ""
    status, _ = call_outcome(event.call.state, event.call.is_error)
    return "" if status == "ok" else status


def format_milliseconds(amount: int) -> str:
    return (
        f"{group_digits(amount)} ms" if amount < 10_000 else f"{group_digits(amount / 1000, 1)} s"
    )


def shorten(text: str, limit: int = 160) -> str:
    """Return the first paragraph of a text as one line, truncated to `limit` characters."""
    lines = text.strip().partition("\n\n")[0].splitlines()
    line = " ".join(line.strip().removeprefix("- ") for line in lines)
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def _list_names(names: Sequence[str]) -> Spans:
    separated = [part for name in names[:NAMES_IN_SENTENCE] for part in (", ", name)]
    more = len(names) - NAMES_IN_SENTENCE
    return _spans("", *separated[1:], f" and {group_digits(more)} more" if more > 0 else "")
