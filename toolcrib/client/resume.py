"""What a resumed run has and what it may still load. Part of toolcrib.client; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolcrib.client.requests import State
from toolcrib.lib.errors import Conflict

CacheKey = tuple[str, tuple[str, ...] | None]
LoaderCache = dict[CacheKey, Any]


@dataclass(frozen=True)
class ResumedState:
    """`pre_loaded_tools` are there already; `remaining_groups` can be loaded from."""

    pre_loaded_tools: list[str]
    remaining_groups: dict[str, list[str]]
    loader_cache: LoaderCache = field(default_factory=dict)


def check_strategy(resume: State, strategy: str) -> None:
    """Refuse a state of another strategy before anything is asked."""
    given = resume.get("strategy")
    if given != strategy:
        raise Conflict(
            f"The state is of a session with the strategy {given}; this one would have {strategy}.",
            hint=f'Open it with strategy="{given}".' if given else "Give the state's strategy.",
            code="strategy_mismatch",
        )


def prepare_resumed_state(
    groups: Mapping[str, Sequence[str]],
    expanded: Mapping[str, Sequence[str] | None],
    strategy: str,
    loader_cache: LoaderCache | None = None,
) -> ResumedState:
    """Work out what a run that goes on has.

    With dispatch, schemas were in results that may be gone from the history, so a group that is
    loaded stays loadable. With inject, what is loaded stands in the tools array and leaves.
    """
    loaded: dict[str, None] = {}
    for group_id, names in expanded.items():
        if group_id in groups:
            loaded |= dict.fromkeys(groups[group_id] if names is None else names)
    if strategy == "dispatch":
        remaining = {group_id: list(names) for group_id, names in groups.items()}
    else:
        remaining = {
            group_id: left
            for group_id, names in groups.items()
            if (left := [name for name in names if name not in loaded])
        }
    return ResumedState(list(loaded), remaining, dict(loader_cache or {}))
