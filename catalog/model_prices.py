"""Prices of models, entered by an admin: what a million input tokens cost, by model.

There are no prices until somebody enters them. A model is a name as sessions report it, or a
pattern with `*`; the first row that matches counts.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from django.db import transaction

from catalog import audit
from catalog.models import Preference
from toolcrib.lib.errors import Invalid
from toolcrib.lib.figures import Price
from toolcrib.lib.roles import Actor

NAME = "model_prices"
DEFAULT_CURRENCY = "USD"
CURRENCY = re.compile(r"[A-Z]{3}")
MAX_ROWS = 200
MAX_MODEL_LENGTH = 200
MAX_PRICE = 1_000_000.0


@dataclass(frozen=True)
class PriceRow:
    model: str
    per_million: float


@dataclass(frozen=True)
class PriceTable:
    currency: str = DEFAULT_CURRENCY
    rows: tuple[PriceRow, ...] = ()

    def price_of(self, model: str) -> Price | None:
        """Return the price of a model; None if it is not known."""
        for row in self.rows if model else ():
            if fnmatchcase(model, row.model):
                return Price(self.currency, row.per_million)
        return None

    def as_text(self) -> str:
        return "\n".join(f"{row.model} {row.per_million:g}" for row in self.rows)


def read() -> PriceTable:
    stored = Preference.objects.filter(name=NAME).first()
    if stored is None:
        return PriceTable()
    value = json.loads(stored.value)
    rows = (PriceRow(model, price) for model, price in value["rows"])
    return PriceTable(value["currency"], tuple(rows))


def parse_text(text: str) -> list[PriceRow]:
    """Read rows from lines of a model and a price. Raises Invalid with the line's number."""
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        model, _, price = line.strip().rpartition(" ")
        try:
            rows.append(PriceRow(model.strip(), float(price)))
        except ValueError:
            raise Invalid(
                f"Line {number}: write a model and a price, like model-name 1.5."
            ) from None
    return rows


@transaction.atomic
def change(currency: str, rows: Sequence[PriceRow], *, actor: Actor) -> bool:
    """Replace all prices and return whether they changed."""
    _check(currency, rows)
    before, after = read(), PriceTable(currency, tuple(rows))
    if before == after:
        return False
    value = {"currency": currency, "rows": [[row.model, row.per_million] for row in rows]}
    stored, _ = Preference.objects.update_or_create(
        name=NAME, defaults={"value": json.dumps(value)}
    )
    states = {"before": {"value": before.as_text()}, "after": {"value": after.as_text()}}
    audit.record(actor, "settings.change", stored, **states)
    return True


def _check(currency: str, rows: Sequence[PriceRow]) -> None:
    if not CURRENCY.fullmatch(currency):
        raise Invalid("The currency must be a code of three letters, like USD or EUR.")
    if len(rows) > MAX_ROWS:
        raise Invalid(f"There can be at most {MAX_ROWS} prices.")
    for row in rows:
        is_name = 0 < len(row.model) <= MAX_MODEL_LENGTH and row.model.isprintable()
        if not is_name or " " in row.model:
            raise Invalid("A model must be a name or pattern without spaces.")
        if not (math.isfinite(row.per_million) and 0 <= row.per_million <= MAX_PRICE):
            raise Invalid(f"The price of {row.model[:80]} must be a number from 0.")
    if len({row.model for row in rows}) < len(rows):
        raise Invalid("Each model can have one price.")
