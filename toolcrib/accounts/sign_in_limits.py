"""Limits of sign-in attempts: by name, by address, by both together, and overall.

An attempt is counted before its password is checked and refunded if it is correct, so parallel
guesses do not get past a limit. Names are counted whether they exist or not.

Somebody who guesses the password of a name could keep its owner out. Therefore a browser in which
a person signed in before has a signed cookie; its attempts for this name are counted separately.
"""

import hashlib
import math
import secrets
from collections.abc import Sequence
from typing import Any

from django.conf import settings
from django.core import signing
from django.http import HttpRequest, HttpResponse

from sessions_app.agents import rate_limits
from sessions_app.agents.rate_limits import Charge
from toolcrib.http.client_address import client_address
from toolcrib.lib.errors import ToolcribError

PERIOD = 15 * 60  # seconds
PER_NAME_AND_ADDRESS = PER_DEVICE = 5
PER_NAME = PER_ADDRESS = 10
OVERALL = 100
SALT = "toolcrib.accounts.device"
COOKIE_AGE = 180 * 24 * 3600  # seconds


class SignInLimited(ToolcribError):
    code = "too_many_attempts"
    status = 429

    def __init__(self, seconds: float) -> None:
        minutes = math.ceil(seconds / 60)
        super().__init__(
            "Too many failed attempts.",
            hint=f"Try again in {minutes} minute{'' if minutes == 1 else 's'}.",
            details={"retry_after": math.ceil(seconds)},
        )


def count_attempt(request: HttpRequest, name: str) -> None:
    """Count an attempt to sign in. Raises SignInLimited."""
    if seconds := max(rate_limits.hit(_charges(request, name))):
        raise SignInLimited(seconds)


def refund_attempt(request: HttpRequest, name: str) -> None:
    """Take back an attempt that was successful, and with it this client's failures."""
    first, *others = _charges(request, name)
    refunds = [first._replace(cost=-first.limit), *(charge._replace(cost=-1) for charge in others)]
    rate_limits.hit([refund._replace(limit=math.inf) for refund in refunds])


def _charges(request: HttpRequest, name: str) -> Sequence[Charge]:
    digest = _digest(name)
    if device := _device(request, digest):
        return [Charge("sign-in-device", device, PER_DEVICE, period=PERIOD)]
    address = client_address(request)
    subjects = {
        f"{digest}:{address}": PER_NAME_AND_ADDRESS,
        f"name:{digest}": PER_NAME,
        f"address:{address}": PER_ADDRESS,
        "all": OVERALL,
    }
    return [Charge("sign-in", subject, limit, period=PERIOD) for subject, limit in subjects.items()]


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]


# --- Browsers in which a person signed in before --------------------------------------------------


def _device(request: HttpRequest, digest: str) -> str:
    """Return the id of this browser if the named person signed in with it before."""
    try:
        value: Any = signing.loads(
            request.COOKIES.get(settings.DEVICE_COOKIE_NAME, ""), salt=SALT, max_age=COOKIE_AGE
        )
    except signing.BadSignature:
        return ""
    return str(value["device"]) if value["name"] == digest else ""


def remember_device(request: HttpRequest, response: HttpResponse, name: str) -> None:
    """Store in this browser that the named person signed in with it."""
    digest = _digest(name)
    value = {"name": digest, "device": _device(request, digest) or secrets.token_hex(8)}
    response.set_cookie(
        settings.DEVICE_COOKIE_NAME,
        signing.dumps(value, salt=SALT),
        max_age=COOKIE_AGE,
        secure=settings.HTTPS,
        httponly=True,
        samesite="Lax",
    )
