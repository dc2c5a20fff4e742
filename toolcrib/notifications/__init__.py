"""Notifications to webhooks, Slack and e-mail: events of sessions, alerts, a weekly digest."""

from sessions_app.ledger.event_messages import NAMES

RAISED, RESOLVED, DIGEST, TEST = "alert.raised", "alert.resolved", "digest.weekly", "test"
EVENTS = (RAISED, RESOLVED, DIGEST, *NAMES)
