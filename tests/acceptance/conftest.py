"""Fixtures of the acceptance tests: two servers, and an agent with all groups."""

from tests.sessions_app.conftest import github, scout, session, slack

__all__ = ["github", "scout", "session", "slack"]
