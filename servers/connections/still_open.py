"""Which agent sessions are still open. The app that has them says who knows, and imports us."""

from collections.abc import Callable, Collection

StillOpen = Callable[[Collection[str]], Collection[str]]

_knows: StillOpen | None = None


def told_by(knows: StillOpen) -> None:
    """Have this function say which of some sessions are open."""
    global _knows
    _knows = knows


def ended(sessions: Collection[str]) -> set[str]:
    """Return those of these sessions that are over; none where nobody knows."""
    if _knows is None or not sessions:
        return set()
    return {*sessions} - {*_knows(sessions)}
