"""Results of custom tools, which agents run themselves and report once, to close the ledger row.

The hourly figures of an hour that is already counted stay as they are.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import F
from django.utils import timezone

from catalog.cache import cached_definition
from catalog.definitions.validation import validators
from sessions_app.ledger import calls as call_ledger
from sessions_app.ledger.calls import CallResponse, CallResult
from sessions_app.ledger.writer import CallRow
from sessions_app.models import Agent, AgentSession, Call, CallAnswer, CallState
from toolcrib.lib.errors import Conflict, Invalid, NotFound
from toolcrib.lib.payloads import check_value, strictest_storage

REPORT_WITHIN = timedelta(days=1)
RESULT_COLUMNS = (
    *("state", "is_error", "finished_at", "result_bytes", "result_sha256", "result_copy"),
    *("error_code", "error_message"),
)


@dataclass(frozen=True)
class Report:
    """What a custom tool returned to the agent that ran it."""

    content: list[dict[str, Any]]
    structured: dict[str, Any] | None = None
    is_error: bool = False


@transaction.atomic
def report_result(agent: Agent, call_id: str, report: Report) -> CallResponse:
    """Record the result of a custom tool's call. The same report again changes nothing.

    Raises NotFound for a call of another agent, Conflict for one that has its result, and Invalid
    for structured content that does not match the tool's output schema.
    """
    check_value([report.content, report.structured], "")
    rows = Call.objects.select_for_update(of=("self",)).select_related("tool", "answer")
    call = None if "\0" in call_id else rows.filter(agent=agent.pk, call_id=call_id).first()
    if call is None:
        raise NotFound("Call not found.", hint="Check the call_id.", code="unknown_call")
    entry = CallRow.from_model(call)
    tool_storage = call.tool.payload_storage if call.tool else ""
    entry.storage = strictest_storage(agent.payload_storage, tool_storage)
    result = CallResult(
        CallState.FAILED if report.is_error else CallState.SUCCEEDED,
        report.is_error,
        report.content,
        report.structured,
        tokens=call.tokens,  # what Toolcrib gave; the model has the result from its own program
        code="tool_error" if report.is_error else "",
        message=f"{call.tool_name} returned an error." if report.is_error else "",
    )
    response = call_ledger.fill_in_result(entry, result)
    if call.state != CallState.CLIENT:
        return _repeated(call, entry, response)
    if call.finished_at is not None and timezone.now() - call.finished_at > REPORT_WITHIN:
        raise Conflict(
            "The result of this call is reported too late: more than 24 hours after the call.",
            hint="Report a result when the tool has run.",
            code="result_too_late",
        )
    if not report.is_error:
        _check_output(call, report)
    for name in RESULT_COLUMNS:
        setattr(call, name, getattr(entry, name))
    call.save(update_fields=RESULT_COLUMNS)
    if report.is_error and call.session_id is not None:
        AgentSession.objects.filter(pk=call.session_id).update(errors=F("errors") + 1)
    answer: CallAnswer | None = getattr(call, "answer", None)
    if answer is not None:  # to a retry with the same idempotency key
        answer.body = response.as_json()
        answer.save(update_fields=["body"])
    return response


def _repeated(call: Call, entry: CallRow, response: CallResponse) -> CallResponse:
    """Return the response to the same report as before. Raises Conflict for any other."""
    is_custom = call.tool is not None and call.tool.server_id is None
    if not is_custom or call.state not in (CallState.SUCCEEDED, CallState.FAILED):
        raise Conflict(
            "This call has no result to report: Toolcrib did not leave it to the agent.",
            hint="Report results of calls with the state client.",
            code="not_a_client_call",
        )
    if (call.state, call.result_sha256) != (entry.state, entry.result_sha256):
        raise Conflict(
            "The result of this call was reported before.",
            hint="A result is reported once.",
            code="result_reported",
        )
    return response


def _check_output(call: Call, report: Report) -> None:
    """Raise Invalid if structured content does not match the output schema of the call's tool."""
    definition = cached_definition(call.definition_id) if call.definition_id else None
    validator = validators.get(definition, "output") if definition else None
    if validator is None:
        return
    problems = ["structured_content is missing"]
    if report.structured is not None:
        is_checked = validator.can_check(report.structured)
        problems = validator.problems(report.structured) if is_checked else []
    if problems:
        raise Invalid(
            f"The result does not match the output schema of {call.tool_name}.",
            hint="Correct structured_content, or report an error with is_error.",
            code="output_invalid",
            details={"problems": problems},
        )
