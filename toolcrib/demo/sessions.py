"""Scripts of the demo agents: real sessions, searches, loads and calls over REST.

They behave like agents: mostly correct, at times with invalid arguments, unknown tools and searches
without results. Nothing here writes to the database directly.
"""

from collections.abc import Callable, Mapping
from typing import Any, Self, Unpack

from toolcrib_client import ApiError, CallResult, Session, Toolcrib
from toolcrib_client.requests import OpenOptions

PEOPLE = ("ada", "otto", "mia")
METRICS = ("visits", "orders", "revenue", "refunds")


class Run:
    """One session of an agent, closed at the end unless `keep_open` is set."""

    def __init__(
        self, client: Toolcrib, session: Session | None = None, **options: Unpack[OpenOptions]
    ) -> None:
        self.client = client
        self.id = (session or client.open(**options)).id
        self.keep_open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        if not self.keep_open:
            self.client.close(self.id)

    def search(self, query: str, **more: Any) -> None:
        self.client.search(self.id, query=query, **more)

    def load(self, group: str, *names: str) -> None:
        self.client.load(self.id, group, names or None)

    def call(self, name: str, /, **arguments: Any) -> CallResult:
        return self.client.call(self.id, name, arguments)

    def fork(self) -> "Run":
        return Run(self.client, self.client.fork(self.id))


# --- The support desk: ticket triage --------------------------------------------------------------


def triage(client: Toolcrib, turn: int) -> None:
    with Run(client, model="claude-sonnet-4-5", metadata={"task": "triage"}) as run:
        run.search("find open tickets of customers")
        run.load("mcp:tickets", "list_tickets", "get_ticket", "comment_on_ticket")
        run.call("tickets__list_tickets", state="open", limit=5)
        for ticket in range(101 + turn, 105 + turn + 2 * (turn % 3)):
            run.call("tickets__get_ticket", ticket=ticket)
            run.call(
                "tickets__comment_on_ticket",
                ticket=ticket,
                text="Received. We are working on it today.",
            )
        run.call("tickets__assign_ticket", ticket=101 + turn, assignee=PEOPLE[turn % 3])
        if turn % 3 == 0:  # invalid at first, as models do; the error contains the schema
            run.call("tickets__set_ticket_state", ticket=102 + turn, state="done")
        run.call("tickets__set_ticket_state", ticket=102 + turn, state="closed")
        run.call("tickets__label_ticket", ticket=103 + turn, label="needs-reply")
        run.keep_open = turn % 4 == 3


def escalation(client: Toolcrib, turn: int) -> None:
    with Run(client, model="claude-sonnet-4-5", metadata={"task": "escalation"}) as run:
        run.search("", name="create_ticket")
        ticket = run.call(
            "tickets__create_ticket", subject=f"Export is slow ({turn})", priority="high"
        )
        number = (ticket.structured_content or {}).get("id", 101)
        run.search("who is free to meet")
        run.load("daily:support")
        run.call("calendar__find_free_slot", people=["ada", "otto"], first_day=turn)
        run.call(
            "calendar__create_event", title="Export is slow", day=turn, hour=10, people=["ada"]
        )
        run.call("tickets__comment_on_ticket", ticket=number, text="Ada will work on it tomorrow.")
        if turn % 4 == 0:
            run.call("tickets__delete_ticket", ticket=number)  # hidden by an admin
        run.search(
            ("reserve hotel rooms", "book a flight", "order lunch")[turn % 3]
        )  # no tool does this


# --- The planner: meetings, mail and minutes ------------------------------------------------------


def minutes(client: Toolcrib, turn: int) -> None:
    with Run(client, model="gpt-5", metadata={"task": "minutes"}) as run:
        run.load("mcp:notes")
        run.call("notes__read_note", path="meetings/monday.md")
        run.call("notes__outline_note", path="handbook/release.md")
        path = f"meetings/day-{turn}.md"
        run.call("notes__write_note", path=path, text=f"# Day {turn}\n\nWho: {PEOPLE[turn % 3]}\n")
        run.call("notes__append_to_note", path=path, text="- Release on Thursday")
        run.call("notes__search_notes", words="release")
        if turn % 3 == 0:
            run.call("notes__read_note", path="meetings/tuesday.md")  # does not exist
        client.catalog(run.id, format="openai")


def invitations(client: Toolcrib, turn: int) -> None:
    with Run(client, model="gpt-5", metadata={"task": "invitations"}) as run:
        run.search("find a time when all are free")
        run.load("mcp:calendar", "find_free_slot", "create_event", "send_mail")
        slot = run.call("calendar__find_free_slot", people=list(PEOPLE), first_day=turn)
        free = slot.structured_content or {"day": turn, "hour": 11}
        run.call(
            "calendar__create_event",
            title=f"Planning {turn}",
            day=free["day"],
            hour=free["hour"],
            people=list(PEOPLE),
        )
        for person in PEOPLE[turn % 3 :]:
            run.call(
                "calendar__send_mail", to=f"{person}@example.org", subject="Planning", text="Come"
            )
        if turn % 4 == 0:  # not an e-mail address
            run.call("calendar__send_mail", to="everybody", subject="Planning", text="Come")
        run.call("calendar__list_events", day=free["day"])
        if turn % 2:
            state = client.state(run.id)
    if turn % 2:
        with Run(client, model="gpt-5", resume=state) as again:
            again.call("calendar__list_mail", limit=3)
            again.call("calendar__search_mail", words="invoice")


# --- The analyst: reports within a token budget ---------------------------------------------------


def weekly_report(client: Toolcrib, turn: int) -> None:
    with Run(client, model="gemini-2.5-pro", metadata={"task": "weekly report"}) as run:
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
            run.load("mcp:toolbox")  # exceeds the budget
        except ApiError as error:
            if error.status != 409:
                raise
        run.load("mcp:toolbox", "summarize_numbers")
        run.call("toolbox__summarize_numbers", numbers=[12, 15, 11, 19 + turn])


# --- The handyman: many groups, one task at a time ------------------------------------------------


def small_tasks(client: Toolcrib, turn: int) -> None:
    with Run(client, model="claude-opus-4-1", metadata={"task": "small tasks"}) as run:
        run.search("", pattern="convert_.*")
        run.call("toolbox__convert_length", value=3 + turn, unit="mi", to="km")
        run.call("convert_temperature", value=70, scale="fahrenheit", to="celsius")
        run.call("toolbox__days_between", first="2026-03-02", second="2026-12-24")
        run.call("toolbox__hash_text", text=f"task {turn}")
        if turn % 2 == 0:
            run.call("toolbox__format_json", text="{broken")  # fails in the tool
        run.call("toolbox__make_slug", text="Release notes of March")
        if turn % 4 == 0:
            run.call("toolbox__send_rocket", destination="moon")  # unknown tool
        client.details(run.id, "toolbox__roll_dice")
        run.call("toolbox__roll_dice", count=3)
        if turn % 6 == 0:
            run.call("notes__delete_note", path="ideas/search.md")  # denied by an admin
        run.keep_open = turn % 3 == 2


# --- The archivist: few tools, so all of them are preloaded ---------------------------------------


def tidying(client: Toolcrib, turn: int) -> None:
    with Run(client, model="claude-haiku-4-5", metadata={"task": "tidying"}) as run:
        run.call("notes__list_notes", folder="handbook")
        run.call("notes__outline_note", path="handbook/on-call.md")
        run.call("list_notes", folder=f"meetings/day-{turn}")


# --- The pilot: every definition preloaded, few calls ---------------------------------------------


def trial(client: Toolcrib, turn: int) -> None:
    if turn % 4 == 0:
        with Run(client, model="claude-opus-4-1", metadata={"task": "trial"}) as run:
            run.call("tickets__list_tickets", state="waiting", limit=3)
            run.call("toolbox__days_between", first="2026-03-02", second="2026-03-09")


SCRIPTS: Mapping[str, tuple[Callable[[Toolcrib, int], None], ...]] = {
    "support-desk": (triage, escalation),
    "planner": (minutes, invitations),
    "analyst": (weekly_report,),
    "handyman": (small_tasks,),
    "archivist": (tidying,),
    "pilot": (trial,),
}


def run_scripts(client: Toolcrib, agent: str, turn: int) -> None:
    for script in SCRIPTS[agent]:
        script(client, turn)
