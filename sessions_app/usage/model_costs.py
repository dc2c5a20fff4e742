"""Tokens and money by model, over some time."""

from collections.abc import Iterable
from dataclasses import dataclass

from catalog import model_prices
from sessions_app.models import UsageKind
from sessions_app.usage.series import Uncounted, read_totals
from toolcrib.lib.figures import Money, TokenFigures, money_of, signed


@dataclass(frozen=True)
class ModelCost:
    model: str
    sessions: int
    calls: int
    tokens: TokenFigures
    money: Money | None  # None: the model has no price

    @property
    def saved_text(self) -> str:
        return signed(self.tokens.saved)

    @property
    def currency(self) -> str:
        return self.money.currency if self.money else ""

    @property
    def cost(self) -> float | None:
        return self.money.cost if self.money else None

    @property
    def saving(self) -> float | None:
        return self.money.saving if self.money else None


def list_models(within: str, uncounted: Uncounted | None = None) -> list[ModelCost]:
    """Return every model that sessions of this time reported, the largest saving first."""
    prices = model_prices.read()
    rows = []
    for model, figures in read_totals(within, UsageKind.MODEL, uncounted=uncounted).items():
        tokens = figures.token_figures
        money = money_of(tokens, prices.price_of(model))
        rows.append(ModelCost(model, figures.sessions, figures.calls, tokens, money))
    return sorted(rows, key=lambda row: (-row.tokens.saved, row.model))


def total_money(within: str, uncounted: Uncounted | None = None) -> Money | None:
    """Return cost and saving of all sessions whose model has a price; None if none has."""
    return add_up(list_models(within, uncounted)) if model_prices.read().rows else None


def add_up(models: Iterable[ModelCost]) -> Money | None:
    amounts = [row.money for row in models if row.money is not None]
    return sum(amounts[1:], amounts[0]) if amounts else None
