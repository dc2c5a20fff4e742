"""State of a resumed run: loaded tools and groups that can still be loaded. No I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolcrib_client.errors import Conflict
from toolcrib_client.requests import State

CacheKey = tuple[str, tuple[str, ...] | None]
LoaderCache = dict[CacheKey, Any]


@dataclass(frozen=True)
class ResumedState:
    """`pre_loaded_tools` are already loaded; `remaining_groups` can still be loaded."""

    pre_loaded_tools: list[str]
    remaining_groups: dict[str, list[str]]
    loader_cache: LoaderCache = field(default_factory=dict)


def check_strategy(resume: State, strategy: str) -> None:
    """Raise Conflict for a state of another strategy, before any request is sent."""
    state_strategy = resume.get("strategy")
    if state_strategy != strategy:
        raise Conflict(
            f"The state is from a session with strategy {state_strategy}, not {strategy}.",
            hint=f'Open the session with strategy="{state_strategy}".'
            if state_strategy
            else "Pass a state that contains its strategy.",
            code="strategy_mismatch",
        )


def prepare_resumed_state(
    groups: Mapping[str, Sequence[str]],
    expanded: Mapping[str, Sequence[str] | None],
    strategy: str,
    loader_cache: LoaderCache | None = None,
) -> ResumedState:
    """Compute the state of a resumed run.

    With strategy dispatch, schemas were in results that may be missing from the history, so loaded
    groups can be loaded again. With inject, loaded tools are in the tools array and are removed
    from the remaining groups.
    """
    loaded: dict[str, None] = {}
    for group_id, names in expanded.items():
        if group_id in groups:
            loaded |= dict.fromkeys(groups[group_id] if names is None else names)
    if strategy == "dispatch":
        remaining = {group_id: list(names) for group_id, names in groups.items()}
    else:
        remaining = {
            group_id: rest
            for group_id, names in groups.items()
            if (rest := [name for name in names if name not in loaded])
        }
    return ResumedState(list(loaded), remaining, dict(loader_cache or {}))
