"""First-admin setup, invitations, password links and roles. There is no default password."""

import hmac
import re

from django.conf import settings
from django.contrib.auth.hashers import UNUSABLE_PASSWORD_PREFIX
from django.contrib.auth.models import User
from django.contrib.auth.password_validation import validate_password
from django.contrib.auth.tokens import default_token_generator
from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Q, QuerySet
from django.urls import reverse
from django.utils.crypto import salted_hmac
from django.utils.encoding import force_bytes
from django.utils.http import urlsafe_base64_decode, urlsafe_base64_encode

from catalog import audit
from catalog.audit import Actor
from catalog.models import Revision
from toolcrib.lib.errors import Conflict, Invalid, NotFound
from toolcrib.lib.roles import Role, give_role, stored_role


def _joined_admins() -> QuerySet[User]:
    admins = User.objects.filter(is_superuser=True, is_active=True)
    return admins.exclude(password__startswith=UNUSABLE_PASSWORD_PREFIX)


def setup_open() -> bool:
    """Return whether no admin has set a password yet."""
    return not _joined_admins().exists()


def setup_code() -> str:
    return salted_hmac("toolcrib.setup", "first admin", algorithm="sha256").hexdigest()[:32]


def is_valid_setup_code(code: str) -> bool:
    return hmac.compare_digest(code.encode(), setup_code().encode()) and setup_open()


def ready_line(base: str) -> str:
    """Return the line that is printed at startup, with the setup link if setup is open."""
    if setup_open():
        return f"Toolcrib is ready: {base}{reverse('setup', args=[setup_code()])}"
    return f"Toolcrib is ready: {base}/"


@transaction.atomic
def set_up(email: str, password: str) -> User:
    """Create the first admin. Locks the revision row, so that concurrent setups create one."""
    Revision.bump()
    if not setup_open():
        raise Conflict("This installation is already set up.", hint="Sign in instead.")
    user = User(username=normalize_name(email), email=email)
    _set_password(user, password)
    give_role(user, Role.ADMIN)
    audit.record(Actor.user(user), "person.setup", user)
    return user


@transaction.atomic
def invite(name: str, role: Role, *, actor: Actor) -> User:
    """Create a user without a password, or change the role of one who has not joined."""
    name = normalize_name(name)
    user = User.objects.filter(username=name).first() or User(username=name)
    if user.pk and user.has_usable_password():
        raise Conflict(
            f"{name} has already joined.", hint="Use reset_password for a new password link."
        )
    if "@" in name:
        user.email = name
    user.set_unusable_password()
    give_role(user, role)
    audit.record(actor, "person.invite", user, after={"role": role.label})
    return user


@transaction.atomic
def record_password_reset(name: str, *, actor: Actor) -> User:
    """Return the user for a new password link and record the request in the audit log."""
    user = User.objects.filter(username=normalize_name(name)).first()
    if user is None:
        raise NotFound(f"No user named {name}.", hint="Use `manage.py invite` to add a person.")
    audit.record(actor, "person.reset", user)
    return user


@transaction.atomic
def change_role(user: User, role: Role, *, actor: Actor) -> None:
    """Change a user's role. Takes effect with their next request."""
    user = _lock(user)
    before = stored_role(user)
    if before == role:
        return
    _require_another_admin(user)
    give_role(user, role)
    audit.record(
        actor, "person.role", user, before={"role": before.label}, after={"role": role.label}
    )


@transaction.atomic
def set_active(user: User, active: bool, *, actor: Actor) -> None:
    """Enable or disable a user. Takes effect with their next request."""
    user = _lock(user)
    if user.is_active == active:
        return
    if not active:
        _require_another_admin(user)
    user.is_active = active
    user.save(update_fields=["is_active"])
    audit.record(actor, "person.enable" if active else "person.disable", user)


def _lock(user: User) -> User:
    # Lock all admins too: if two step down at the same time, one must stay.
    rows = User.objects.select_for_update().filter(Q(pk=user.pk) | Q(is_superuser=True))
    locked = {row.pk: row for row in rows.order_by("pk")}.get(user.pk)
    if locked is None:
        raise NotFound("This person was deleted.", hint="Reload the list.")
    return locked


def _require_another_admin(user: User) -> None:
    others = _joined_admins().exclude(pk=user.pk)
    if user.is_superuser and user.is_active and not others.exists():
        raise Conflict(
            f"{user.username} is the last admin.",
            hint="Assign the admin role to another person first.",
            code="last_admin",
        )


def password_link(user: User) -> str:
    """Return a one-time link, which a password change, a sign-in or three days invalidate."""
    uid = urlsafe_base64_encode(force_bytes(user.pk))
    path = reverse("join", args=[uid, default_token_generator.make_token(user)])
    return f"{settings.PUBLIC_URL}{path}"


def find_link_user(uid: str, token: str) -> User | None:
    """Return the user of a password link, or None if the link is invalid."""
    try:
        user = User.objects.get(pk=int(urlsafe_base64_decode(uid).decode()), is_active=True)
    except (User.DoesNotExist, ValueError, OverflowError):
        return None
    return user if default_token_generator.check_token(user, token) else None


@transaction.atomic
def set_password(user: User, password: str) -> User:
    """Set a password through a link: accept an invitation or reset the password."""
    is_first = not user.has_usable_password()
    _set_password(user, password)
    audit.record(Actor.user(user), "person.join" if is_first else "person.password", user)
    return user


@transaction.atomic
def record_own_password(user: User) -> None:
    """Record that a person changed their own password, while signed in."""
    audit.record(Actor.user(user), "person.password", user)


def normalize_name(name: str) -> str:
    name = name.strip().lower()
    if not re.fullmatch(r"\S{1,150}", name) or not name.isprintable():
        raise Invalid("A name or e-mail must have 1 to 150 characters without spaces.")
    return name


def _set_password(user: User, password: str) -> None:
    try:
        validate_password(password, user)
    except ValidationError as error:
        raise Invalid(" ".join(error.messages), code="weak_password") from error
    user.set_password(password)
    user.save()
