"""Group pages: content, forms, undo offers and concurrent edits."""

import json
import re
from html import unescape

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from catalog.audit import SYSTEM
from catalog.groups import actions as group_actions
from catalog.models import AuditEntry, Group, Membership, Tool
from catalog.tools import actions as tool_actions
from tests.support.agent_client import make_agent_client
from tests.support.factories import (
    ingest_tools,
    make_agent,
    make_server,
    make_session,
    make_tool,
    tool_object,
)

BACKEND = "django.contrib.auth.backends.ModelBackend"
TEXT = "Return the forecast of a town."


@pytest.fixture
def weather(db):
    server = make_server(slug="weather", name="Weather")
    ingest_tools(server, *[tool_object(name, description=TEXT) for name in ("a", "b", "c")])
    return server


@pytest.fixture
def research(weather):
    return group_actions.create("research", "Research", "Find things out.", actor=SYSTEM).group


@pytest.fixture
def signed_in(client, admin):
    client.force_login(admin, backend=BACKEND)
    return client


def text_of(response):
    return " ".join(re.sub(r"<[^>]+>", " ", response.content.decode()).split())


def post(client, name, *args, **fields):
    return client.post(reverse(name, args=args), fields)


def members_of(group):
    rows = Membership.objects.filter(group=group).order_by("position", "tool__public_name")
    return list(rows.values_list("tool__public_name", "preload"))


def sections(response):
    """Return the members on a board: preloaded, on demand."""
    page = response.content.decode()
    rows = re.findall(r'data-row="([^"]+)"\s+data-given="(\w+)"', page)
    return tuple([name for name, given in rows if given == kind] for kind in ("preload", "demand"))


def act(client, name, group_id, **fields):
    """Submit an action of the board as htmx does."""
    return client.post(reverse(name, args=[group_id]), fields, headers={"HX-Request": "true"})


def announcement(response):
    return json.loads(response["HX-Trigger"])["announce"]


def press_undo(client, path, message=""):
    """Press the undo button of a page, and return the page it leads to."""
    page = client.get(path).content.decode()
    assert message in page
    [url] = re.findall(r'<form method="post" action="(/groups/undo/\d+)"', page)
    also = re.findall(r'name="also" value="(\d+)"', page)
    return client.post(url, {"also": also}, follow=True)


# --- List ---------------------------------------------------------------------------------------


def test_the_list_counts_unavailable_and_new_tools_and_recommendations(
    signed_in, research, weather
):
    group_actions.assign(research, list(weather.tools.all()), actor=SYSTEM)
    group_actions.edit(research, description="", actor=SYSTEM)
    ingest_tools(weather, *[tool_object(name, description=TEXT) for name in ("b", "c", "d")])

    page = signed_in.get("/groups")

    row = page.content.decode().split("/groups/research")[1].split("</tr>")[0]
    text = " ".join(re.sub(r"<[^>]+>", " ", row).split())
    assert "1 unavailable" in text
    assert "1 new" in text
    assert "1 recommendation" in text


def test_an_empty_list_says_how_groups_are_created(signed_in, page_of, operator):
    assert "No groups yet" in text_of(signed_in.get("/groups"))
    page = page_of(operator, "/groups")
    assert "No groups yet" in text_of(page)
    assert "Create group" not in text_of(page)


def test_groups_are_found_by_id_and_by_name(signed_in, research):
    for query in ("resea", "RESEARCH"):
        found = text_of(signed_in.get("/groups", {"q": query}))
        assert "research Research" in found
        assert "mcp:weather" not in found
    assert "No groups match nothing" in text_of(signed_in.get("/groups?q=nothing"))


def test_a_group_is_created_and_the_creation_undone(signed_in, weather):
    response = post(
        signed_in,
        "group-create",
        group_id="mcp:study",
        display_name="<b>Study</b>",
        description="Read.",
        follows="",
    )

    assert response["Location"] == "/groups/mcp:study"
    page = press_undo(signed_in, "/groups/mcp:study")
    assert page.redirect_chain[-1][0] == "/groups"
    assert not Group.objects.filter(group_id="mcp:study").exists()
    assert "Undone." in text_of(page)


def test_an_invalid_new_group_keeps_the_input_and_shows_the_error(signed_in, weather):
    response = post(signed_in, "group-create", group_id="Bad Id", display_name="Study")

    assert response.status_code == 422
    assert "lower-case letters" in text_of(response)
    assert 'value="Bad Id"' in response.content.decode()
    taken = post(signed_in, "group-create", group_id="mcp:weather", display_name="Study")
    assert "Group mcp:weather already exists." in text_of(taken)


def test_groups_are_moved_by_buttons_and_the_move_undone(signed_in, research):
    assert post(signed_in, "groups-order", up="research")["Location"] == "/groups"
    assert Group.objects.first() == research

    press_undo(signed_in, "/groups")

    assert Group.objects.last() == research
    assert "Group not found." in text_of(
        signed_in.post(reverse("groups-order"), {"down": "nowhere"}, follow=True)
    )


# --- Board without JavaScript -------------------------------------------------------------------


def test_the_board_says_what_sessions_get(signed_in, research):
    page = text_of(signed_in.get("/groups/research"))

    assert "Changes apply to new sessions; open sessions keep their tools." in page
    assert "An agent with this group gets no tools yet." in page


def test_an_operator_sees_everything_and_no_actions(page_of, operator, research, weather):
    group_actions.assign(research, list(weather.tools.all()), actor=SYSTEM)
    make_tool(weather, "d")

    page = page_of(operator, "/groups/research").content.decode()

    main = page.split("<main")[1].split("</main>")[0]
    assert "weather__a" in main
    assert "weather__d" in main
    assert "on demand" in main
    assert 'method="post"' not in main
    assert "hx-post" not in main
    assert "checkbox" not in main


def test_tools_are_found_added_and_the_addition_undone(signed_in, research, weather):
    make_tool(make_server(slug="git"), "log", description=TEXT)
    page = signed_in.get("/groups/research?q=weather__&server=weather").content.decode()
    listed = re.findall(r'name="tool"\s+value="([^"]+)"\s+data-select-row', page)
    assert listed == ["weather__a", "weather__b", "weather__c"]

    response = post(
        signed_in, "group-assign", "research", tool=["weather__a", "git__log"], address="q=weather"
    )

    assert response["Location"] == "/groups/research?q=weather"
    assert members_of(research) == [("git__log", None), ("weather__a", None)]
    press_undo(signed_in, "/groups/research", message="Added 2 tools to research.")
    assert members_of(research) == []


def test_a_member_is_preloaded_moved_and_removed_by_its_buttons(signed_in, research, weather):
    group_actions.assign(research, list(weather.tools.all()), actor=SYSTEM)
    first = weather.tools.get(name="a")

    response = post(signed_in, "group-preload", "research", always="weather__a")
    assert response["Location"] == f"/groups/research#row-{first.pk}"
    assert members_of(research)[0] == ("weather__a", True)
    assert sections(signed_in.get("/groups/research")) == (
        ["weather__a"],
        ["weather__b", "weather__c"],
    )
    post(signed_in, "group-preload", "research", demand="weather__a")
    assert members_of(research)[0] == ("weather__a", False)
    post(signed_in, "group-preload", "research", default="weather__a")
    assert members_of(research)[0] == ("weather__a", None)

    post(signed_in, "group-order", "research", down="weather__a")
    assert [name for name, _ in members_of(research)] == ["weather__b", "weather__a", "weather__c"]
    post(signed_in, "group-order", "research", up="weather__c")
    assert [name for name, _ in members_of(research)] == ["weather__b", "weather__c", "weather__a"]

    post(signed_in, "group-remove", "research", remove_tool="weather__c")
    assert [name for name, _ in members_of(research)] == ["weather__b", "weather__a"]
    press_undo(signed_in, "/groups/research")
    assert [name for name, _ in members_of(research)] == ["weather__b", "weather__c", "weather__a"]


def test_several_members_are_set_at_once(signed_in, research, weather):
    group_actions.assign(research, list(weather.tools.all()), actor=SYSTEM)
    chosen = ["weather__a", "weather__c"]

    post(signed_in, "group-preload", "research", always="", tool=chosen)
    assert [preload for _, preload in members_of(research)] == [True, None, True]
    post(signed_in, "group-remove", "research", remove_tool="", tool=chosen)

    assert members_of(research) == [("weather__b", None)]


@pytest.mark.parametrize("act", ["group-assign", "group-remove", "group-preload", "group-order"])
def test_an_action_without_a_known_tool_is_an_error(act, signed_in, research):
    nothing = signed_in.post(reverse(act, args=["research"]), follow=True)
    assert "No tool is selected. Select at least one." in text_of(nothing)
    unknown = signed_in.post(reverse(act, args=["research"]), {"tool": "nowhere"}, follow=True)
    assert "Tool not found: nowhere." in text_of(unknown)


def test_a_tool_of_the_followed_server_has_no_remove_button(signed_in, weather):
    page = signed_in.get("/groups/mcp:weather").content.decode()
    assert "Remove weather__a" not in page

    rejected = signed_in.post(
        reverse("group-remove", args=["mcp:weather"]), {"remove_tool": "weather__a"}, follow=True
    )

    assert "Stop mirroring weather, or hide the tool." in text_of(rejected)


def test_settings_are_saved_together_and_undone_together(signed_in, research, weather):
    group_actions.edit(weather.group, follows=None, actor=SYSTEM)
    response = post(
        signed_in,
        "group-edit",
        "research",
        group_id="study",
        display_name="Study",
        description="Read.",
        follows="weather",
        preload_default="on",
    )

    assert response["Location"] == "/groups/study/edit"
    group = Group.objects.get(group_id="study")
    assert (group.preload_default, group.deferred, group.follows) == (True, False, weather)
    assert len(members_of(group)) == 3
    page = press_undo(signed_in, "/groups/study/edit")
    assert page.redirect_chain[-1][0] == "/groups/research"
    group.refresh_from_db()
    assert (group.display_name, group.deferred, group.follows) == ("Research", True, None)
    assert members_of(group) == []


def test_invalid_settings_keep_the_input(signed_in, research):
    response = post(signed_in, "group-edit", "research", group_id="mcp:weather", display_name="x")

    assert response.status_code == 422
    assert "Group mcp:weather already exists." in text_of(response)
    assert Group.objects.filter(group_id="research").exists()


def test_saving_unchanged_settings_says_no_changes(signed_in, research):
    response = signed_in.post(
        reverse("group-edit", args=["research"]),
        {
            "group_id": "research",
            "display_name": "Research",
            "description": "Find things out.",
            "deferred": "on",
        },
        follow=True,
    )

    assert "No changes: already set." in text_of(response)
    assert "/groups/undo/" not in response.content.decode()


def test_a_group_is_deleted_after_typing_its_id_and_restored(signed_in, research, weather):
    group_actions.assign(research, list(weather.tools.all()), actor=SYSTEM)
    wrong = post(signed_in, "group-delete", "research", typed_name="reserch")
    assert wrong.status_code == 422
    assert "The name does not match" in text_of(wrong)

    assert post(signed_in, "group-delete", "research", typed_name="research")["Location"] == (
        "/groups"
    )
    assert not Group.objects.filter(group_id="research").exists()
    page = press_undo(signed_in, "/groups")

    assert page.redirect_chain[-1][0] == "/groups/research"
    assert len(members_of(research)) == 3


def test_undo_is_offered_once_and_a_second_undo_is_an_error(signed_in, research):
    post(signed_in, "group-order", "research")
    post(signed_in, "groups-order", up="research")
    page = signed_in.get("/groups").content.decode()
    [url] = re.findall(r"/groups/undo/\d+", page)
    assert "/groups/undo/" not in signed_in.get("/groups").content.decode()
    signed_in.post(url)

    again = signed_in.post(url, follow=True)

    assert "This was already undone. Reload to see the current state." in text_of(again)
    unknown = signed_in.post("/groups/undo/999999999999999999999", follow=True)
    assert "Audit entry not found." in text_of(unknown)


def test_an_undone_action_can_be_redone(signed_in, research):
    post(signed_in, "group-assign", "research", tool="weather__a")
    undone = press_undo(signed_in, "/groups/research", message="Added weather__a to research.")
    assert members_of(research) == []
    assert "Undone. Redo" in text_of(undone)
    [url] = re.findall(r'<form method="post" action="(/groups/undo/\d+)"', undone.content.decode())

    redone = signed_in.post(url, follow=True)

    assert members_of(research) == [("weather__a", None)]
    assert "Redone. Undo" in text_of(redone)


def test_drift_is_shown_with_reasons_and_new_tools_can_be_added(signed_in, research, weather):
    group_actions.assign(research, [weather.tools.get(name="a")], actor=SYSTEM)
    tool_actions.hold(weather.tools.get(name="a"), "", actor=SYSTEM)
    make_tool(weather, "d", description=TEXT)

    page = text_of(signed_in.get("/groups/research"))

    assert "weather__a : Hidden: agents cannot find or call this tool." in page
    assert "1 new tool on servers of this group" in page
    post(signed_in, "group-assign", "research", tool="weather__d")
    assert "new tool" not in text_of(signed_in.get("/groups/research"))


def test_recommendations_are_listed(signed_in, research, weather):
    group_actions.edit(research, description="", actor=SYSTEM)
    make_tool(weather, "silent")
    group_actions.assign(research, [weather.tools.get(name="silent")], actor=SYSTEM)

    page = text_of(signed_in.get("/groups/research"))

    assert "research has no description. Describe its purpose in one line" in page
    assert "No description: 1 tool" in page
    assert "weather__silent has no description: agents can find it only by name." in page


@pytest.mark.parametrize("address", ["https://evil.example/", "//evil.example", "\r\nX: y"])
def test_redirects_stay_on_this_site(address, signed_in, research):
    response = post(signed_in, "group-assign", "research", tool="weather__a", address=address)

    assert response["Location"].startswith("/groups/research")
    assert "\n" not in response["Location"]


def test_hostile_texts_are_escaped(signed_in, research, weather):
    nasty = "<script>alert(1)</script>\u202e"
    group_actions.edit(
        research, actor=SYSTEM, display_name=nasty, description=f'"><img src=x> {nasty}'
    )
    make_tool(weather, "d", description=f"Return {nasty} to a town.")
    group_actions.assign(research, list(weather.tools.all()), actor=SYSTEM)

    for path in ("/groups", "/groups/research"):
        page = signed_in.get(path).content.decode()
        assert "<script>alert" not in page
        assert "<img src=x>" not in page
        assert "&lt;script&gt;alert(1)&lt;/script&gt;⟨U+202E⟩" in page


# --- Board with htmx ----------------------------------------------------------------------------


@pytest.fixture
def full(research, weather):
    group_actions.assign(research, list(weather.tools.all()), actor=SYSTEM)
    return research


@pytest.fixture
def second(django_user_model):
    """A client signed in as another admin."""
    user = django_user_model.objects.create_user("bea@example.org", is_superuser=True)
    other = Client()
    other.force_login(user, backend=BACKEND)
    return other


def last_edit_in(page):
    return re.findall(r'name="seen" value="(\d+)"', page.content.decode())[0]


def test_a_toggle_moves_the_row_and_announces_the_new_cost(signed_in, full):
    before = signed_in.get("/groups/research").context["board"].cost
    on = act(signed_in, "group-preload", "research", set="weather__b", on="1")

    assert sections(on) == (["weather__b"], ["weather__a", "weather__c"])
    cost = on.context["board"].cost
    assert cost.at_start > before.at_start
    assert announcement(on) == (
        f"weather__b is preloaded in research, now about {cost.at_start:,} tokens."
    )
    assert 'data-focus="weather__b"' in on.content.decode()
    assert 'hx-swap-oob="innerHTML"' in on.content.decode()
    off = act(signed_in, "group-preload", "research", set="weather__b")
    assert sections(off) == ([], ["weather__a", "weather__b", "weather__c"])


def test_a_row_moves_within_its_section(signed_in, full):
    post(signed_in, "group-preload", "research", always="weather__b")

    page = act(signed_in, "group-order", "research", down="weather__a")

    assert sections(page) == (["weather__b"], ["weather__c", "weather__a"])
    page = act(signed_in, "group-order", "research", up="weather__a")
    assert sections(page) == (["weather__b"], ["weather__a", "weather__c"])


def test_a_rejected_action_shows_the_error_at_the_row(signed_in, weather):
    response = act(signed_in, "group-remove", "mcp:weather", remove_tool="weather__a")

    assert response.status_code == 422
    row = response.content.decode().split('data-row="weather__a"')[1].split("</li>")[0]
    assert "Stop mirroring weather" in row
    assert "weather__a" in sections(response)[1]


def test_a_move_to_another_group_is_undone_in_both_groups(signed_in, full):
    group_actions.create("study", "Study", actor=SYSTEM)

    response = act(signed_in, "group-move", "research", move="weather__a", to="study")

    study = Group.objects.get(group_id="study")
    assert announcement(response).startswith("Moved weather__a to study, now about ")
    assert [name for name, _ in members_of(study)] == ["weather__a"]
    assert [name for name, _ in members_of(full)] == ["weather__b", "weather__c"]
    page = response.content.decode()
    [url] = re.findall(r"hx-post=\"(/groups/undo/\d+)", page)
    also = re.findall(r'name="also" value="(\d+)"', page)
    undone = signed_in.post(
        url, {"also": also, "board": "research"}, headers={"HX-Request": "true"}
    )
    assert sections(undone)[1] == ["weather__a", "weather__b", "weather__c"]
    assert members_of(study) == []


@pytest.mark.parametrize("to", ["", "research", "nowhere", "{0.__class__}"])
def test_a_move_to_the_same_or_an_unknown_group_is_an_error(to, signed_in, full):
    response = act(signed_in, "group-move", "research", move="weather__a", to=to)

    assert response.status_code == 422
    expected = "Choose another group." if to in ("", "research") else "Group not found."
    assert expected in text_of(response)
    assert len(members_of(full)) == 3


def test_tools_are_added_to_another_group(signed_in, research):
    group_actions.create("study", "Study", actor=SYSTEM)

    response = act(
        signed_in, "group-assign", "research", tool=["weather__a", "weather__b"], to="study"
    )

    assert announcement(response).startswith("Added 2 tools to study, now about ")
    assert members_of(research) == []
    assert len(members_of(Group.objects.get(group_id="study"))) == 2


def test_a_tool_dropped_on_the_preload_section_is_preloaded(signed_in, research):
    act(signed_in, "group-assign", "research", tool="weather__a", given="always")

    assert members_of(research) == [("weather__a", True)]


def test_a_group_over_the_budget_suggests_its_costliest_preloads(signed_in, research, weather):
    for name, words in (("long", 3000), ("longer", 3500), ("longest", 4000), ("short", 10)):
        make_tool(weather, name, description="Return " + "rain and snow " * (words // 3))
    group_actions.assign(research, list(weather.tools.all()), actor=SYSTEM)
    group_actions.edit(research, preload_default=True, actor=SYSTEM)

    response = signed_in.get("/groups/research")

    over = response.context["board"].cost.over_budget
    assert over > 0
    assert f"≈{over:,} over" in text_of(response)
    suggested = re.findall(
        r'name="demand"\s+value="([^"]+)"\s+hx-post="[^"]+"\s+aria-label="Set',
        response.content.decode(),
    )
    assert suggested == ["weather__longest", "weather__longer", "weather__long"]
    assert f"≈{over:,} over 4,000" in text_of(signed_in.get("/groups"))


def test_the_json_preview_equals_the_response_to_the_curl_command(signed_in, full):
    group_actions.set_preload(full, [Tool.objects.get(name="b")], True, actor=SYSTEM)
    agent = make_agent_client("scout", "research", "mcp:weather")
    shown = signed_in.get("/groups/research?tab=curl")
    body = json.loads(re.findall(r"-d '(.+?)'", unescape(shown.content.decode()))[0])

    opened = agent.send("POST", "/sessions", body).json

    seen = json.loads(signed_in.get("/groups/research?tab=json").context["preview"].json)
    assert seen["tools"] == opened["tools"]
    assert [tool["name"] for tool in opened["tools"]][-1] == "weather__b"
    for key in ("text", "etag", "tokens", "left_out"):
        assert seen["catalog"][key] == opened["catalog"][key]
    assert seen["mode"] == opened["mode"]


def test_the_json_preview_of_an_empty_group_equals_the_response(signed_in, research):
    agent = make_agent_client("scout", "research", mode="deferred")

    page = signed_in.get("/groups/research")

    seen = json.loads(page.context["preview"].json)
    opened = agent.open().opened
    assert (seen["tools"], seen["catalog"]["text"]) == (opened["tools"], opened["catalog"]["text"])
    assert '"tools": []' in unescape(page.content.decode())


def test_the_change_tab_compares_with_the_preview_before_the_last_edit(signed_in, full):
    AuditEntry.objects.filter(target_id=full.pk)._raw_delete("default")
    act(signed_in, "group-preload", "research", set="weather__b", on="1")
    act(signed_in, "group-remove", "research", remove_tool="weather__c")

    page = signed_in.get("/groups/research?tab=change")

    edit = page.context["last_edit"]
    assert edit.changes == 2
    assert "weather__c" not in edit.after
    assert "a, b, c" in edit.before
    assert "- weather__b(" in edit.after
    assert "Preloaded definitions:\n- none" in edit.before
    assert "<del>" in page.content.decode()
    assert "2 changes since just now by ada@example.org" in text_of(page)


def test_htmx_gets_the_tool_list_or_the_preview_alone(signed_in, full):
    ask = {"HX-Request": "true", "HX-Target": "board-list"}
    tools = signed_in.get("/groups/research?q=__a&server=&in=yes", headers=ask)
    assert tools["HX-Push-Url"] == "/groups/research?q=__a&in=yes"
    assert re.findall(r'data-pick="([^"]+)"', tools.content.decode()) == ["weather__a"]
    assert "<html" not in tools.content.decode()
    ask["HX-Target"] = "board-preview"
    preview = signed_in.get("/groups/research?tab=json", headers=ask)
    assert "board-preview" in preview.content.decode()
    assert "data-row" not in preview.content.decode()


def test_no_match_offers_to_clear_the_filters(signed_in, full):
    page = signed_in.get("/groups/research?q=zebra&server=weather")

    assert "No results for zebra on server weather. Clear filters" in text_of(page)


# --- Concurrent edits ---------------------------------------------------------------------------


def test_actions_of_two_admins_merge_and_each_sees_the_other(signed_in, second, full):
    mine, theirs = (last_edit_in(one.get("/groups/research")) for one in (signed_in, second))
    act(signed_in, "group-preload", "research", set="weather__a", on="1", seen=mine)

    page = act(second, "group-preload", "research", set="weather__b", on="1", seen=theirs)

    assert sections(page) == (["weather__a", "weather__b"], ["weather__c"])
    told = "ada@example.org changed the preloads of group research: weather__a"
    assert told in text_of(page)
    noticed = signed_in.get(f"/groups/research/changes?seen={mine}")
    assert "bea@example.org changed the preloads of group research: weather__b" in text_of(noticed)
    quiet = signed_in.get(f"/groups/research/changes?seen={last_edit_in(page)}")
    assert "bea@example.org" not in text_of(quiet)


def test_a_stale_action_on_the_same_tool_is_rejected_with_the_current_state(
    signed_in, second, full
):
    theirs = last_edit_in(second.get("/groups/research"))
    act(signed_in, "group-preload", "research", set="weather__a", on="1", seen=theirs)

    late = act(second, "group-preload", "research", demand="weather__a", seen=theirs)

    assert late.status_code == 422
    assert "ada@example.org changed weather__a in the meantime." in text_of(late)
    assert sections(late)[0] == ["weather__a"]
    again = act(second, "group-preload", "research", demand="weather__a", seen=last_edit_in(late))
    assert sections(again)[0] == []


def test_a_stale_action_on_a_removed_tool_is_rejected(signed_in, second, full):
    theirs = last_edit_in(second.get("/groups/research"))
    act(signed_in, "group-remove", "research", remove_tool="weather__a")

    late = second.post(
        reverse("group-order", args=["research"]),
        {"up": "weather__a", "seen": theirs},
        follow=True,
    )

    assert "ada@example.org changed weather__a in the meantime." in text_of(late)
    assert [name for name, _ in members_of(full)] == ["weather__b", "weather__c"]


def test_settings_of_two_admins_merge_unless_both_changed_the_same_field(
    signed_in, second, research
):
    seen = last_edit_in(signed_in.get("/groups/research/edit"))
    form = {
        "group_id": "research",
        "display_name": "Research",
        "description": "Find things out.",
        "deferred": "on",
        "seen": seen,
    }
    post(signed_in, "group-edit", "research", **form | {"description": "By Ada."})

    post(second, "group-edit", "research", **form | {"display_name": "By Bea"})

    research.refresh_from_db()
    assert (research.display_name, research.description) == ("By Bea", "By Ada.")
    both = post(second, "group-edit", "research", **form | {"description": "By Bea."})
    assert both.status_code == 422
    assert "ada@example.org changed the description in the meantime" in text_of(both)
    assert "By Bea." in both.content.decode()


# --- Usage, comparison and the list of tools ----------------------------------------------------


def test_the_list_counts_the_agents_of_a_group_and_their_sessions_today(signed_in, research):
    narrow = make_agent_client("narrow", "research").agent
    make_session(narrow, started=timezone.now())
    make_session(make_agent("wide"), started=timezone.now())
    make_agent("idle")

    row = signed_in.get("/groups").content.decode().split('/groups/research"')[1].split("</tr>")[0]

    assert re.findall(r'<td class="num">(\d+)</td>', row)[:2] == ["3", "2"]


def test_two_groups_are_compared_tool_by_tool(signed_in, research, weather):
    other = make_tool(make_server(slug="git"), "log")
    group_actions.assign(research, [weather.tools.get(name="a"), other], actor=SYSTEM)

    page = signed_in.get("/groups/all/compare?group=research&group=mcp:weather")

    titles = [(part.title, [item.name for item, *_ in part.rows]) for part in page.context["parts"]]
    assert titles == [
        ("Only in research", ["git__log"]),
        ("In both", ["weather__a"]),
        ("Only in mcp:weather", ["weather__b", "weather__c"]),
    ]
    one = signed_in.get("/groups/all/compare?group=research", follow=True)
    assert "Select two groups to compare." in text_of(one)


def test_tools_are_added_to_a_group_in_the_list_of_tools(signed_in, research):
    fields = {"tool": ["weather__a", "weather__c"], "to": "research", "address": "sort=-tokens"}

    response = signed_in.post(reverse("groups-add-tools"), fields)

    assert response["Location"] == "/tools?sort=-tokens"
    assert [name for name, _ in members_of(research)] == ["weather__a", "weather__c"]
    press_undo(signed_in, "/tools", message="Added 2 tools to research.")
    assert members_of(research) == []
    nowhere = signed_in.post(reverse("groups-add-tools"), fields | {"to": ""}, follow=True)
    assert "No group is selected." in text_of(nowhere)


def test_tools_are_removed_from_a_group_in_the_list_of_tools(signed_in, research):
    fields = {"tool": ["weather__a", "weather__c"], "to": "research", "address": "group=research"}
    signed_in.post(reverse("groups-add-tools"), fields)

    response = signed_in.post(reverse("groups-remove-tools"), fields | {"tool": ["weather__a"]})

    assert response["Location"] == "/tools?group=research"
    assert [name for name, _ in members_of(research)] == ["weather__c"]
    press_undo(signed_in, "/tools", message="Removed weather__a from research.")
    assert [name for name, _ in members_of(research)] == ["weather__a", "weather__c"]


@pytest.mark.parametrize(
    "path",
    [
        "/groups",
        "/groups/research",
        "/groups/research?q=t&server=weather&tab=change",
        "/groups/all/compare?group=research&group=mcp:weather",
    ],
)
def test_a_page_takes_a_fixed_number_of_queries(
    path, signed_in, research, weather, django_assert_max_num_queries
):
    def cost(number):
        ingest_tools(weather, *[tool_object(f"t{at}") for at in range(number)], allow_removals=True)
        group_actions.assign(research, list(weather.tools.all()[: number // 2]), actor=SYSTEM)
        for at in range(number // 10):
            if not Group.objects.filter(group_id=f"g{at}").exists():
                group_actions.create(f"g{at}", "One", actor=SYSTEM)
        signed_in.get(path)  # the first request writes the session
        with django_assert_max_num_queries(35) as captured:
            signed_in.get(path)
        return len(captured)

    assert cost(10) == cost(300)


def test_the_board_says_who_uses_the_group_and_its_description_is_edited_there(signed_in, research):
    make_session(make_agent("scout"), started=timezone.now())
    page = text_of(signed_in.get("/groups/research"))
    assert "Find things out. Edit description" in page
    assert "Agents: scout . 1 session of these agents today." in page
    response = post(signed_in, "group-describe", "research", description="Read the weather.")
    assert response.headers["Location"] == "/groups/research"
    research.refresh_from_db()
    assert research.description == "Read the weather."
    assert "Saved the description of research. Undo" in text_of(signed_in.get("/groups/research"))
