"""Sessions agree with their model, whatever is done to them and in whatever order.

Hypothesis opens, loads, searches, forks, closes, resumes and calls through the API while servers
change and groups are edited (session_world.py), and compares every answer with session_model.py.
MODEL_STEPS sets how many steps; the suite takes a few hundred, always the same ones.
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
from tests.support.session_model import Loaded, ModelSession, OverBudget
from tests.support.session_world import BARE, SHAPES, Changing, seen

STEPS = int(os.environ.get("MODEL_STEPS") or 300)
IN_A_RUN = 25  # steps with one world
VALUES = {"number": 1, "text": "one"}
names = st.lists(st.sampled_from([*BARE, "nobody"]), max_size=4)
# What must have happened for the run to show anything.
TELLING = (
    "over budget", "some names", "whole group", "unknown names", "loaded by search", "preloaded",
    "forked", "resumed", "closed", "refused", "accepted", "again",
)  # fmt: skip
RARE = ("definition_changed", "invalid_arguments", "unknown_tool", "held", "missing")


def fits(version: int, value: str) -> bool:
    return SHAPES[version % 3] in ({}, {"type": {"number": "integer", "text": "string"}[value]})


class Sessions(Changing):
    """One world, its sessions, and the model of both."""

    sessions = Bundle("sessions")
    ended = Bundle("ended")

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[Session, ModelSession]] = []
        self.fixed: dict[str, tuple[Any, Any]] = {}  # what a model was shown at first
        self.looked = 0

    @initialize(target=sessions, share=st.sampled_from([0.3, 0.6, 10]))
    def first_sessions(self, share: float) -> Any:
        self.begin(share)
        return multiple(self.open("dispatch", (0, 1, 2), []), self.open("inject", (0, 1, 2), []))

    @rule(
        target=sessions,
        strategy=st.sampled_from(["dispatch", "inject"]),
        which=st.sampled_from([(0, 1, 2), (0, 1, 2), (2, 0), (1,)]),
        preload=names,
    )
    def open(self, strategy: str, which: tuple[int, ...], preload: list[str]) -> Any:
        seen["step"] += 1
        known = list(self.world.groups)
        wanted = [known[at] for at in which]
        asked = self._asked(preload, public=True)
        opened = self.client.open(strategy=strategy, mode="deferred", groups=wanted, preload=asked)
        scope = [group for group in known if group in wanted]
        shown = {tool["name"] for tool in opened.opened["tools"]} & set(self.world.own)
        model = ModelSession(self.world, scope, strategy, shown, self.budget)
        found = {name for name in asked if name in model.offered()}
        assert found <= shown
        assert sorted(opened.opened["unknown"]) == sorted(set(asked) - found)
        return self._keep(opened, model)

    def _keep(self, session: Session, model: ModelSession) -> tuple[Session, ModelSession]:
        self.pairs.append((session, model))
        row = lifecycle.find_session(self.client.agent, session.id)
        self.fixed[session.id] = (surface.catalog_text(row)[0], surface.tools_array(row))
        return session, model

    @rule(pair=sessions, at=st.integers(0, 2))
    def load_a_group(self, pair: Any, at: int) -> None:
        seen["step"] += 1
        self._load(pair, list(self.world.groups)[at], None)

    @rule(pair=sessions, at=st.integers(0, 2), some=names, public=st.booleans())
    def load_some(self, pair: Any, at: int, some: list[str], public: bool) -> None:
        seen["step"] += 1
        self._load(pair, list(self.world.groups)[at], self._asked(some, public))

    def _load(self, pair: Any, group: str, some: list[str] | None) -> None:
        session, model = pair
        wish = {"group_id": group} if some is None else {"group_id": group, "tool_names": some}
        answer = session.post("/load", wish)
        try:
            wanted: Loaded = model.load(group, some)
        except OverBudget:
            seen["over budget"] += 1
            assert (answer.status, answer["error"]["code"]) == (409, "over_budget")
            return
        told = answer.json
        seen["unknown names"] += bool(wanted.unknown)
        if wanted.code:
            assert told["error"] is not None
            assert (told["expanded"], told["unknown"]) == (False, wanted.unknown)
            return
        assert told["error"] is None
        seen["whole group" if some is None else "some names"] += bool(wanted.names)
        assert set(told["tool_names"]) == wanted.names
        assert (told["unknown"], told["remaining"]) == (wanted.unknown, wanted.remaining)
        if model.strategy == "dispatch":
            self._check_versions(told["schemas"], {**model.rows[group].pins, **model.changed})
        if not wanted.unknown:
            newer = tuple(model.changed.items())
            key = (group, None if some is None else tuple(some), newer)
            same = (told["tool_names"], told["schemas"])
            seen["again"] += key in model.memory
            assert model.memory.setdefault(key, same) == same

    def _check_versions(self, schemas: Any, pins: dict[str, int]) -> None:
        shown = {tool["name"]: tool["description"] for tool in schemas}
        assert shown == {name: f"It is version {pins[name]}." for name in shown}

    @rule(pair=sessions, some=names, public=st.booleans())
    def preload(self, pair: Any, some: list[str], public: bool) -> None:
        seen["step"] += 1
        session, model = pair
        asked = self._asked(some, public)
        answer = session.post("/preload", {"tool_names": asked})
        try:
            done, unknown, _ = model.load_anywhere(asked)
        except OverBudget:
            seen["over budget"] += 1
            assert answer["error"]["code"] == "over_budget"
            return
        assert (set(answer["preloaded"]), answer["unknown"]) == (done, unknown)
        seen["preloaded"] += bool(done)

    @rule(
        pair=sessions, name=st.sampled_from([*BARE, "nobody"]), by=st.booleans(), load=st.booleans()
    )
    def search(self, pair: Any, name: str, by: bool, load: bool) -> None:
        seen["step"] += 1
        session, model = pair
        (asked,) = self._asked([name], public=by)
        wish = {"name": asked} if by else {"pattern": name, "limit": 50}
        answer = session.post("/search", {**wish, "load": load})
        if by:
            tool = model.lookup(asked)
            found = {tool} & model.offered() if tool else set()
        else:
            found = {tool for tool in model.offered() if name in self.world.own[tool]}
        fresh: set[str] = set()
        if load:
            try:
                fresh = model.load_anywhere(sorted(found))[2]
            except OverBudget:
                assert answer["error"]["code"] == "over_budget"
                return
        told = answer.json
        seen["loaded by search"] += bool(fresh)
        assert {tool["name"] for tool in told["tools"]} == found
        assert (told["total_matches"], told["newly_loaded"]) == (len(found), len(fresh))
        loaded = {tool["name"] for tool in told["tools"] if tool["loaded"]}
        assert loaded == found & model.loaded()

    @rule(pair=sessions, name=st.sampled_from([*BARE, "nobody"]), value=st.sampled_from([*VALUES]))
    def call(self, pair: Any, name: str, value: str) -> None:
        seen["step"] += 1
        self._call(pair, self._asked([name], public=True)[0], value)

    @rule(pair=sessions, at=st.integers(0, 9), value=st.sampled_from([*VALUES]))
    def call_what_is_loaded(self, pair: Any, at: int, value: str) -> None:
        seen["step"] += 1
        loaded = sorted(pair[1].loaded())
        if loaded:
            self._call(pair, loaded[at % len(loaded)], value)

    def _call(self, pair: Any, asked: str, value: str) -> None:
        session, model = pair
        before = model.pinned(asked)
        answer = session.call(asked, {"n": VALUES[value]})
        code = answer.json.get("error", {}).get("code", "")
        seen[{"": "accepted", "stopping": "accepted"}.get(code, "refused")] += 1
        seen[code] += 1
        if asked not in model.items:
            assert code == "unknown_tool"
        elif not self.world.is_offered(asked):
            assert code in ("held", "missing")
        elif not fits(self.world.version[asked], value):
            changed = before not in (None, self.world.version[asked])
            assert code == ("definition_changed" if changed else "invalid_arguments")
            if changed:  # from now on this version is the one that counts
                model.changed[asked] = self.world.version[asked]
        elif self.world.own[asked] == "tango":  # the agent runs it
            assert (answer["state"], answer["implicit_load"]) == ("client", before is None)
        else:  # accepted, and no connection is there in a test
            assert (answer.status, code) == (503, "stopping")

    @rule(target=sessions, pair=sessions)
    def fork(self, pair: Any) -> Any:
        seen["step"] += 1
        session, model = pair
        answer = session.post("/fork")
        assert answer.status == 201, answer.bytes
        seen["forked"] += 1
        assert answer["catalog"]["text"].encode() == session.get("/catalog?format=text").bytes
        return self._keep(Session(self.client, answer), model.fork())

    @rule(target=sessions, pair=sessions, strategy=st.sampled_from(["dispatch", "inject"]))
    def resume(self, pair: Any, strategy: str) -> Any:
        seen["step"] += 1
        session, model = pair
        state = session.get("/state").json
        wish = {"strategy": strategy, "mode": "deferred", "resume": state, "groups": model.scope}
        answer = self.client.send("POST", "/sessions", wish)
        if strategy != model.strategy:
            assert (answer.status, answer["error"]["code"]) == (409, "strategy_mismatch")
            return multiple()
        shown = {tool["name"] for tool in self._tools(answer)} & set(self.world.own)
        again = ModelSession(self.world, model.scope, strategy, set(), self.budget)
        unknown: list[str] = []
        try:
            for group, kept in state["expanded_groups"].items():
                unknown += again.load(group, kept).unknown
        except OverBudget:
            assert (answer.status, answer["error"]["code"]) == (409, "over_budget")
            return multiple()
        assert answer["unknown"] == unknown
        seen["resumed"] += bool(again.rows)
        at_once = shown - again.loaded() if strategy == "inject" else shown
        again.at_once = {name: self.world.version[name] for name in at_once}
        if strategy == "inject":  # what was shown at once and loaded too stands there once
            again.at_once |= {
                name: self.world.version[name]
                for name in self._preloaded(model.scope) & again.loaded()
            }
        return self._keep(Session(self.client, answer), again)

    def _tools(self, answer: Any) -> list[dict[str, Any]]:
        return answer.json.get("tools", []) if answer.status == 201 else []

    def _preloaded(self, scope: list[str]) -> set[str]:
        """Custom tools are there from the start."""
        public = self.custom.public_name
        inside = self.mixed.group_id in scope and self.world.is_offered(public)
        return {public} if inside else set()

    @rule(pair=consumes(sessions), target=ended)
    def close(self, pair: Any) -> Any:
        seen["step"] += 1
        session, model = pair
        assert session.post("/close").status == 200
        model.open = False
        seen["closed"] += 1
        return pair

    @rule(pair=ended, what=st.sampled_from(["/load", "/preload", "/search", "/call", "/fork"]))
    def use_one_that_has_ended(self, pair: Any, what: str) -> None:
        seen["step"] += 1
        session, model = pair
        bodies = {
            "/load": {"group_id": model.scope[0]},
            "/preload": {"tool_names": BARE},
            "/search": {"pattern": "kilo", "load": True},
            "/call": {"tool_name": model.items[0], "arguments": {"n": 1}},
        }
        answer = session.post(what, bodies.get(what))
        assert (answer.status, answer["error"]["code"]) == (409, "session_closed")

    @rule(target=sessions, pair=ended)
    def resume_one_that_has_ended(self, pair: Any) -> Any:
        return self.resume(pair, pair[1].strategy)

    # --- What always holds ------------------------------------------------------------------------

    @invariant()
    def sessions_are_as_the_model_says(self) -> None:
        """Look at one session after the other, by the functions behind the API."""
        self.looked += 1
        for session, model in self.pairs[-1:] + self.pairs[self.looked % 7 : self.looked % 7 + 1]:
            row = lifecycle.find_session(self.client.agent, session.id)
            state = loading.export_state(row)["expanded_groups"]
            assert list(state) == list(model.state()), "groups stand in the order of their loads"
            assert {
                group: None if kept is None else set(kept) for group, kept in state.items()
            } == model.state()
            stats = loading.stats(row)
            assert set(stats["tool_names"]) == model.loaded() & model.offered()
            assert stats["total_registered"] == len(model.offered())
            assert row.tokens_loaded == model.spent <= self.budget
            text, tools = self.fixed[session.id]
            shown = surface.tools_array(row)
            if model.strategy == "dispatch":
                assert (surface.catalog_text(row)[0], shown) == (text, tools)
            else:
                assert shown[: len(tools)] == tools, "loaded tools are appended, never moved"
                self.fixed[session.id] = (text, shown)
                assert {tool["name"] for tool in shown} & set(self.world.own) == model.loaded()


@pytest.mark.timeout(3600)
def test_sessions_agree_with_their_model(db):
    seen.clear()
    soak = "MODEL_STEPS" in os.environ
    while seen["step"] < STEPS:
        run_state_machine_as_test(
            Sessions,
            settings=settings(
                max_examples=max(1, min(STEPS, 2000) // 12),
                stateful_step_count=IN_A_RUN,
                deadline=None,
                database=None,
                derandomize=not soak,  # the suite takes the same steps every time
                suppress_health_check=list(HealthCheck),
                print_blob=True,
            ),
        )
        if not soak:
            break
    print(f"steps of the model: {seen['step']}; {dict(seen)}")  # noqa: T201 - told by the bench
    # Which steps a short run takes depends on the text of this file: only a long one must do all.
    wanted = [*(TELLING if STEPS > 1000 else ()), *(RARE if STEPS > 5000 else ())]
    assert seen["step"] >= 200
    assert [what for what in wanted if not seen[what]] == [], "too little was done to show it"
