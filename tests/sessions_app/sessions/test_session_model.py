"""Model-based test of sessions: random operations in random order, compared with a model.

Hypothesis opens, loads, searches, forks, closes, resumes and calls through the API while servers
change and groups are edited (session_world.py), and compares every response with session_model.py.
MODEL_STEPS sets the number of steps; by default the suite runs the same few hundred every time.
"""

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from sessions_app.sessions import lifecycle, loading, surface
from tests.support.agent_client import Session
from tests.support.session_model import LoadResult, ModelSession, OverBudget
from tests.support.session_world import BARE_NAMES, PROPERTY_SCHEMAS, CatalogMachine, event_counts

STEPS = int(os.environ.get("MODEL_STEPS") or 300)
STEPS_PER_RUN = 25  # with one world
VALUES = {"number": 1, "text": "one"}
names = st.lists(st.sampled_from([*BARE_NAMES, "nobody"]), max_size=4)
# Situations that a long run must have covered.
COMMON = (
    "over budget", "some names", "whole group", "unknown names", "loaded by search", "preloaded",
    "forked", "resumed", "closed", "refused", "accepted", "again",
)  # fmt: skip
RARE = ("definition_changed", "invalid_arguments", "unknown_tool", "held", "missing")


def fits(version: int, value: str) -> bool:
    return PROPERTY_SCHEMAS[version % 3] in (
        {},
        {"type": {"number": "integer", "text": "string"}[value]},
    )


class Sessions(CatalogMachine):
    """A world, its sessions, and the model of both."""

    sessions = Bundle("sessions")
    ended = Bundle("ended")

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[Session, ModelSession]] = []
        self.fixed: dict[str, tuple[Any, Any]] = {}  # the initial catalog text and tools array
        self.checks = 0

    @initialize(target=sessions, share=st.sampled_from([0.3, 0.6, 10]))
    def first_sessions(self, share: float) -> Any:
        self.create_world(share)
        return multiple(self.open("dispatch", (0, 1, 2), []), self.open("inject", (0, 1, 2), []))

    @rule(
        target=sessions,
        strategy=st.sampled_from(["dispatch", "inject"]),
        which=st.sampled_from([(0, 1, 2), (0, 1, 2), (2, 0), (1,)]),
        preload=names,
    )
    def open(self, strategy: str, which: tuple[int, ...], preload: list[str]) -> Any:
        event_counts["step"] += 1
        known = list(self.world.groups)
        groups = [known[at] for at in which]
        requested = self._tool_names(preload, public=True)
        scope = [group for group in known if group in groups]
        offered = ModelSession(self.world, scope, strategy, set(), self.budget).offered()
        preloaded = self._preloaded(scope) | (set(requested) & offered)
        body = {"strategy": strategy, "mode": "deferred", "groups": groups, "preload": requested}
        cost = sum(self.world.tokens[name] for name in preloaded)
        if set(requested) & offered and cost > self.budget:
            refused = self.client.send("POST", "/sessions", body)
            assert (refused.status, refused["error"]["code"]) == (409, "over_budget")
            return multiple()
        opened = self.client.open(**body)
        initial = {tool["name"] for tool in opened.opened["tools"]} & set(self.world.bare_names)
        model = ModelSession(self.world, scope, strategy, initial, self.budget)
        available = {name for name in requested if name in model.offered()}
        assert available <= initial
        assert sorted(opened.opened["unknown"]) == sorted(set(requested) - available)
        return self._keep(opened, model)

    def _keep(self, session: Session, model: ModelSession) -> tuple[Session, ModelSession]:
        self.pairs.append((session, model))
        row = lifecycle.find_session(self.client.agent, session.id)
        self.fixed[session.id] = (surface.catalog_text(row)[0], surface.tools_array(row))
        return session, model

    @rule(pair=sessions, at=st.integers(0, 2))
    def load_a_group(self, pair: Any, at: int) -> None:
        event_counts["step"] += 1
        self._load(pair, list(self.world.groups)[at], None)

    @rule(pair=sessions, at=st.integers(0, 2), some=names, public=st.booleans())
    def load_some(self, pair: Any, at: int, some: list[str], public: bool) -> None:
        event_counts["step"] += 1
        self._load(pair, list(self.world.groups)[at], self._tool_names(some, public))

    def _load(self, pair: Any, group: str, some: list[str] | None) -> None:
        session, model = pair
        body = {"group_id": group} if some is None else {"group_id": group, "tool_names": some}
        answer = session.post("/load", body)
        try:
            expected: LoadResult = model.load(group, some)
        except OverBudget:
            event_counts["over budget"] += 1
            assert (answer.status, answer["error"]["code"]) == (409, "over_budget")
            return
        result = answer.json
        event_counts["unknown names"] += bool(expected.unknown)
        if expected.code:
            assert result["error"] is not None
            assert (result["expanded"], result["unknown"]) == (False, expected.unknown)
            return
        assert result["error"] is None
        event_counts["whole group" if some is None else "some names"] += bool(expected.names)
        assert set(result["tool_names"]) == expected.names
        assert (result["unknown"], result["remaining"]) == (expected.unknown, expected.remaining)
        if model.strategy == "dispatch":
            self._check_versions(result["schemas"], {**model.rows[group].pins, **model.changed})
        if not expected.unknown:
            newer = tuple(model.changed.items())
            key = (group, None if some is None else tuple(some), newer)
            value = (result["tool_names"], result["schemas"])
            event_counts["again"] += key in model.responses
            assert model.responses.setdefault(key, value) == value

    def _check_versions(self, schemas: Any, pins: dict[str, int]) -> None:
        descriptions = {tool["name"]: tool["description"] for tool in schemas}
        assert descriptions == {name: f"It is version {pins[name]}." for name in descriptions}

    @rule(pair=sessions, some=names, public=st.booleans())
    def preload(self, pair: Any, some: list[str], public: bool) -> None:
        event_counts["step"] += 1
        session, model = pair
        requested = self._tool_names(some, public)
        answer = session.post("/preload", {"tool_names": requested})
        try:
            loaded, unknown, _ = model.load_anywhere(requested)
        except OverBudget:
            event_counts["over budget"] += 1
            assert answer["error"]["code"] == "over_budget"
            return
        assert (set(answer["preloaded"]), answer["unknown"]) == (loaded, unknown)
        event_counts["preloaded"] += bool(loaded)

    @rule(
        pair=sessions,
        name=st.sampled_from([*BARE_NAMES, "nobody"]),
        by=st.booleans(),
        load=st.booleans(),
    )
    def search(self, pair: Any, name: str, by: bool, load: bool) -> None:
        event_counts["step"] += 1
        session, model = pair
        (requested,) = self._tool_names([name], public=by)
        query = {"name": requested} if by else {"pattern": name, "limit": 50}
        answer = session.post("/search", {**query, "load": load})
        if by:
            tool = model.lookup(requested)
            matches = {tool} & model.offered() if tool else set()
        else:
            matches = {tool for tool in model.offered() if name in self.world.bare_names[tool]}
        newly_loaded: set[str] = set()
        if load:
            try:
                newly_loaded = model.load_anywhere(sorted(matches))[2]
            except OverBudget:
                assert answer["error"]["code"] == "over_budget"
                return
        elif by and matches:
            try:
                model.show(*matches)  # a search by name answers in full
            except OverBudget:
                assert answer["error"]["code"] == "over_budget"
                return
        result = answer.json
        event_counts["loaded by search"] += bool(newly_loaded)
        assert {tool["name"] for tool in result["tools"]} == matches
        assert result["total_matches"] == len(matches)
        assert result["newly_loaded"] == len(newly_loaded)
        loaded = {tool["name"] for tool in result["tools"] if tool.get("loaded")}
        assert loaded == matches & model.loaded()

    @rule(
        pair=sessions,
        name=st.sampled_from([*BARE_NAMES, "nobody"]),
        value=st.sampled_from([*VALUES]),
    )
    def call(self, pair: Any, name: str, value: str) -> None:
        event_counts["step"] += 1
        self._call(pair, self._tool_names([name], public=True)[0], value)

    @rule(pair=sessions, at=st.integers(0, 9), value=st.sampled_from([*VALUES]))
    def call_a_loaded_tool(self, pair: Any, at: int, value: str) -> None:
        event_counts["step"] += 1
        loaded = sorted(pair[1].loaded())
        if loaded:
            self._call(pair, loaded[at % len(loaded)], value)

    def _call(self, pair: Any, name: str, value: str) -> None:
        session, model = pair
        before, is_loaded = model.pinned(name), name in model.loaded()
        answer = session.call(name, {"n": VALUES[value]})
        code = answer.json.get("error", {}).get("code", "")
        event_counts[{"": "accepted", "stopping": "accepted"}.get(code, "refused")] += 1
        event_counts[code] += 1
        if name not in model.items:
            assert code == "unknown_tool"
        elif not self.world.is_offered(name):
            assert code in ("held", "missing")
        elif not fits(self.world.versions[name], value):
            changed = before not in (None, self.world.versions[name])
            assert code == ("definition_changed" if changed else "invalid_arguments")
            if changed:  # this version replaces the pinned one
                model.changed[name] = self.world.versions[name]
        elif self.world.bare_names[name] == "tango":  # the agent runs it
            assert (answer["state"], answer["implicit_load"]) == ("client", not is_loaded)
        else:  # accepted, but the test has no connection to the server
            assert (answer.status, code) == (503, "stopping")

    @rule(target=sessions, pair=sessions)
    def fork(self, pair: Any) -> Any:
        event_counts["step"] += 1
        session, model = pair
        answer = session.post("/fork")
        assert answer.status == 201, answer.bytes
        event_counts["forked"] += 1
        assert answer["catalog"]["text"].encode() == session.get("/catalog?format=text").bytes
        return self._keep(Session(self.client, answer), model.fork())

    @rule(target=sessions, pair=sessions, strategy=st.sampled_from(["dispatch", "inject"]))
    def resume(self, pair: Any, strategy: str) -> Any:
        event_counts["step"] += 1
        session, model = pair
        state = session.get("/state").json
        body = {"strategy": strategy, "mode": "deferred", "resume": state, "groups": model.scope}
        answer = self.client.send("POST", "/sessions", body)
        if strategy != model.strategy:
            assert (answer.status, answer["error"]["code"]) == (409, "strategy_mismatch")
            return multiple()
        initial = {tool["name"] for tool in self._tools(answer)} & set(self.world.bare_names)
        fixed = self._preloaded(model.scope)
        resumed = ModelSession(self.world, model.scope, strategy, fixed, self.budget)
        unknown: list[str] = []
        try:
            for group, group_names in state["expanded_groups"].items():
                unknown += resumed.load(group, group_names).unknown
        except OverBudget:
            assert (answer.status, answer["error"]["code"]) == (409, "over_budget")
            return multiple()
        assert answer["unknown"] == unknown
        event_counts["resumed"] += bool(resumed.rows)
        if strategy == "dispatch":
            assert initial == fixed
        else:  # a tool both preloaded and loaded is in the array once
            assert initial == resumed.loaded()
        return self._keep(Session(self.client, answer), resumed)

    def _tools(self, answer: Any) -> list[dict[str, Any]]:
        return answer.json.get("tools", []) if answer.status == 201 else []

    def _preloaded(self, scope: list[str]) -> set[str]:
        """Return the preloaded tools: custom tools are preloaded by default."""
        public = self.custom.public_name
        inside = self.mixed.group_id in scope and self.world.is_offered(public)
        return {public} if inside else set()

    @rule(pair=consumes(sessions), target=ended)
    def close(self, pair: Any) -> Any:
        event_counts["step"] += 1
        session, model = pair
        assert session.post("/close").status == 200
        model.open = False
        event_counts["closed"] += 1
        return pair

    @rule(pair=ended, what=st.sampled_from(["/load", "/preload", "/search", "/call", "/fork"]))
    def use_an_ended_session(self, pair: Any, what: str) -> None:
        event_counts["step"] += 1
        session, model = pair
        bodies = {
            "/load": {"group_id": model.scope[0]},
            "/preload": {"tool_names": BARE_NAMES},
            "/search": {"pattern": "kilo", "load": True},
            "/call": {"tool_name": model.items[0], "arguments": {"n": 1}},
        }
        answer = session.post(what, bodies.get(what))
        assert (answer.status, answer["error"]["code"]) == (409, "session_closed")

    @rule(target=sessions, pair=ended)
    def resume_an_ended_session(self, pair: Any) -> Any:
        return self.resume(pair, pair[1].strategy)

    # --- Invariants -------------------------------------------------------------------------------

    @invariant()
    def sessions_match_the_model(self) -> None:
        """Compare the newest session and one other, with the functions behind the API."""
        self.checks += 1
        for session, model in self.pairs[-1:] + self.pairs[self.checks % 7 : self.checks % 7 + 1]:
            row = lifecycle.find_session(self.client.agent, session.id)
            state = loading.export_state(row)["expanded_groups"]
            assert list(state) == list(model.state()), "groups are in load order"
            assert {
                group: None if loaded is None else set(loaded) for group, loaded in state.items()
            } == model.state()
            stats = loading.stats(row)
            assert set(stats["tool_names"]) == model.offered()
            assert stats["loaded"] == len(model.loaded() & model.offered())
            assert stats["total_registered"] == len(model.offered())
            fixed = sum(self.world.tokens[name] for name in model.preloaded)
            assert row.tokens_loaded == model.spent <= max(self.budget, fixed)
            text, tools = self.fixed[session.id]
            array = surface.tools_array(row)
            if model.strategy == "dispatch":
                assert (surface.catalog_text(row)[0], array) == (text, tools)
            else:
                assert array[: len(tools)] == tools, "loaded tools are appended, never moved"
                self.fixed[session.id] = (text, array)
                assert {tool["name"] for tool in array} & set(
                    self.world.bare_names
                ) == model.loaded()


@pytest.mark.timeout(3600)
def test_sessions_match_their_model(db):
    event_counts.clear()
    soak = "MODEL_STEPS" in os.environ
    while event_counts["step"] < STEPS:
        run_state_machine_as_test(
            Sessions,
            settings=settings(
                max_examples=max(1, min(STEPS, 2000) // 12),
                stateful_step_count=STEPS_PER_RUN,
                deadline=None,
                database=None,
                derandomize=not soak,  # the suite takes the same steps every time
                suppress_health_check=list(HealthCheck),
                print_blob=True,
            ),
        )
        if not soak:
            break
    print(f"steps of the model: {event_counts['step']}; {dict(event_counts)}")  # noqa: T201 - read by the bench
    # The steps of a short run depend on the text of this file: only a long run must cover all.
    required = [*(COMMON if STEPS > 1000 else ()), *(RARE if STEPS > 5000 else ())]
    assert event_counts["step"] >= 200
    assert [what for what in required if not event_counts[what]] == [], (
        "the run did not cover these"
    )
