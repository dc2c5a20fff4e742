"""Exceptions with a stable code, a message for people and a hint."""

from collections.abc import Mapping


class ToolcribError(Exception):
    """Base of all errors of this package. `code` is stable; `message` and `hint` are for people."""

    code = "error"
    status = 400

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        code: str | None = None,
        status: int | None = None,
        details: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code or self.code
        self.status = status or self.status
        self.details = dict(details or {})

    @property
    def sentence(self) -> str:
        """Return message and hint as one line."""
        return f"{self.message} {self.hint}".strip()


class Invalid(ToolcribError):
    code = "invalid"
    status = 422


class Conflict(ToolcribError):
    code = "conflict"
    status = 409
