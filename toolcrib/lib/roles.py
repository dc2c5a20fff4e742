"""User roles and the role check used by every page.

admin: edits. operator: reads everything and approves. viewer: reads pages and figures, without
payloads, exports and decisions. outsider: signed in without access.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser, User
from django.http import HttpRequest, HttpResponseBase

from toolcrib.lib.errors import Forbidden

P = ParamSpec("P")
R = TypeVar("R", bound=HttpResponseBase)


@dataclass(frozen=True)
class Actor:
    """The author of a change, as a value: the audit log stays readable after a user is deleted."""

    kind: str  # user, token, agent, command, system
    label: str
    id: int | None = None

    @classmethod
    def user(cls, user: AbstractBaseUser) -> "Actor":
        return cls("user", user.get_username(), user.pk)

    @classmethod
    def command(cls, name: str) -> "Actor":
        return cls("command", f"manage.py {name}")


SYSTEM = Actor("system", "Toolcrib")


class Role(IntEnum):
    ANONYMOUS = 0
    OUTSIDER = 1
    VIEWER = 2
    OPERATOR = 3
    ADMIN = 4

    @property
    def label(self) -> str:
        return self.name.lower()


def role_of(user: AbstractBaseUser | AnonymousUser) -> Role:
    return stored_role(user) if isinstance(user, User) and user.is_active else Role.ANONYMOUS


def stored_role(user: User) -> Role:
    """Return a user's role, also if the user is disabled."""
    if user.is_superuser:
        return Role.ADMIN
    if user.is_staff:
        return Role.OPERATOR
    return Role.VIEWER if hasattr(user, "viewer") else Role.OUTSIDER


def give_role(user: User, role: Role) -> None:
    """Store the role: admins and operators as flags of the user, viewers as a row of their own."""
    user.is_superuser = role == Role.ADMIN
    user.is_staff = role in (Role.ADMIN, Role.OPERATOR)
    user.save()
    viewers = User._meta.get_field("viewer").related_model  # an app's: this package imports none
    viewers._default_manager.filter(user=user).delete()
    if role == Role.VIEWER:
        viewers._default_manager.create(user=user)
    user.refresh_from_db()


class RoleRequired(Forbidden):
    code = "role_needed"

    def __init__(self, required: Role) -> None:
        admins = User.objects.filter(is_superuser=True, is_active=True)
        names = ", ".join(admins.values_list("username", flat=True)[:3])
        super().__init__(
            f"This requires the role {required.label}.",
            hint=f"Ask an admin to assign it: {names}." if names else "There is no admin yet.",
        )
        self.required = required


def require(required: Role, user: AbstractBaseUser | AnonymousUser) -> None:
    """Raise RoleRequired unless the user has at least this role."""
    if role_of(user) < required:
        raise RoleRequired(required)


def role_required(
    required: Role, write: Role | None = None
) -> Callable[[Callable[Concatenate[HttpRequest, P], R]], Callable[Concatenate[HttpRequest, P], R]]:
    """Require a role to open a page, and with `write` another one to send its forms."""

    def decorate(
        view: Callable[Concatenate[HttpRequest, P], R],
    ) -> Callable[Concatenate[HttpRequest, P], R]:
        @wraps(view)
        def checked(request: HttpRequest, /, *args: P.args, **kwargs: P.kwargs) -> R:
            reads = request.method in ("GET", "HEAD")
            require(required if reads or write is None else write, request.user)
            return view(request, *args, **kwargs)

        checked.required_role = required  # type: ignore[attr-defined]
        checked.write_role = write or required  # type: ignore[attr-defined]
        return checked

    return decorate


admin_required = role_required(Role.ADMIN)
operator_required = role_required(Role.OPERATOR)
viewer_required = role_required(Role.VIEWER)


def required_role_of(view: object, *, write: bool = False) -> Role:
    """Return the role that a view requires; admin for a view that declares none."""
    role: Role = getattr(view, "write_role" if write else "required_role", Role.ADMIN)
    return role


def actor_of(request: HttpRequest) -> Actor:
    """Return the actor of a page request: the signed-in user."""
    user: Any = request.user
    return Actor.user(user)


def key_actor(request: HttpRequest) -> Actor:
    """Return the actor of an API request: the key that authenticated it."""
    actor: Actor = request.actor  # type: ignore[attr-defined]
    return actor
