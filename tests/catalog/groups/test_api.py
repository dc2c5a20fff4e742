"""Admin API of groups: reads, writes, errors and undo."""

import json

import pytest

from catalog import cache
from catalog.audit import SYSTEM
from catalog.models import AuditEntry, Group, Membership, Revision
from catalog.tools import actions as tool_actions
from tests.support.factories import ingest_tools, make_server, make_tool, tool_object

TEXT = "Return the forecast of a town."


@pytest.fixture
def weather(db):
    server = make_server(slug="weather", name="Weather")
    ingest_tools(server, *[tool_object(name, description=TEXT) for name in ("a", "b", "c")])
    return server


@pytest.fixture
def api(client, admin_token):
    """Return a function that calls the API and returns status and body."""

    def call(method, path, body=None, key=admin_token):
        response = client.generic(
            method,
            f"/api/v1{path}",
            b"" if body is None else json.dumps(body).encode(),
            content_type="application/json",
            headers={"Authorization": f"Bearer {key}"},
        )
        return response.status_code, json.loads(response.content)

    return call


@pytest.fixture
def research(api, weather):
    status, group = api("POST", "/groups", {"group_id": "research", "display_name": "Research"})
    assert status == 201
    return group


def is_error(response, status, code):
    assert (response[0], response[1]["error"]["code"]) == (status, code), response
    assert response[1]["error"]["message"].endswith(".")
    return True


def names(group):
    return [member["name"] for member in group["members"]]


# --- Reads --------------------------------------------------------------------------------------


def test_the_list_has_the_members_and_cost_of_each_group(api, weather, operator_token):
    status, page = api("GET", "/groups", key=operator_token)

    assert status == 200
    [group] = page["items"]
    assert group["catalog_tokens"] == group["start_tokens"] > 10
    assert {**group, "tokens": 0, "catalog_tokens": 0, "start_tokens": 0} == {
        "group_id": "mcp:weather",
        "display_name": "Weather",
        "description": "",
        "described_by_server": False,
        "position": 0,
        "follows": "weather",
        "preload_default": False,
        "deferred": True,
        "tools": 3,
        "preloaded": 0,
        "tokens": 0,
        "preload_tokens": 0,
        "catalog_tokens": 0,
        "start_tokens": 0,
        "over_budget": 0,
        "missing_count": 0,
        "new_count": 0,
        "lint_count": 1,
        "drift": {"missing": 0, "new": 0},
        "lints": 1,
    }
    assert group["tokens"] > 10
    assert page["next_cursor"] is None


def test_pages_cover_every_group_once_in_canonical_order(api, weather):
    Group.objects.bulk_create(
        Group(group_id=f"g{number}", display_name="One", position=number % 4)
        for number in range(23)
    )
    listed, cursor = [], ""
    while cursor is not None:
        page = api("GET", f"/groups?limit=5&cursor={cursor}")[1]
        listed += [group["group_id"] for group in page["items"]]
        cursor = page["next_cursor"]

    assert listed == list(Group.objects.values_list("group_id", flat=True))
    assert len(set(listed)) == 24


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=201", "cursor=x", "cursor=-1:a", "cursor=99999999999999999999:a"]
)
def test_an_invalid_page_is_rejected(query, api, weather):
    assert is_error(api("GET", f"/groups?{query}"), 422, "invalid")


def test_a_group_has_its_members_drift_and_lints(api, research, weather):
    tool_actions.save_custom_tool(tool_object("mine", description="A tool of ours."), actor=SYSTEM)
    api("POST", "/groups/research/members", {"tools": ["weather__a", "weather__b", "mine"]})
    api("PATCH", "/groups/research/members", {"tools": ["weather__a"], "preload": True})
    ingest_tools(weather, *[tool_object(name, description=TEXT) for name in ("b", "c", "d")])

    group = api("GET", "/groups/research")[1]

    facts = ("name", "source", "mcpServer", "state", "preload")
    assert [[member[fact] for fact in facts] for member in group["members"]] == [
        ["mine", "custom", None, "available", None],
        ["weather__a", "mcp", "weather", "missing", True],
        ["weather__b", "mcp", "weather", "available", None],
    ]
    # A custom tool is preloaded by default.
    assert [one["preloaded"] for one in group["members"]] == [True, True, False]
    assert (group["tools"], group["preloaded"]) == (3, 1)  # preloaded counts available tools only
    assert all(one["tokens"] > 5 for one in group["members"])
    assert group["drift"] == {"missing": ["weather__a"], "new": ["weather__d"]}
    codes = [(lint["code"], lint["subject"]) for lint in group["lints"]]
    assert codes == [("group_description", "research"), ("description_verb", "mine")]
    assert group["undo"] == []


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "", None),
        ("PATCH", "", {"description": "x"}),
        ("DELETE", "", None),
        ("POST", "/members", {"tools": []}),
        ("PUT", "/members", {"tools": []}),
        ("PATCH", "/members", {"tools": [], "preload": True}),
        ("DELETE", "/members?tool=weather__a", None),
    ],
)
def test_an_unknown_group_is_not_found(method, path, body, api, weather):
    assert is_error(api(method, f"/groups/nowhere{path}", body), 404, "not_found")
    assert is_error(api(method, f"/groups/no%00where{path}", body), 404, "not_found")


# --- Writes -------------------------------------------------------------------------------------


def test_a_group_is_created_edited_moved_and_deleted(api, research):
    assert (research["members"], research["position"]) == ([], 1)

    status, group = api(
        "PATCH",
        "/groups/research",
        {
            "group_id": "mcp:study",
            "display_name": "Study",
            "description": "Read.",
            "preload_default": True,
            "deferred": False,
            "position": 0,
        },
    )

    assert status == 200
    names = ("group_id", "display_name", "description", "preload_default", "deferred", "position")
    assert [group[name] for name in names] == ["mcp:study", "Study", "Read.", True, False, 0]
    assert len(group["undo"]) == 2
    status, deleted = api("DELETE", "/groups/mcp:study")
    assert (status, deleted["group_id"], len(deleted["undo"])) == (200, "mcp:study", 1)
    assert api("GET", "/groups/mcp:study")[0] == 404


def test_following_is_set_and_stopped(api, research, weather):
    assert is_error(api("PATCH", "/groups/research", {"follows": "weather"}), 409, "followed")
    assert is_error(api("PATCH", "/groups/research", {"follows": "nowhere"}), 422, "unknown_server")
    assert api("PATCH", "/groups/mcp:weather", {"follows": None})[1]["follows"] is None

    group = api("PATCH", "/groups/research", {"follows": "weather"})[1]

    assert (group["follows"], names(group)) == (
        "weather",
        ["weather__a", "weather__b", "weather__c"],
    )


def test_omitted_fields_are_unchanged(api, weather):
    group = api("PATCH", "/groups/mcp:weather", {"description": "Read."})[1]

    assert (group["description"], group["follows"], len(group["undo"])) == ("Read.", "weather", 1)
    assert api("PATCH", "/groups/mcp:weather", {})[1]["undo"] == []


def test_a_patch_is_atomic(api, research):
    before = (Revision.current(), AuditEntry.objects.count())

    response = api("PATCH", "/groups/research", {"description": "Read.", "position": -1})

    assert is_error(response, 422, "invalid")
    assert (Revision.current(), AuditEntry.objects.count()) == before
    assert Group.objects.get(group_id="research").description == ""


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"group_id": "Big", "display_name": "x"}, 422, "invalid"),
        ({"group_id": "research", "display_name": "x"}, 409, "conflict"),
        ({"group_id": "x", "display_name": ""}, 422, "invalid"),
        ({"group_id": "x", "display_name": "\ud800"}, 422, "invalid"),
        ({"group_id": "x"}, 422, "invalid"),
        ({"group_id": "x", "display_name": "x", "colour": "red"}, 422, "invalid"),
        ({"group_id": "x", "display_name": "x", "follows": "\ud800"}, 422, "unknown_server"),
        ({"group_id": "x", "display_name": "x", "follows": "weather"}, 409, "followed"),
    ],
)
def test_an_invalid_group_is_rejected(body, status, code, api, research):
    assert is_error(api("POST", "/groups", body), status, code)


@pytest.mark.parametrize("name", ["group_id", "display_name", "description", "deferred"])
def test_null_is_rejected_for_all_fields_but_follows(name, api, weather):
    assert is_error(api("PATCH", "/groups/mcp:weather", {name: None}), 422, "invalid")


def test_members_are_added_ordered_preloaded_and_removed(api, research):
    path = "/groups/research/members"
    assert names(api("POST", path, {"tools": ["weather__b", "weather__a"]})[1]) == [
        "weather__a",
        "weather__b",
    ]
    assert names(api("PUT", path, {"tools": ["weather__b"]})[1]) == ["weather__b", "weather__a"]
    added = api("POST", path, {"tools": ["weather__c"], "position": 1})[1]
    assert names(added) == ["weather__b", "weather__c", "weather__a"]

    always = api("PATCH", path, {"tools": ["weather__a"], "preload": True})[1]
    assert [one["preload"] for one in always["members"]] == [None, None, True]
    assert (always["preloaded"], always["preload_tokens"] > 0) == (1, True)
    default = api("PATCH", path, {"tools": ["weather__a"], "preload": None})[1]
    assert default["preloaded"] == 0

    remaining = api("DELETE", f"{path}?tool_names=weather__b&tool_names=weather__c")[1]
    assert names(remaining) == ["weather__a"]


@pytest.mark.parametrize(
    ("method", "body", "status", "code"),
    [
        ("POST", {"tool_names": ["nowhere"]}, 422, "unknown_tool"),
        ("POST", {"tools": ["\ud800", "a\0b"]}, 422, "unknown_tool"),
        ("POST", {"tools": ["weather__a"], "position": -1}, 422, "invalid"),
        ("PUT", {"tools": ["weather__a"]}, 422, "invalid"),
        ("PATCH", {"tools": ["weather__a"], "preload": True}, 422, "invalid"),
        ("PATCH", {"tools": []}, 422, "invalid"),
    ],
)
def test_invalid_members_are_rejected(method, body, status, code, api, research):
    assert is_error(api(method, "/groups/research/members", body), status, code)


def test_a_tool_of_the_followed_server_cannot_be_removed(api, weather):
    response = api("DELETE", "/groups/mcp:weather/members?tool=weather__a")

    assert is_error(response, 409, "followed")
    assert "Stop mirroring weather" in response[1]["error"]["hint"]


def test_groups_are_ordered(api, research):
    status, done = api("PUT", "/groups", {"group_ids": ["research"]})

    assert (status, done["group_id"], len(done["undo"])) == (200, "research", 1)
    listed = api("GET", "/groups")[1]["items"]
    assert [group["group_id"] for group in listed] == ["research", "mcp:weather"]
    assert is_error(api("PUT", "/groups", {"group_ids": ["nowhere"]}), 422, "invalid")


# --- Undo ---------------------------------------------------------------------------------------


def test_a_deleted_group_is_restored_by_its_audit_entry(api, research):
    api("POST", "/groups/research/members", {"tools": ["weather__b"]})
    [entry] = api("DELETE", "/groups/research")[1]["undo"]

    status, done = api("POST", f"/groups/undo/{entry}", {})

    assert (status, done["group_id"]) == (200, "research")
    assert names(api("GET", "/groups/research")[1]) == ["weather__b"]
    assert is_error(api("POST", f"/groups/undo/{entry}", {}), 409, "conflict")
    [again] = done["undo"]
    assert api("POST", f"/groups/undo/{again}", {})[0] == 200
    assert api("GET", "/groups/research")[0] == 404


def test_the_entries_of_a_patch_are_undone_in_the_returned_order(api, research):
    changes = {"description": "Read.", "position": 0}
    entries = api("PATCH", "/groups/research", changes)[1]["undo"]

    for entry in entries:
        assert api("POST", f"/groups/undo/{entry}", {})[0] == 200

    group = api("GET", "/groups/research")[1]
    assert (group["description"], group["position"]) == ("", 1)


@pytest.mark.parametrize("entry", ["0", "-1", "99999999999999999999", "members"])
def test_an_unknown_entry_cannot_be_undone(entry, api, research):
    assert api("POST", f"/groups/undo/{entry}", {})[0] in (404, 422)


def test_a_group_may_have_the_id_undo(api, weather):
    api("POST", "/groups", {"group_id": "undo", "display_name": "Undo"})

    assert names(api("POST", "/groups/undo/members", {"tools": ["weather__a"]})[1]) == [
        "weather__a"
    ]


def test_the_list_takes_a_fixed_number_of_queries(api, weather, django_assert_max_num_queries):
    def cost(number):
        for at in range(Group.objects.count(), number):
            body = {"group_id": f"g{at}", "display_name": "x"}
            assert api("POST", "/groups", body)[0] == 201
            api("POST", f"/groups/g{at}/members", {"tools": ["weather__a"]})
        make_tool(weather, f"n{number}")
        cache.current()  # loaded once per revision
        with django_assert_max_num_queries(15) as captured:
            api("GET", "/groups")
        return len(captured)

    assert cost(4) == cost(20)


def test_members_are_listed_in_pages_and_the_first_are_in_the_group(api, research):
    tools = [
        tool_actions.save_custom_tool(tool_object(f"t{at:03}"), actor=SYSTEM) for at in range(203)
    ]
    row = Group.objects.get(group_id="research")
    Membership.objects.bulk_create(
        Membership(group=row, tool=tool, position=at % 3) for at, tool in enumerate(tools)
    )
    group = api("GET", "/groups/research")[1]
    assert (group["tools"], len(group["members"])) == (203, 200)

    listed, query = [], "limit=150"
    while query:
        page = api("GET", f"/groups/research/members?{query}")[1]
        listed += page["items"]
        query = page["next_cursor"] and f"limit=150&cursor={page['next_cursor']}"
    rest = api("GET", f"/groups/research/members?cursor={group['members_next_cursor']}")[1]

    assert listed[:200] == group["members"]
    assert listed[200:] == rest["items"]
    assert len({member["name"] for member in listed}) == 203
    assert rest["next_cursor"] is None


def test_the_former_names_of_tool_names_are_accepted(api, research, weather):
    added = api("POST", "/groups/research/members", {"tools": ["weather__a"]})
    same = api("POST", "/groups/research/members", {"tool_names": ["weather__a"]})
    assert [member["name"] for member in added[1]["members"]] == ["weather__a"]
    assert same[1]["members"] == added[1]["members"]
    both = {"tools": ["weather__a"], "tool_names": ["weather__b"]}
    assert is_error(api("POST", "/groups/research/members", both), 422, "invalid")
    assert api("DELETE", "/groups/research/members?tool=weather__a")[1]["members"] == []
    assert is_error(api("DELETE", "/groups/research/members"), 422, "invalid")


def test_counts_of_a_group_are_the_same_in_the_list_and_the_group(api, research, weather):
    api("POST", "/groups/research/members", {"tool_names": ["weather__a"]})
    ingest_tools(weather, tool_object("b", description=TEXT))
    names = ("missing_count", "new_count", "lint_count")  # the last of the group itself
    listed = next(row for row in api("GET", "/groups")[1]["items"] if row["group_id"] == "research")
    group = api("GET", "/groups/research")[1]
    assert [group[name] for name in names] == [listed[name] for name in names]
    assert listed["missing_count"] == len(group["drift"]["missing"])
