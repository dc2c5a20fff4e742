"""How people get in: the one-time setup link, invitations, password links. No default password."""

import asyncio
import hmac

from django.contrib.auth.hashers import UNUSABLE_PASSWORD_PREFIX
from django.contrib.auth.models import User
from django.contrib.auth.password_validation import validate_password
from django.contrib.auth.tokens import default_token_generator
from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Q
from django.urls import reverse
from django.utils.crypto import salted_hmac
from django.utils.encoding import force_bytes
from django.utils.http import urlsafe_base64_decode, urlsafe_base64_encode

from catalog import audit
from catalog.audit import Actor
from catalog.models import Revision
from toolcrib.lib.errors import Conflict, Invalid, NotFound
from toolcrib.lib.roles import Role, give_role


def setup_open() -> bool:
    """Whether no admin has joined this installation yet."""
    admins = User.objects.filter(is_superuser=True, is_active=True)
    return not admins.exclude(password__startswith=UNUSABLE_PASSWORD_PREFIX).exists()


def setup_code() -> str:
    return salted_hmac("toolcrib.setup", "first admin", algorithm="sha256").hexdigest()[:32]


def right_setup_code(code: str) -> bool:
    return hmac.compare_digest(code.encode(), setup_code().encode()) and setup_open()


async def ready_line(base: str) -> str:
    """The one line a start prints."""
    if await asyncio.to_thread(setup_open):
        return f"Toolcrib is ready: {base}{reverse('setup', args=[setup_code()])}"
    return f"Toolcrib is ready: {base}/"


@transaction.atomic
def set_up(email: str, password: str) -> User:
    """Make the first admin. Of two at once, one wins: the revision row is the lock."""
    Revision.bump()
    if not setup_open():
        raise Conflict("Somebody has set this installation up already.", hint="Sign in instead.")
    user = User(username=clean_name(email), email=email)
    give_role(user, Role.ADMIN)
    _set_password(user, password)
    audit.record(Actor.user(user), "person.setup", user)
    return user


@transaction.atomic
def invite(name: str, role: Role, *, actor: Actor) -> User:
    """Make a person without a password, or change the role of one who has not joined."""
    name = clean_name(name)
    user = User.objects.filter(username=name).first() or User(username=name)
    if user.pk and user.has_usable_password():
        raise Conflict(
            f"{name} has joined already.", hint="Use reset_password for a new password link."
        )
    if "@" in name:
        user.email = name
    give_role(user, role)
    user.set_unusable_password()
    user.save()
    audit.record(actor, "person.invite", user, after={"role": role.word})
    return user


@transaction.atomic
def reset(name: str, *, actor: Actor) -> User:
    user = User.objects.filter(username=clean_name(name)).first()
    if user is None:
        raise NotFound(f"There is nobody called {name}.", hint="manage.py invite adds a person.")
    audit.record(actor, "person.reset", user)
    return user


@transaction.atomic
def change_role(user: User, role: Role, *, actor: Actor) -> User:
    """Give a person another role, which holds from their next request on."""
    user = _locked(user)
    before = kept_role(user)
    if before == role:
        return user
    _keep_an_admin(user)
    give_role(user, role)
    user.save(update_fields=["is_superuser", "is_staff"])
    audit.record(
        actor, "person.role", user, before={"role": before.word}, after={"role": role.word}
    )
    return user


@transaction.atomic
def set_active(user: User, active: bool, *, actor: Actor) -> User:
    """Let a person in again, or keep them out from their next request on."""
    user = _locked(user)
    if user.is_active == active:
        return user
    if not active:
        _keep_an_admin(user)
    user.is_active = active
    user.save(update_fields=["is_active"])
    audit.record(actor, "person.enable" if active else "person.disable", user)
    return user


def _locked(user: User) -> User:
    # The admins are locked with it: of two who step down at once, one stays.
    wanted = User.objects.select_for_update().filter(Q(pk=user.pk) | Q(is_superuser=True))
    found = {one.pk: one for one in wanted.order_by("pk")}.get(user.pk)
    if found is None:
        raise NotFound("This person is gone.", hint="Reload the list.")
    return found


def _keep_an_admin(user: User) -> None:
    others = User.objects.filter(is_superuser=True, is_active=True).exclude(pk=user.pk)
    joined = others.exclude(password__startswith=UNUSABLE_PASSWORD_PREFIX)
    if user.is_superuser and user.is_active and not joined.exists():
        raise Conflict(
            f"{user.username} is the last admin.",
            hint="Make somebody else an admin first.",
            code="last_admin",
        )


def kept_role(user: User) -> Role:
    """Return the role that is kept for a person, disabled or not."""
    if user.is_superuser:
        return Role.ADMIN
    return Role.OPERATOR if user.is_staff else Role.OUTSIDER


def password_path(user: User) -> str:
    """A link that works once: it dies with the password, with a sign-in, and after three days."""
    uid = urlsafe_base64_encode(force_bytes(user.pk))
    return reverse("join", args=[uid, default_token_generator.make_token(user)])


def person_of(uid: str, token: str) -> User | None:
    """Return whom a password link is for, while it is good."""
    try:
        user = User.objects.get(pk=int(urlsafe_base64_decode(uid).decode()), is_active=True)
    except (User.DoesNotExist, ValueError, OverflowError):
        return None
    return user if default_token_generator.check_token(user, token) else None


@transaction.atomic
def choose_password(user: User, password: str) -> User:
    first = not user.has_usable_password()
    _set_password(user, password)
    audit.record(Actor.user(user), "person.join" if first else "person.password", user)
    return user


def clean_name(name: str) -> str:
    name = name.strip().lower()
    if (
        not name
        or len(name) > 150
        or any(char.isspace() or not char.isprintable() for char in name)
    ):
        raise Invalid("A name or e-mail has 1 to 150 characters without spaces.")
    return name


def _set_password(user: User, password: str) -> None:
    try:
        validate_password(password, user)
    except ValidationError as error:
        raise Invalid(" ".join(error.messages), code="weak_password") from error
    user.set_password(password)
    user.save()
