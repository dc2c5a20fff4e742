"""Calling clients that can ask their user (elicitation)."""

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

# Parameters of elicitation/create to the user's answer, as results of that method.
OnAsk = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class AskingClient:
    """A calling client that can ask its user, and what its user has answered so far."""

    def __init__(
        self,
        modes: Mapping[str, Any],  # its capability `elicitation`
        ask: OnAsk,  # for servers that ask during a call
        input_responses: Mapping[str, Any] | None = None,
        request_state: str | None = None,  # the server's own
        call_id: str = "",  # of the call that asked what is answered
    ) -> None:
        self.modes, self._ask = modes, ask
        self.input_responses, self.request_state = input_responses, request_state
        self.call_id = call_id
        self._asked_seconds, self._asking_since = 0.0, 0.0

    def supports(self, request: Mapping[str, Any]) -> bool:
        """Return whether a request of a server, as `{method, params}`, may be sent to it."""
        params = request.get("params")
        if request.get("method") != "elicitation/create" or not isinstance(params, Mapping):
            return False
        mode = params.get("mode", "form")
        return mode in self.modes or (mode == "form" and not self.modes)

    async def ask(self, params: dict[str, Any]) -> dict[str, Any]:
        """Ask the user; the deadline of the call waits meanwhile."""
        self._asking_since = time.monotonic()
        try:
            return await self._ask(params)
        finally:
            self._asked_seconds, self._asking_since = self.asked_seconds, 0.0

    @property
    def asked_seconds(self) -> float:
        """How long the user was asked so far."""
        running = time.monotonic() - self._asking_since if self._asking_since else 0.0
        return self._asked_seconds + running
