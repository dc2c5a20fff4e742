"""The admin API of hints: the other names and example queries a tool is found by."""

from datetime import datetime
from typing import Literal

from django.http import HttpRequest
from ninja import Router, Schema, Status

from catalog.models import ToolHint
from catalog.tools import hints
from catalog.tools.api import find
from toolcrib.lib.api_schemas import ERRORS, Strict
from toolcrib.lib.roles import key_actor

router = Router(tags=["search"])


class HintIn(Strict):
    kind: Literal["alias", "example"]
    text: str


class HintOut(Schema):
    id: int
    kind: str
    text: str
    created_by: str
    created_at: datetime


@router.get("/tools/{name}/hints", response={200: list[HintOut], **ERRORS})
def list_hints(request: HttpRequest, name: str) -> list[ToolHint]:
    """What people call a tool and ask of it, as search reads it. Agents never see it."""
    return list(find(name).hints.all())


@router.post("/tools/{name}/hints", response={201: HintOut, **ERRORS})
def add_hint(request: HttpRequest, name: str, body: HintIn) -> Status[ToolHint]:
    """Add an alias or an example query; one that stands already is given back."""
    return Status(201, hints.add(find(name), body.kind, body.text, actor=key_actor(request)))


@router.delete("/tools/{name}/hints/{hint_id}", response={204: None, **ERRORS})
def remove_hint(request: HttpRequest, name: str, hint_id: int) -> Status[None]:
    hints.remove(hints.find(find(name), hint_id), actor=key_actor(request))
    return Status(204, None)
