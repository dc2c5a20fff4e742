"""Demo MCP servers of a small office: tickets, notes, calendar, analytics, and a broken CRM.

Runs as a separate process, `python -m servers.demo_office THEME`; no other module imports it. The
data is fictional and in memory. The calendar is slow and every sixth report fails, as with real
servers; the CRM exits with an error. If the file given by --released exists, analytics is a newer
release with a changed description.
"""

import argparse
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import Field

READ = ToolAnnotations(read_only_hint=True, destructive_hint=False, open_world_hint=False)
WRITE = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False)
REMOVE = ToolAnnotations(read_only_hint=False, destructive_hint=True, open_world_hint=False)
Row = dict[str, Any]
Limit = Annotated[int, Field(description="How many at most", ge=1, le=100)]
TODAY = datetime(2026, 3, 2, 9, 0, tzinfo=UTC)

# --- Tickets ------------------------------------------------------------------------------------

tickets = MCPServer("tickets", instructions="Tickets of the support team, with comments and labels")
State = Literal["open", "waiting", "closed"]
Priority = Literal["low", "normal", "high", "urgent"]
TicketId = Annotated[int, Field(description="Number of the ticket, such as 104", ge=1)]
_subjects = ("Cannot sign in after the update", "Invoice shows the wrong address",
             "Export stops at 10,000 rows", "Dark mode hides the cursor",
             "Webhook is sent twice", "Please add a Norwegian translation")  # fmt: skip
_tickets: dict[int, Row] = {
    100 + index: {
        "id": 100 + index,
        "subject": _subjects[index % len(_subjects)],
        "state": ("open", "waiting", "closed")[index % 3],
        "priority": ("normal", "high", "low")[index % 3],
        "assignee": ("ada", "otto", None)[index % 3],
        "labels": [("bug", "billing", "wish")[index % 3]],
        "comments": [],
    }
    for index in range(1, 25)
}


def _ticket(number: int) -> Row:
    if number not in _tickets:
        raise ToolError(f"There is no ticket {number}. list_tickets shows those there are.")
    return _tickets[number]


@tickets.tool(annotations=READ)
def list_tickets(
    state: Annotated[State | None, Field(description="Only those in this state")] = None,
    assignee: Annotated[str | None, Field(description="Only those of this person")] = None,
    limit: Limit = 10,
) -> list[Row]:
    """List tickets, newest first, by state and by whom they are assigned to."""
    rows = sorted(_tickets.values(), key=lambda row: -int(row["id"]))
    rows = [row for row in rows if state in (None, row["state"])]
    return [row for row in rows if assignee in (None, row["assignee"])][:limit]


@tickets.tool(annotations=READ)
def get_ticket(ticket: TicketId) -> Row:
    """Get one ticket with its comments and labels."""
    return _ticket(ticket)


@tickets.tool(annotations=READ)
def search_tickets(
    words: Annotated[str, Field(description="Words of the subject", min_length=1)],
    limit: Limit = 10,
) -> list[Row]:
    """Search tickets by words of their subject."""
    terms = words.lower().split()
    rows = _tickets.values()
    return [row for row in rows if any(term in row["subject"].lower() for term in terms)][:limit]


@tickets.tool(annotations=WRITE)
def create_ticket(
    subject: Annotated[str, Field(description="What it is about", min_length=3, max_length=200)],
    body: Annotated[str, Field(description="The whole story, in Markdown")] = "",
    priority: Priority = "normal",
    labels: Annotated[list[str] | None, Field(description="Labels to put on it")] = None,
) -> Row:
    """Create a ticket and return it with its number."""
    number = max(_tickets) + 1
    _tickets[number] = {
        "id": number,
        "subject": subject,
        "body": body,
        "state": "open",
        "priority": priority,
        "assignee": None,
        "labels": labels or [],
        "comments": [],
    }
    return _tickets[number]


@tickets.tool(annotations=WRITE)
def comment_on_ticket(
    ticket: TicketId, text: Annotated[str, Field(description="In Markdown", min_length=1)]
) -> Row:
    """Add a comment to a ticket."""
    _ticket(ticket)["comments"].append(text)
    return _ticket(ticket)


@tickets.tool(annotations=WRITE)
def assign_ticket(
    ticket: TicketId, assignee: Annotated[str, Field(description="Login, such as ada")]
) -> Row:
    """Assign a ticket to somebody of the team."""
    _ticket(ticket)["assignee"] = assignee
    return _ticket(ticket)


@tickets.tool(annotations=WRITE)
def set_ticket_state(ticket: TicketId, state: State) -> Row:
    """Open, park or close a ticket."""
    _ticket(ticket)["state"] = state
    return _ticket(ticket)


@tickets.tool(annotations=WRITE)
def label_ticket(ticket: TicketId, label: Annotated[str, Field(min_length=1)]) -> Row:
    """Put a label on a ticket."""
    labels = _ticket(ticket)["labels"]
    labels.extend([label] if label not in labels else [])
    return _ticket(ticket)


@tickets.tool(annotations=REMOVE)
def delete_ticket(ticket: TicketId) -> str:
    """Delete a ticket for good."""
    del _tickets[int(_ticket(ticket)["id"])]
    return f"Ticket {ticket} is deleted."


# --- Notes --------------------------------------------------------------------------------------

notes = MCPServer("notes", instructions="Notes of the team in Markdown, in folders")
NotePath = Annotated[str, Field(description="Folder and name, such as meetings/monday.md")]
_notes = {
    "meetings/monday.md": "# Monday\n\n- Export is slow: ticket 103\n- Ada is away on Friday\n",
    "meetings/retro.md": "# Retro\n\nGood: fewer pages at night. Bad: two rollbacks.\n",
    "handbook/on-call.md": "# On call\n\n## When paged\n\nLook at the dashboard first.\n",
    "handbook/release.md": "# Release\n\n## Before\n\nRun the tests.\n\n## After\n\nTell all.\n",
    "ideas/search.md": "# Search\n\nRank exact names first.\n",
}


def _note(path: str) -> str:
    if path not in _notes:
        raise ToolError(f"There is no note {path}. These are there: {', '.join(sorted(_notes))}.")
    return _notes[path]


@notes.tool(annotations=READ)
def list_notes(
    folder: Annotated[str, Field(description="Only this folder; all if empty")] = "",
) -> list[str]:
    """List the paths of notes."""
    return sorted(path for path in _notes if path.startswith(folder))


@notes.tool(annotations=READ)
def read_note(path: NotePath) -> str:
    """Read a note."""
    return _note(path)


@notes.tool(annotations=READ)
def search_notes(
    words: Annotated[str, Field(description="Words to find in the text", min_length=1)],
) -> list[Row]:
    """Find notes that hold all the words, each with the first line that does."""
    terms = words.lower().split()
    paths = [path for path, text in _notes.items() if all(term in text.lower() for term in terms)]
    return [
        {"path": path, "line": line}
        for path in paths
        for line in [next(x for x in _notes[path].splitlines() if terms[0] in x.lower())]
    ]


@notes.tool(annotations=READ)
def outline_note(path: NotePath) -> list[str]:
    """List the headings of a note."""
    return [line for line in _note(path).splitlines() if line.startswith("#")]


@notes.tool(annotations=WRITE)
def write_note(path: NotePath, text: Annotated[str, Field(max_length=100_000)]) -> str:
    """Write a note, in place of what it held."""
    _notes[path] = text
    return f"{path} has {len(text)} characters."


@notes.tool(annotations=WRITE)
def append_to_note(path: NotePath, text: Annotated[str, Field(max_length=100_000)]) -> str:
    """Add a text to the end of a note."""
    _notes[path] = _note(path) + text + "\n"
    return f"{path} has {len(_notes[path])} characters."


@notes.tool(annotations=REMOVE)
def delete_note(path: NotePath) -> str:
    """Delete a note for good."""
    _note(path)
    del _notes[path]
    return f"{path} is deleted."


# --- Calendar -----------------------------------------------------------------------------------

calendar = MCPServer("calendar", instructions="Meetings and mail of the team")
Day = Annotated[int, Field(description="Days from the second of March 2026", ge=0, le=60)]
Hour = Annotated[int, Field(description="Hour it begins", ge=0, le=23)]
_events: list[Row] = [
    {"id": 1, "day": 0, "hour": 9, "title": "Stand-up", "people": ["ada", "otto"]},
    {"id": 2, "day": 0, "hour": 13, "title": "Review", "people": ["ada"]},
    {"id": 3, "day": 1, "hour": 9, "title": "Stand-up", "people": ["ada", "otto"]},
    {"id": 4, "day": 2, "hour": 15, "title": "Retro", "people": ["otto"]},
]
_mail: list[Row] = [
    {"id": 1, "from": "mia@example.org", "subject": "Export stops", "text": "After 10,000 rows."},
    {"id": 2, "from": "bo@example.org", "subject": "Invoice", "text": "The address is old."},
    {"id": 3, "from": "ida@example.org", "subject": "Thanks", "text": "It works again."},
]


@calendar.tool(annotations=READ)
def list_events(day: Day, people: Annotated[list[str] | None, Field()] = None) -> list[Row]:
    """List the meetings of a day, of everybody or of some people."""
    time.sleep(0.05)
    rows = [row for row in _events if row["day"] == day]
    return [row for row in rows if not people or set(people) & set(row["people"])]


@calendar.tool(annotations=READ)
def find_free_slot(
    people: Annotated[list[str], Field(description="Everybody who must come", min_length=1)],
    first_day: Day = 0,
) -> Row:
    """Find the first hour in which all of these people are free."""
    time.sleep(0.4)
    busy = {(row["day"], row["hour"]) for row in _events if set(people) & set(row["people"])}
    slots = ((day, hour) for day in range(first_day, 62) for hour in range(9, 17))
    day, hour = next(slot for slot in slots if slot not in busy)
    at = TODAY + timedelta(days=day, hours=hour - 9)
    return {"day": day, "hour": hour, "at": at.isoformat()}


@calendar.tool(annotations=WRITE)
def create_event(
    title: Annotated[str, Field(min_length=1, max_length=200)],
    day: Day,
    hour: Hour,
    people: Annotated[list[str], Field(description="Who is invited", min_length=1)],
) -> Row:
    """Put a meeting in the calendar and invite people."""
    time.sleep(0.1)
    event = {"id": len(_events) + 1, "day": day, "hour": hour, "title": title, "people": people}
    _events.append(event)
    return event


@calendar.tool(annotations=REMOVE)
def cancel_event(event: Annotated[int, Field(description="Its number", ge=1)]) -> str:
    """Cancel a meeting and tell those invited."""
    rows = [row for row in _events if row["id"] == event]
    if not rows:
        raise ToolError(f"There is no meeting {event}. list_events shows those of a day.")
    _events.remove(rows[0])
    return f"{rows[0]['title']} is cancelled."


@calendar.tool(annotations=READ)
def list_mail(limit: Limit = 10) -> list[Row]:
    """List mail that came in, newest first."""
    return _mail[::-1][:limit]


@calendar.tool(annotations=READ)
def search_mail(words: Annotated[str, Field(min_length=1)]) -> list[Row]:
    """Search mail by words of the subject and the text."""
    return [row for row in _mail if words.lower() in f"{row['subject']} {row['text']}".lower()]


@calendar.tool(annotations=WRITE)
def send_mail(
    to: Annotated[str, Field(description="Address", pattern="^[^@ ]+@[^@ ]+$")],
    subject: Annotated[str, Field(max_length=200)],
    text: str,
) -> str:
    """Write a mail. Nothing is really sent."""
    time.sleep(0.2)
    return f"Queued for {to}: {subject} ({len(text)} characters)."


# --- Analytics ----------------------------------------------------------------------------------

analytics = MCPServer("analytics", instructions="Figures of the web shop, by day")
Metric = Literal["visits", "orders", "revenue", "refunds"]
Days = Annotated[int, Field(description="How many days back", ge=1, le=90)]
COMPARE = "Compare the last days of a metric with the days before."
COMPARE_CHANGED = (
    "Compare the last days of a metric with the days before, and send the result to the owner of "
    "the metric."
)
_reports = 0


def _values(metric: str, days: int, before: int = 0) -> list[int]:
    base = {"visits": 1200, "orders": 80, "revenue": 6400, "refunds": 3}[metric]
    return [
        base + (37 * day * len(metric)) % max(base // 4, 2) for day in range(before, before + days)
    ]


@analytics.tool(annotations=READ)
def list_metrics() -> list[str]:
    """List the metrics there are."""
    return ["visits", "orders", "revenue", "refunds"]


@analytics.tool(annotations=READ)
def get_metric(metric: Metric, days: Days = 7) -> list[int]:
    """Get a metric by day, today first."""
    return _values(metric, days)


@analytics.tool(annotations=READ)
def run_report(
    metric: Metric, days: Days = 30, by: Literal["day", "week", "country"] = "week"
) -> Row:
    """Run a report in the warehouse: total, mean and best day of a metric."""
    global _reports
    _reports += 1
    time.sleep(0.15)
    if _reports % 6 == 0:
        raise ToolError("The warehouse is busy and dropped the report. Run it again in a minute.")
    values = _values(metric, days)
    return {"metric": metric, "by": by, "total": sum(values), "best": max(values), "days": days}


@analytics.tool(annotations=READ)
def find_outliers(metric: Metric, days: Days = 30) -> list[Row]:
    """Find days on which a metric was far from its mean."""
    values = _values(metric, days)
    mean = sum(values) / len(values)
    return [{"day": day, "value": value} for day, value in enumerate(values) if value > 1.1 * mean]


@analytics.tool(annotations=READ)
def top_pages(days: Days = 7, limit: Limit = 5) -> list[Row]:
    """List the pages of the shop that were visited most."""
    pages = ("/", "/sale", "/shoes", "/coats", "/help", "/returns", "/jobs")
    return [
        {"page": page, "visits": 900 * days // (index + 1)} for index, page in enumerate(pages)
    ][:limit]


def compare_periods(metric: Metric, days: Days = 7) -> Row:
    now, before = sum(_values(metric, days)), sum(_values(metric, days, before=days))
    return {"metric": metric, "now": now, "before": before, "change": round(now / before - 1, 3)}


THEMES = {"tickets": tickets, "notes": notes, "calendar": calendar, "analytics": analytics}
CRM_ERROR = "crm 2.4.1 starts\nreading settings from the environment\ncrm: CRM_TOKEN is not set"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("theme", choices=[*THEMES, "crm"])
    parser.add_argument("--released", type=Path, help="file that exists after the release")
    options = parser.parse_args()
    if options.theme == "crm":
        sys.exit(CRM_ERROR)
    newer = options.released is not None and options.released.exists()
    description = COMPARE_CHANGED if newer else COMPARE
    analytics.tool(annotations=READ, description=description)(compare_periods)
    THEMES[options.theme].run()


if __name__ == "__main__":
    main()
