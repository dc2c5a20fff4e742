"""What the agents of the demonstration do: real sessions, searches, loads and calls over REST.

They work like agents do: mostly well, at times with wrong arguments, unknown tools and searches
that find nothing. Nothing here writes to the database.
"""

import http.client
import json
from collections.abc import Callable, Mapping
from typing import Any

Answer = dict[str, Any]
PEOPLE = ("ada", "otto", "mia")
METRICS = ("visits", "orders", "revenue", "refunds")


class Refused(Exception):
    """The installation answered with an error."""

    def __init__(self, status: int, asked: str, body: object) -> None:
        super().__init__(f"{asked} was answered with {status}: {json.dumps(body)[:500]}")
        self.status = status


class Door:
    """The API of a running installation on this machine, with one key."""

    def __init__(self, port: int, key: str) -> None:
        self.port = port
        self.headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = json.dumps(body) if body is not None else None
            connection.request(method, f"/api/v1{path}", data, {**self.headers, **headers})
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        told = json.loads(text) if text else None
        if answer.status >= 400:
            raise Refused(answer.status, f"{method} {path}", told)
        return told


class Run:
    """One session of an agent, closed at its end unless it is left open."""

    def __init__(self, door: Door, **opening: Any) -> None:
        self.door = door
        self.opening = opening
        self.path = ""
        self.left_open = False

    def __enter__(self) -> "Run":
        if not self.path:
            opened = self.door.ask("POST", "/sessions", self.opening)
            self.path = f"/sessions/{opened['id']}"
        return self

    def __exit__(self, *problem: object) -> None:
        if not self.left_open:
            self.ask("/close")

    def ask(self, what: str, body: object = None) -> Answer:
        told: Answer = self.door.ask("POST", self.path + what, body)
        return told

    def search(self, query: str, **more: Any) -> Answer:
        return self.ask("/search", {"query": query, **more})

    def load(self, group: str, *names: str) -> Answer:
        return self.ask("/load", {"group_id": group, "tool_names": list(names) or None})

    def call(self, name: str, /, **arguments: Any) -> Answer:
        return self.ask("/call", {"tool_name": name, "arguments": arguments})

    def read(self, what: str) -> Answer:
        told: Answer = self.door.ask("GET", self.path + what)
        return told

    def fork(self) -> "Run":
        other = Run(self.door)
        other.path = f"/sessions/{self.ask('/fork')['id']}"
        return other


# --- The support desk: triage of tickets ----------------------------------------------------------


def triage(door: Door, turn: int) -> None:
    with Run(door, model="claude-sonnet-4-5", metadata={"task": "triage"}) as run:
        run.search("find open tickets of customers")
        run.load("mcp:tickets", "list_tickets", "get_ticket", "comment_on_ticket")
        run.call("tickets__list_tickets", state="open", limit=5)
        for ticket in range(101 + turn, 105 + turn + 2 * (turn % 3)):
            run.call("tickets__get_ticket", ticket=ticket)
            run.call("tickets__comment_on_ticket", ticket=ticket, text="Seen; we look at it today.")
        run.call("tickets__assign_ticket", ticket=101 + turn, assignee=PEOPLE[turn % 3])
        if turn % 3 == 0:  # wrong at first, as models are; the answer carries the schema
            run.call("tickets__set_ticket_state", ticket=102 + turn, state="done")
        run.call("tickets__set_ticket_state", ticket=102 + turn, state="closed")
        run.call("tickets__label_ticket", ticket=103 + turn, label="needs-reply")
        run.left_open = turn % 4 == 3


def escalation(door: Door, turn: int) -> None:
    with Run(door, model="claude-sonnet-4-5", metadata={"task": "escalation"}) as run:
        run.search("", name="create_ticket")
        made = run.call(
            "tickets__create_ticket", subject=f"Export is slow ({turn})", priority="high"
        )
        number = (made.get("structured_content") or {}).get("id", 101)
        run.search("who is free to meet")
        run.load("daily:support")
        run.call("calendar__find_free_slot", people=["ada", "otto"], first_day=turn)
        run.call(
            "calendar__create_event", title="Export is slow", day=turn, hour=10, people=["ada"]
        )
        run.call("tickets__comment_on_ticket", ticket=number, text="Ada looks at it tomorrow.")
        if turn % 4 == 0:
            run.call("tickets__delete_ticket", ticket=number)  # held by an admin
        run.search(
            ("reserve hotel rooms", "book a flight", "order lunch")[turn % 3]
        )  # nothing does


# --- The planner: meetings, mail and minutes ------------------------------------------------------


def minutes(door: Door, turn: int) -> None:
    with Run(door, model="gpt-5", metadata={"task": "minutes"}) as run:
        run.load("mcp:notes")
        run.call("notes__read_note", path="meetings/monday.md")
        run.call("notes__outline_note", path="handbook/release.md")
        path = f"meetings/day-{turn}.md"
        run.call("notes__write_note", path=path, text=f"# Day {turn}\n\nWho: {PEOPLE[turn % 3]}\n")
        run.call("notes__append_to_note", path=path, text="- Release on Thursday")
        run.call("notes__search_notes", words="release")
        if turn % 3 == 0:
            run.call("notes__read_note", path="meetings/tuesday.md")  # is not there
        run.read("/catalog?format=openai")


def invitations(door: Door, turn: int) -> None:
    with Run(door, model="gpt-5", metadata={"task": "invitations"}) as run:
        run.search("find a time when all are free")
        run.load("mcp:calendar", "find_free_slot", "create_event", "send_mail")
        slot = run.call("calendar__find_free_slot", people=list(PEOPLE), first_day=turn)
        found = slot.get("structured_content") or {"day": turn, "hour": 11}
        run.call(
            "calendar__create_event",
            title=f"Planning {turn}",
            day=found["day"],
            hour=found["hour"],
            people=list(PEOPLE),
        )
        for person in PEOPLE[turn % 3 :]:
            run.call(
                "calendar__send_mail", to=f"{person}@example.org", subject="Planning", text="Come"
            )
        if turn % 4 == 0:  # no address
            run.call("calendar__send_mail", to="everybody", subject="Planning", text="Come")
        run.call("calendar__list_events", day=found["day"])
        if turn % 2:
            state = run.read("/state")
    if turn % 2:
        with Run(door, model="gpt-5", resume=state) as again:
            again.call("calendar__list_mail", limit=3)
            again.call("calendar__search_mail", words="invoice")


# --- The analyst: figures, within a budget --------------------------------------------------------


def weekly_report(door: Door, turn: int) -> None:
    with Run(door, model="gemini-2.5-pro", metadata={"task": "weekly report"}) as run:
        run.search("compare a metric with the week before", detail="summary", limit=5)
        run.load("mcp:analytics", "run_report", "get_metric")
        for metric in METRICS:
            run.call("analytics__run_report", metric=metric, days=7 * (1 + turn % 4))
        if turn % 5 == 0:
            run.call("analytics__get_metric", metric="conversion")  # no such metric
        run.call("analytics__get_metric", metric=METRICS[turn % 4], days=14)
        run.call("analytics__compare_periods", metric=METRICS[turn % 4])
        with run.fork() as child:
            child.call("analytics__find_outliers", metric="orders")
            child.call("analytics__top_pages", days=7)
        try:
            run.load("mcp:toolbox")  # too much for the budget
        except Refused as refusal:
            if refusal.status != 409:
                raise
        run.load("mcp:toolbox", "summarize_numbers")
        run.call("toolbox__summarize_numbers", numbers=[12, 15, 11, 19 + turn])


# --- The handyman: all groups, one question at a time ---------------------------------------------


def errands(door: Door, turn: int) -> None:
    with Run(door, model="claude-opus-4-1", metadata={"task": "errands"}) as run:
        run.search("", pattern="convert_.*")
        run.call("toolbox__convert_length", value=3 + turn, unit="mi", to="km")
        run.call("convert_temperature", value=70, scale="fahrenheit", to="celsius")
        run.call("toolbox__days_between", first="2026-03-02", second="2026-12-24")
        run.call("toolbox__hash_text", text=f"errand {turn}")
        if turn % 2 == 0:
            run.call("toolbox__format_json", text="{broken")  # fails in the tool
        run.call("toolbox__make_slug", text="Release notes of March")
        if turn % 4 == 0:
            run.call("toolbox__send_rocket", destination="moon")  # nobody has it
        run.read("/tools/toolbox__roll_dice")
        run.call("toolbox__roll_dice", count=3)
        if turn % 6 == 0:
            run.call("notes__delete_note", path="ideas/search.md")  # denied by an admin
        run.left_open = turn % 3 == 2


# --- The archivist: few tools, so all of them are there from the start ---------------------------


def tidying(door: Door, turn: int) -> None:
    with Run(door, model="claude-haiku-4-5", metadata={"task": "tidying"}) as run:
        run.call("notes__list_notes", folder="handbook")
        run.call("notes__outline_note", path="handbook/on-call.md")
        run.call("list_notes", folder=f"meetings/day-{turn}")


# --- The pilot: everything in front of the model, and little use of it ----------------------------


def trial(door: Door, turn: int) -> None:
    if turn % 4 == 0:
        with Run(door, model="claude-opus-4-1", metadata={"task": "trial"}) as run:
            run.call("tickets__list_tickets", state="waiting", limit=3)
            run.call("toolbox__days_between", first="2026-03-02", second="2026-03-09")


SCRIPTS: Mapping[str, tuple[Callable[[Door, int], None], ...]] = {
    "support-desk": (triage, escalation),
    "planner": (minutes, invitations),
    "analyst": (weekly_report,),
    "handyman": (errands,),
    "archivist": (tidying,),
    "pilot": (trial,),
}


def work(door: Door, agent: str, turn: int) -> None:
    """Let an agent do all that it does, once."""
    for script in SCRIPTS[agent]:
        script(door, turn)
