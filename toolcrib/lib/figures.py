"""Definitions of figures: baseline, given, saving and results, money, cost of a group, percentiles.

API, pages, charts and CSV show these and compute none of their own. Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from toolcrib.lib.display import group_digits

N = TypeVar("N", int, float)

# Rejections that repeat the schema of a tool: their tokens are given for tools, as definitions.
CODES_WITH_SCHEMA = ("invalid_arguments", "definition_changed")

BASELINE = "Definitions of all tools in a session's scope, as if all were sent at its start."
GIVEN = (
    "What sessions received to know their tools: catalog with preloaded definitions, searches, "
    "loaded definitions, and errors that contain a schema. Results of calls are not included."
)
SAVING = "Baseline minus tokens given for tools. Negative if more was given."
COST = (
    "Cost: tokens given for tools at the price of the model's input tokens. Money saved: tokens "
    "saved at the same price. Each token is counted once; later turns that read it again, and "
    "discounts of prompt caches, are not included."
)
GROUP_COST = "Preloaded definitions and catalog lines of a group, which every session starts with."
GROUP_BUDGET = 4_000  # cost of a group above which pages warn
RESULTS = "Results of calls, which cost the same without Toolcrib."
SPARED = (
    "Tokens of results of calls that a script read and the model did not receive, measured at each "
    "call. Called one by one, the model would have received them."
)
SCRIPT_GIVEN = "Tokens of a script's result, error and printed text, which the model received."


@dataclass(frozen=True)
class TokenFigures:
    """Tokens of one session, or of all sessions of some time."""

    baseline: int = 0
    catalog: int = 0
    searches: int = 0
    definitions: int = 0  # loaded, or repeated in errors
    results: int = 0

    @property
    def given(self) -> int:
        return self.catalog + self.searches + self.definitions

    @property
    def saved(self) -> int:
        return self.baseline - self.given

    @property
    def saved_percent(self) -> int | None:
        """Return the saving in percent of the baseline; None without a baseline."""
        return round(100 * self.saved / self.baseline) if self.baseline else None

    @property
    def sent(self) -> int:
        """Return everything that was sent: given for tools, and results."""
        return self.given + self.results

    @property
    def explanation(self) -> str:
        """Return why the saving is negative; empty if it is not."""
        if self.saved >= 0:
            return ""
        more, baseline = group_digits(-self.saved), group_digits(self.baseline)
        over = f"≈{more} tokens more than all definitions (≈{baseline})"
        parts = (
            (self.catalog, "the catalog with preloads", "fewer preloads or mode full cost less"),
            (self.searches, "searches", "preloads of the tools it looks for cost less"),
            (self.definitions, "loaded definitions", "mode full or preloads cost less"),
        )
        tokens, name, advice = max(parts)
        largest = f"the largest part is {name} (≈{group_digits(tokens)})"
        return f"{over}: {largest}; with so few tools, {advice}."


@dataclass(frozen=True)
class ScriptFigures:
    """Runs of scripts: of one, of an agent, or of all in some time."""

    runs: int = 0
    failed: int = 0
    held: int = 0  # paused now, until a person decides about a call
    calls: int = 0
    given: int = 0
    spared: int = 0

    def __add__(self, other: "ScriptFigures") -> "ScriptFigures":
        return ScriptFigures(
            self.runs + other.runs,
            self.failed + other.failed,
            self.held + other.held,
            self.calls + other.calls,
            self.given + other.given,
            self.spared + other.spared,
        )

    @property
    def ratio(self) -> float | None:
        """Return how many times fewer tokens were given than the results have."""
        return self.spared / self.given if self.given and self.spared else None


def signed(tokens: int) -> str:
    """Return tokens as text: ≈1,200, or −≈1,200."""
    return f"−≈{group_digits(-tokens)}" if tokens < 0 else f"≈{group_digits(tokens)}"


@dataclass(frozen=True)
class Price:
    """The price of input tokens of one model."""

    currency: str
    per_million: float


@dataclass(frozen=True)
class Money:
    """What tokens given for tools cost, and what was saved; negative if more was given."""

    currency: str
    cost: float
    saving: float

    def __add__(self, other: "Money") -> "Money":
        return Money(self.currency, self.cost + other.cost, self.saving + other.saving)

    @property
    def cost_text(self) -> str:
        return format_amount(self.cost, self.currency)

    @property
    def saving_text(self) -> str:
        return format_amount(self.saving, self.currency)


def money_of(tokens: TokenFigures, price: Price | None) -> Money | None:
    """Return the money of tokens at a price; None if the price is not known."""
    if price is None:
        return None
    each = price.per_million / 1_000_000
    return Money(price.currency, tokens.given * each, tokens.saved * each)


def format_amount(amount: float, currency: str) -> str:
    """Return an amount as text: 12.35 USD; small ones with four decimals."""
    decimals = 2 if abs(amount) >= 1 or not amount else 4
    sign = "−" if amount < 0 else ""
    return f"{sign}{abs(amount):,.{decimals}f} {currency}"


@dataclass(frozen=True)
class GroupCost:
    """Tokens of a group. Its cost is what it adds to the start of a session."""

    preload: int  # preloaded definitions
    stub: int  # lines of the catalog
    rest: int  # definitions that can be loaded
    tools: int = 0
    preloaded: int = 0
    budget: int = GROUP_BUDGET

    @property
    def at_start(self) -> int:
        return self.preload + self.stub

    @property
    def definitions(self) -> int:
        return self.preload + self.rest

    @property
    def with_all_preloaded(self) -> int:
        """Return what the group would cost with every tool preloaded."""
        return self.definitions + self.stub

    @property
    def over_budget(self) -> int:
        return max(self.at_start - self.budget, 0)


def percentile(values: Sequence[N], share: float) -> N | None:
    """Return the smallest value that is not exceeded by at least this share of the values."""
    if not values:
        return None
    return sorted(values)[max(math.ceil(len(values) * share) - 1, 0)]
