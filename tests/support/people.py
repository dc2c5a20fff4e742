"""Users with a role."""

from django.contrib.auth.models import User

from toolcrib.lib.roles import Role, give_role

PASSWORD = "a long and quiet river"


def make_person(name: str, role: Role, password: str | None = None) -> User:
    """Create a user. Without a password there is no sign-in, and no time is spent on hashing."""
    user = User(username=name)
    give_role(user, role)
    user.set_password(password)  # None is an unusable password
    user.save()
    return user
