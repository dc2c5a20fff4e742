"""Golden queries as CSV: one line per query, first the query, then each right answer."""

import csv
from collections.abc import Iterable
from io import StringIO

from catalog.models import GoldenQuery
from catalog.search.golden_queries import MAX_GOLDEN_QUERIES
from toolcrib.lib.errors import Invalid
from toolcrib.lib.text import escape_formula

MAX_TEXT = 512 * 1024


def read_csv(text: str) -> list[list[str]]:
    """Return the lines with a query; a header is skipped. Raises Invalid."""
    if len(text) > MAX_TEXT:
        raise Invalid("The text is too long.", hint="Import fewer lines at once.")
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(StringIO(text))]
    except csv.Error as error:
        raise Invalid(f"Not CSV: {error}.", hint="One line per query: query,tool,tool.") from error
    filled = [row for row in rows if row and row[0]]
    if filled and [cell.lower() for cell in filled[0][:2]] == ["query", "tools"]:
        del filled[0]
    if not filled or len(filled) > MAX_GOLDEN_QUERIES:
        hint = f"Enter 1 to {MAX_GOLDEN_QUERIES} lines: query,tool,tool."
        raise Invalid("There is nothing to import, or too much.", hint=hint)
    return filled


def write_csv(queries: Iterable[GoldenQuery]) -> str:
    text = StringIO()
    writer = csv.writer(text)
    writer.writerow(["query", "tools"])
    for golden in queries:
        writer.writerow([escape_formula(golden.query), *golden.right])
    return text.getvalue()
