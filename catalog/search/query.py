"""Split a long request into what it asks for one after another. Pure.

"Book a flight and then mail the ticket to Ann" wants two tools, and neither is the best for the
whole sentence: each clause is searched for too.
"""

import re
from collections.abc import Callable, Sized

MOST = 8
FEWEST_WORDS = 2  # a shorter clause says too little alone and joins its neighbour
SEAM = re.compile(
    r"(?<=[.!?;])\s+|[,;:\n]\s*|[。！？；，、：]|\s-\s"
    r"|\s(?:and|then|also|as well as|plus|followed by|after that|next|finally|along with"
    r"|und|dann|y|luego|et|puis)\s",
    re.IGNORECASE,
)


def clauses(query: str, words: Callable[[str], Sized]) -> list[str]:
    """Return the clauses of a query, or none where it is only one."""
    found: list[str] = []
    waiting = ""
    for part in filter(None, (piece.strip() for piece in SEAM.split(query))):
        clause = f"{waiting} {part}" if waiting else part
        if len(words(clause)) < FEWEST_WORDS:
            waiting = clause
        else:
            found.append(clause)
            waiting = ""
    if waiting and found:
        found[-1] += f" {waiting}"
    if len(found) > MOST:
        found[MOST - 1 :] = [" ".join(found[MOST - 1 :])]
    return found if len(found) > 1 else []
