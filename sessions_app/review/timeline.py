"""Tell a session as a list of steps: sentences, idle gaps, tokens in context. Pure.

Takes what was recorded and decides how it reads; knows no table and no page.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from sessions_app.ledger.event_details import describe_query, read_count, read_names

IDLE = timedelta(minutes=5)
IDLE_SHARE = 0.05  # of the run
IDLE_LEAST = timedelta(seconds=10)  # below it nobody waited, however short the run
NAMED = 3  # names a sentence spells out

Spans = list[tuple[str, str]]  # ("text" or "name", words)

# state: (pill, word)
CALL_STATES = {
    "accepted": ("waiting", "accepted"),
    "sent": ("running", "sent"),
    "succeeded": ("ok", "ok"),
    "failed": ("error", "failed"),
    "refused": ("rejected", "refused"),
    "timed_out": ("error", "timed out"),
    "cancelled": ("missing", "cancelled"),
    "unknown": ("changed", "outcome unknown"),
    "client": ("ok", "left to the agent"),
}
DECIDED_BY = {
    "count": "because of how many tools are in scope",
    "tokens": "because of what their definitions would cost",
    "percent": "because of their share of the context window",
    "forced": "as it was asked for",
    "below": "because everything stays below the thresholds",
}
LOADED_BY = {
    "load": "loaded",
    "search": "loaded by searching",
    "preload": "preloaded",
    "resume": "took over",
}


@dataclass(frozen=True)
class CallFacts:
    """What a sentence needs to know of a call."""

    state: str
    is_error: bool = False
    duration_ms: int | None = None
    error_code: str = ""
    error_message: str = ""

    @property
    def outcome(self) -> tuple[str, str]:
        """The pill and the word of how it ended."""
        if self.state == "succeeded" and self.is_error:
            return "error", "the tool answered with an error"
        return CALL_STATES.get(self.state, ("missing", self.state))


@dataclass(frozen=True)
class TimelineEvent:
    """One recorded event. `until` is later than `at` for a call that took its time."""

    id: int
    kind: str
    at: datetime
    until: datetime
    tokens: int = 0
    tool_name: str = ""
    group_id: str = ""
    details: Mapping[str, object] = field(default_factory=dict)
    call: CallFacts | None = None


@dataclass(frozen=True)
class Step:
    """One row of the timeline."""

    number: int
    happening: TimelineEvent
    spans: Spans
    context: int  # tokens in context after it

    @property
    def sentence(self) -> str:
        return "".join(words for _, words in self.spans)


@dataclass(frozen=True)
class Gap:
    """A break in which nothing happened, with its true times."""

    since: datetime
    until: datetime

    @property
    def seconds(self) -> float:
        return (self.until - self.since).total_seconds()


def lay_out(
    happenings: Iterable[TimelineEvent],
    *,
    run: timedelta,
    first: int = 1,
    context: int = 0,
    last_end: datetime | None = None,
) -> list[Step | Gap]:
    """Number the steps, add up their tokens and mark the breaks between them.

    A later page of a long session says where it starts: `first`, `context` and `last_end`.
    """
    rows: list[Step | Gap] = []
    for number, happening in enumerate(happenings, first):
        if last_end is not None and is_idle(happening.at - last_end, run):
            rows.append(Gap(last_end, happening.at))
        context += happening.tokens
        rows.append(Step(number, happening, spans(happening), context))
        ends = (last_end, happening.until, happening.at)
        last_end = max(end for end in ends if end is not None)
    return rows


def is_idle(pause: timedelta, run: timedelta) -> bool:
    """Whether a pause is long: over five minutes, or over 5 % of the run and ten seconds."""
    return pause > IDLE or (pause > run * IDLE_SHARE and pause > IDLE_LEAST)


# --- Sentences ----------------------------------------------------------------------------------


def spans(happening: TimelineEvent) -> Spans:
    """Say what happened; names are marked, so that a page can set them apart."""
    say = _SENTENCES.get(happening.kind)
    return say(happening) if say else [("text", happening.kind)]


def _opened(one: TimelineEvent) -> Spans:
    tools, groups = read_count(one.details, "tools"), read_names(one.details, "groups")
    mode = str(one.details.get("mode") or "")
    said = f"opened in {mode} mode" if mode else "opened"
    said += f" with {_many(tools, 'tool')} of {_many(len(groups), 'group')}"
    parent = str(one.details.get("forked_from") or "")
    return [("text", f"{said}, forked from "), ("name", parent)] if parent else [("text", said)]


def _catalog(one: TimelineEvent) -> Spans:
    shape = str(one.details.get("format") or "")
    return [("text", f"fetched the catalog as {shape}" if shape else "fetched the catalog")]


def _searched(one: TimelineEvent) -> Spans:
    hits, total = len(read_names(one.details, "hits")), read_count(one.details, "total")
    found = "nothing found" if not total else f"{total:,} found"
    if total > hits:
        found = f"{hits:,} of {total:,} found"
    loaded = read_count(one.details, "newly_loaded")
    return [
        (
            "text",
            f"searched {describe_query(one.details)}: {found}{f', {loaded} loaded' * bool(loaded)}",
        )
    ]


def _details(one: TimelineEvent) -> Spans:
    end = "" if one.details.get("found", True) else ": not found"
    return [("text", "asked for the details of "), ("name", one.tool_name), ("text", end)]


def _loaded(one: TimelineEvent) -> Spans:
    names, verb = read_names(one.details, "names"), str(one.details.get("how") or "load")
    said: Spans = [("text", f"{LOADED_BY.get(verb, 'loaded')} ")]
    if one.details.get("all") and one.group_id:
        said += [("text", "all tools of "), ("name", one.group_id)]
    elif not names:
        said += [("text", "nothing")]
    else:
        said += _listed(names)
    unknown = len(read_names(one.details, "unknown"))
    end = f" (≈{one.tokens:,})" if one.tokens else ""
    return [*said, ("text", f"{end}; {_many(unknown, 'name')} unknown" if unknown else end)]


def _implicit_load(one: TimelineEvent) -> Spans:
    return [("text", "used "), ("name", one.tool_name), ("text", " without loading it first")]


def _called(one: TimelineEvent) -> Spans:
    said: Spans = [("text", "called "), ("name", one.tool_name)]
    if one.call is None:
        return said
    if one.call.duration_ms is not None:
        said.append(("text", f" · {milliseconds(one.call.duration_ms)}"))
    return [*said, ("text", f" · {one.call.outcome[1]}")]


def _refused(one: TimelineEvent) -> Spans:
    code = str(one.details.get("code") or "")
    reason = (one.call.error_message.strip() if one.call else "") or code.replace("_", " ")
    said: Spans = [("text", "refused")]
    if one.tool_name:
        said += [("text", " "), ("name", one.tool_name)]
    return [*said, ("text", f": {shorten(reason)}" if reason else "")]


def _forked(one: TimelineEvent) -> Spans:
    return [("text", "forked to "), ("name", str(one.details.get("to") or "another session"))]


def _resumed(one: TimelineEvent) -> Spans:
    groups = read_names(one.details, "groups")
    return [
        ("text", "resumed with "),
        *(_listed(groups) if groups else [("text", "nothing loaded")]),
    ]


_SENTENCES: dict[str, Callable[[TimelineEvent], Spans]] = {
    "opened": _opened,
    "catalog": _catalog,
    "searched": _searched,
    "details": _details,
    "loaded": _loaded,
    "implicit_load": _implicit_load,
    "called": _called,
    "refused": _refused,
    "forked": _forked,
    "resumed": _resumed,
    "closed": lambda one: [("text", "closed")],
    "expired": lambda one: [("text", "expired after a long silence")],
}


def pill(happening: TimelineEvent) -> str:
    """Name the status of a step that did not go well; empty for all others."""
    if happening.kind == "refused":
        return "rejected"
    if happening.kind != "called" or happening.call is None:
        return ""
    status = happening.call.outcome[0]
    return "" if status == "ok" else status


def milliseconds(amount: int) -> str:
    return f"{amount:,} ms" if amount < 10_000 else f"{amount / 1000:,.1f} s"


def shorten(text: str, limit: int = 160) -> str:
    """Return the first paragraph of a text in one line, cut to a row's length."""
    lines = text.strip().partition("\n\n")[0].splitlines()
    line = " ".join(line.strip().removeprefix("- ") for line in lines)
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def _listed(names: Sequence[str]) -> Spans:
    said: Spans = []
    for at, name in enumerate(names[:NAMED]):
        said += [("text", ", ")] * bool(at) + [("name", name)]
    more = len(names) - NAMED
    return [*said, ("text", f" and {more:,} more")] if more > 0 else said


def _many(amount: int, noun: str) -> str:
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"
