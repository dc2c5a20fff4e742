"""What the demonstration has of search: other names for tools, and queries with their answers."""

from toolcrib.demo.sessions import Door

HINTS = {
    "tickets__create_ticket": (("alias", "bug report"), ("example", "a customer has a problem")),
    "calendar__find_free_slot": (("example", "when can we all meet"),),
    "analytics__run_report": (("alias", "weekly numbers"),),
}
GOLDEN = {
    "open a ticket for a customer": "tickets__create_ticket",
    "when can we all meet": "calendar__find_free_slot",
    "send an e-mail": "calendar__send_mail",
    "how did sales do last week": "analytics__run_report",
    "write something down for the team": "notes__append_to_note",
}


def fill_search(admin: Door) -> None:
    for name, hints in HINTS.items():
        for kind, text in hints:
            admin.ask("POST", f"/tools/{name}/hints", {"kind": kind, "text": text})
    for query, name in GOLDEN.items():
        admin.ask("POST", "/search/golden", {"query": query, "tools": [name]})
