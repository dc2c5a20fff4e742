"""Admin API of the settings that admins also change on the settings pages."""

from typing import Any

from django.http import HttpRequest
from ninja import Router, Schema
from pydantic import Field

from catalog import model_prices, preferences, redaction_patterns
from catalog.model_prices import PriceRow
from catalog.preferences import PREFERENCES
from toolcrib.lib.api_schemas import CONFLICTS, ERRORS, AgentBody, Cursor, Limit, Number
from toolcrib.lib.pagination import cut_list
from toolcrib.lib.roles import key_actor

router = Router(tags=["settings"])


class SettingOut(Schema):
    """A setting of the whole installation, in the unit in which it is stored."""

    name: str
    label: str
    value: Number
    default: Number
    minimum: Number
    maximum: Number
    fixed_by: str = Field(description="The environment variable that fixes the value, or empty")


class SettingsOut(Schema):
    items: list[SettingOut]
    next_cursor: str | None


class SettingsIn(AgentBody):
    values: dict[str, Number] = Field(
        description="New values by name; others stay", examples=[{"keep_payloads_days": 30}]
    )


class MaskingBody(AgentBody):
    patterns: list[str] = Field(
        description="RE2 expressions whose matches are masked, besides what is always masked",
        examples=[[r"\bACME-\d{6}\b"]],
        max_length=1000,
    )


class PriceBody(AgentBody):
    model: str = Field(description="A name as sessions report it, or a pattern with *")
    per_million: Number = Field(description="Price of a million input tokens", ge=0)


class PricesBody(AgentBody):
    currency: str = Field("USD", examples=["USD", "EUR"])
    prices: list[PriceBody] = Field(max_length=1000)


@router.get("/prices", response={200: PricesBody, **ERRORS})
def get_prices(request: HttpRequest) -> dict[str, Any]:
    """Return the prices of models; there are none until an admin enters them."""
    return _prices()


@router.put("/prices", response={200: PricesBody, **ERRORS})
def replace_prices(request: HttpRequest, body: PricesBody) -> dict[str, Any]:
    """Replace the prices of models. The first one that matches a model counts."""
    rows = [PriceRow(row.model, row.per_million) for row in body.prices]
    model_prices.change(body.currency, rows, actor=key_actor(request))
    return _prices()


def _prices() -> dict[str, Any]:
    table = model_prices.read()
    rows = [{"model": row.model, "per_million": row.per_million} for row in table.rows]
    return {"currency": table.currency, "prices": rows}


@router.get("", response={200: SettingsOut, **ERRORS})
def list_settings(request: HttpRequest, limit: Limit = 50, cursor: Cursor = "") -> dict[str, Any]:
    """List the settings that admins can change while Toolcrib runs."""
    items, next_cursor = cut_list(_settings(), limit, cursor)
    return {"items": items, "next_cursor": next_cursor}


@router.patch("", response={200: SettingsOut, **ERRORS, **CONFLICTS})
def edit_settings(request: HttpRequest, body: SettingsIn) -> dict[str, Any]:
    """Change settings. They apply immediately, in every process."""
    preferences.change(body.values, actor=key_actor(request))
    return {"items": _settings(), "next_cursor": None}


@router.get("/masking", response={200: MaskingBody, **ERRORS})
def get_masking(request: HttpRequest) -> dict[str, Any]:
    """Return the patterns of secrets that operators added."""
    return {"patterns": redaction_patterns.read()}


@router.put("/masking", response={200: MaskingBody, **ERRORS})
def replace_masking(request: HttpRequest, body: MaskingBody) -> dict[str, Any]:
    """Replace the patterns. They apply to new calls."""
    redaction_patterns.change(body.patterns, actor=key_actor(request))
    return {"patterns": redaction_patterns.read()}


def _settings() -> list[dict[str, Any]]:
    values = preferences.values()
    names = ("name", "label", "default", "minimum", "maximum")
    return [
        {name: getattr(spec, name) for name in names}
        | {"value": values[spec.name], "fixed_by": spec.variable if spec.is_fixed else ""}
        for spec in PREFERENCES.values()
    ]
