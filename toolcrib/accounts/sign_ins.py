"""Audit entries for sign-ins, failed ones and sign-outs."""

import time

from django.contrib.auth.models import User
from django.http import HttpRequest

from catalog import audit
from catalog.audit import Actor

MAX_FAILURES = 60  # entries per minute and process: failures need no account, so they could flood
UNKNOWN_NAME = "an unknown name"  # never what was typed, which may be a password
_minute, _recorded, _omitted = 0, 0, 0


def record_sign_in(request: HttpRequest, user: User) -> None:
    audit.record(Actor.user(user), "person.sign_in", user, after={"address": _address(request)})


def record_sign_out(request: HttpRequest) -> None:
    if isinstance(request.user, User):
        audit.record(Actor.user(request.user), "person.sign_out", request.user)


def record_failure(request: HttpRequest, name: str) -> None:
    """Record a failed sign-in. Of a flood, the rest is counted in the next entry."""
    global _minute, _recorded, _omitted
    now = int(time.monotonic() // 60)
    if now != _minute:
        _minute, _recorded = now, 0
    if _recorded >= MAX_FAILURES:
        _omitted += 1
        return
    _recorded += 1
    known = User.objects.filter(username=name).first() if "\0" not in name else None
    after: dict[str, object] = {"address": _address(request)}
    if _omitted:
        after["omitted_before"], _omitted = _omitted, 0
    target = known or User(username=UNKNOWN_NAME)
    audit.record(Actor("visitor", "Somebody"), "person.sign_in_failed", target, after=after)


def _address(request: HttpRequest) -> str:
    return str(request.META.get("REMOTE_ADDR", ""))[:60]
