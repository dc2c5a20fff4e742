"""`extract(value, type)` of scripts: a function of the deployment, whose answer is validated.

`TOOLCRIB_EXTRACT` names it: `package.module.function`. It gets the value and a JSON Schema, returns
a JSON value or a coroutine of one, and may ask a small model. Without it, scripts are told so.
"""

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from django.conf import settings
from django.utils.module_loading import import_string

from catalog.definitions.validation import Validator
from sessions_app.scripts.engines import Answer, Failure, Value
from sessions_app.scripts.output import TooLarge, as_json

logger = logging.getLogger(__name__)

UNBOUND = "extract is not available: this installation binds no model to it."
USAGE = "extract takes a value and a type: str, int, float, bool, list, dict or a JSON Schema."
# By the names of Python's types and of JSON's.
NAMES = {
    "str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array",
    "dict": "object", "NoneType": "null",
}  # fmt: skip


class _Refused(Exception):
    """What the script gets as a RuntimeError."""


async def extract(arguments: Mapping[str, object]) -> Answer:
    """Return what the deployment's function makes of a value, if it is of the type."""
    try:
        return Value(await _extract(arguments))
    except _Refused as refused:
        return Failure("RuntimeError", str(refused))


async def _extract(arguments: Mapping[str, object]) -> object:
    if not settings.EXTRACT:
        raise _Refused(UNBOUND)
    if arguments.keys() != {"value", "type"}:
        raise _Refused(USAGE)
    schema, validator = await asyncio.to_thread(_read_type, arguments["type"])
    try:
        function: Callable[..., Any] = import_string(settings.EXTRACT)
        given = await asyncio.to_thread(as_json, arguments["value"])
        found = await asyncio.to_thread(function, given, schema)
        answer = await asyncio.to_thread(
            as_json, await found if inspect.isawaitable(found) else found
        )
    except TooLarge:
        raise _Refused("extract: the value has too many parts.") from None
    except Exception:
        logger.exception("The function %s of TOOLCRIB_EXTRACT failed", settings.EXTRACT)
        raise _Refused("extract failed. The log of this installation says why.") from None
    if not validator.can_check(answer):
        raise _Refused("extract: the answer is too large to be checked.")
    if problems := await asyncio.to_thread(validator.problems, answer):
        raise _Refused(f"extract: the answer is not of the type: {'; '.join(problems)[:1_000]}")
    return answer


def _read_type(wanted: object) -> tuple[dict[str, Any], Validator]:
    name = wanted.__name__ if isinstance(wanted, type) else wanted
    if isinstance(name, str):
        name = NAMES.get(name, name)
        schema: Any = {"type": name} if name in NAMES.values() else None
    else:
        schema = wanted
    if not isinstance(schema, dict):
        raise _Refused(USAGE)
    try:
        schema = as_json(schema)
        return schema, Validator(schema)
    except (TooLarge, RecursionError):
        raise _Refused("extract: the schema has too many parts.") from None
    except Exception as error:  # noqa: BLE001 - of the validator's library; the script wrote it
        raise _Refused(f"extract: the type is not a valid JSON Schema: {error}"[:500]) from None
