"""Exceptions with one response format: a stable code, a message and a hint.

Imports nothing from the project, so every app can import it.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any


class ToolcribError(Exception):
    """An error the caller can correct. `code` is stable; `message` and `hint` are for people."""

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

    def as_json(self) -> dict[str, object]:
        body: dict[str, object] = {"code": self.code, "message": self.message, "hint": self.hint}
        if self.details:
            body["details"] = self.details
        return {"error": body}


class NotFound(ToolcribError):
    code = "not_found"
    status = 404


class Invalid(ToolcribError):
    code = "invalid"
    status = 422


class InvalidRequest(Invalid):
    """A request that does not match the endpoint's schema; `problems` as pydantic reports them."""

    def __init__(self, problems: Iterable[Mapping[str, Any]]) -> None:
        described = [
            {"at": _path(problem["loc"]), "problem": problem["msg"].removeprefix("Value error, ")}
            for problem in islice(problems, 50)
        ]
        message = "The request does not match the schema of this endpoint"
        if described:
            message = f"{message}: {described[0]['at']}: {described[0]['problem']}".rstrip(".")
        super().__init__(
            f"{message}.",
            hint="See details and /api/v1/docs.",
            details={"problems": described},
        )


def _path(location: Sequence[object]) -> str:
    """Return the path of a field as it was sent: without the name of a body's parameter."""
    parts = (location[2:] or ["body"]) if location[0] == "body" else location
    return ".".join(map(str, parts))


class MalformedBody(ToolcribError):
    code = "bad_request"

    def __init__(self) -> None:
        super().__init__("The request body could not be parsed.", hint="Send valid JSON in UTF-8.")


class UnstorableValue(Invalid):
    def __init__(self) -> None:
        super().__init__(
            "The request contains a value that cannot be stored or queried.",
            hint="Remove NUL characters and out-of-range numbers.",
        )


class Conflict(ToolcribError):
    code = "conflict"
    status = 409


class Forbidden(ToolcribError):
    code = "forbidden"
    status = 403


# What SQLite and PostgreSQL report if the disk or the file is at fault, in lower case.
STORAGE_PROBLEMS = {
    "disk is full": "The disk is full.",
    "no space left": "The disk is full.",
    "readonly database": "The database is read-only.",
    "read-only transaction": "The database is read-only.",
    "malformed": "The database file is damaged.",
    "not a database": "The database file is damaged.",
    "unable to open database file": "The database file cannot be opened.",
    "disk i/o error": "The disk reports errors.",
}


def storage_problem(error: BaseException) -> str:
    """Return a sentence for an error of the disk or the database file; empty for other errors."""
    text = str(error).lower()
    return next((known for part, known in STORAGE_PROBLEMS.items() if part in text), "")


class DatabaseUnavailable(ToolcribError):
    code = "busy"
    status = 503

    def __init__(self, cause: BaseException | None = None) -> None:
        problem = storage_problem(cause) if cause is not None else ""
        super().__init__(
            problem or "Database unavailable.",
            hint="Try again." if not problem else "An operator has to act; try again later.",
            details={"retry_after": 30 if problem else 2},
        )


class InternalError(ToolcribError):
    """An unexpected failure in Toolcrib, logged under the request id."""

    code = "internal"
    status = 500

    def __init__(self, request_id: str) -> None:
        super().__init__("Internal server error.", hint=f"See request {request_id} in the log.")
