"""The pages of groups: what they show, what their forms do, and the undo after each."""

import re

import pytest
from django.urls import reverse

from catalog import groups, tools
from catalog.audit import SYSTEM
from catalog.models import Group, Membership
from tests.factories import fold, make_server, make_tool, tool_object

BACKEND = "django.contrib.auth.backends.ModelBackend"
TEXT = "Return the forecast of a town."


@pytest.fixture
def weather(db):
    server = make_server(slug="weather", name="Weather")
    fold(server, *[tool_object(name, description=TEXT) for name in ("a", "b", "c")])
    return server


@pytest.fixture
def research(weather):
    return groups.create("research", "Research", "Find things out.", actor=SYSTEM).group


@pytest.fixture
def signed_in(client, admin):
    client.force_login(admin, backend=BACKEND)
    return client


def text_of(response):
    return " ".join(re.sub(r"<[^>]+>", " ", response.content.decode()).split())


def post(client, name, *args, **fields):
    return client.post(reverse(name, args=args), fields)


def held(group):
    rows = Membership.objects.filter(group=group).order_by("position", "tool__public_name")
    return list(rows.values_list("tool__public_name", "preload"))


def press_undo(client, path, said=""):
    """Press the button that the page offers, and return the page it leads to."""
    page = client.get(path).content.decode()
    assert said in page
    [where] = re.findall(r'<form method="post" action="(/groups/undo/\d+)">', page)
    return client.post(where, follow=True)


# --- The list -----------------------------------------------------------------------------------


def test_the_list_counts_what_drifted_and_what_could_be_better(signed_in, research, weather):
    groups.assign(research, list(weather.tools.all()), actor=SYSTEM)
    groups.describe(research, "", actor=SYSTEM)
    fold(weather, *[tool_object(name, description=TEXT) for name in ("b", "c", "d")])

    page = signed_in.get("/groups")

    row = page.content.decode().split("/groups/research")[1].split("</tr>")[0]
    said = " ".join(re.sub(r"<[^>]+>", " ", row).split())
    assert "1 not given" in said
    assert "1 new" in said
    assert "1 hint" in said


def test_an_empty_list_says_where_groups_come_from(signed_in, page_of, operator):
    assert "No groups yet" in text_of(signed_in.get("/groups"))
    page = page_of(operator, "/groups")
    assert "No groups yet" in text_of(page)
    assert "Create group" not in text_of(page)


def test_a_group_is_made_and_the_making_undone(signed_in, weather):
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


def test_a_group_that_cannot_be_keeps_what_was_typed_and_says_why(signed_in, weather):
    response = post(signed_in, "group-create", group_id="Bad Id", display_name="Study")

    assert response.status_code == 422
    assert "lower-case letters" in text_of(response)
    assert 'value="Bad Id"' in response.content.decode()
    taken = post(signed_in, "group-create", group_id="mcp:weather", display_name="Study")
    assert "There is a group called mcp:weather already." in text_of(taken)


def test_groups_are_moved_by_buttons_and_moved_back(signed_in, research):
    assert post(signed_in, "groups-order", up="research")["Location"] == "/groups"
    assert Group.objects.first() == research

    press_undo(signed_in, "/groups")

    assert Group.objects.last() == research
    assert "no group of this name" in text_of(
        signed_in.post(reverse("groups-order"), {"down": "nowhere"}, follow=True)
    )


# --- The editor ---------------------------------------------------------------------------------


def test_the_page_says_what_sessions_see(signed_in, research):
    page = text_of(signed_in.get("/groups/research"))

    assert "Running sessions keep what they loaded; new sessions see this." in page
    assert "An agent with this group sees nothing yet." in page


def test_an_operator_reads_everything_and_is_offered_no_act(page_of, operator, research, weather):
    groups.assign(research, list(weather.tools.all()), actor=SYSTEM)
    make_tool(weather, "d")

    page = page_of(operator, "/groups/research").content.decode()

    main = page.split("<main")[1].split("</main>")[0]
    assert "weather__a" in main
    assert "weather__d" in main
    assert "on demand" in main
    assert "<button" not in main.replace(
        '<button type="button" class="button small quiet" data-c', ""
    )
    assert "checkbox" not in main


def test_tools_are_found_and_added_and_taken_out_again(signed_in, research, weather):
    make_tool(make_server(slug="git"), "log", description=TEXT)
    page = signed_in.get("/groups/research?q=weather__&server=weather").content.decode()
    offered = re.findall(r'name="tool" value="([^"]+)"', page)
    assert offered == ["weather__a", "weather__b", "weather__c"]

    response = post(
        signed_in, "group-assign", "research", tool=["weather__a", "git__log"], address="q=weather"
    )

    assert response["Location"] == "/groups/research?q=weather"
    assert held(research) == [("git__log", None), ("weather__a", None)]
    press_undo(signed_in, "/groups/research", said="Added 2 tools to research.")
    assert held(research) == []


def test_a_member_is_preloaded_moved_and_removed_by_its_buttons(signed_in, research, weather):
    groups.assign(research, list(weather.tools.all()), actor=SYSTEM)
    first = weather.tools.get(name="a")

    response = post(signed_in, "group-preload", "research", always="weather__a")
    assert response["Location"] == f"/groups/research#tool-{first.pk}"
    assert held(research)[0] == ("weather__a", True)
    page = signed_in.get("/groups/research").content.decode()
    assert 'name="always" value="weather__a" class="segment" aria-pressed="true"' in page
    post(signed_in, "group-preload", "research", demand="weather__a")
    assert held(research)[0] == ("weather__a", False)
    post(signed_in, "group-preload", "research", default="weather__a")
    assert held(research)[0] == ("weather__a", None)

    post(signed_in, "group-order", "research", down="weather__a")
    assert [name for name, _ in held(research)] == ["weather__b", "weather__a", "weather__c"]
    post(signed_in, "group-order", "research", up="weather__c")
    assert [name for name, _ in held(research)] == ["weather__b", "weather__c", "weather__a"]

    post(signed_in, "group-remove", "research", remove="weather__c")
    assert [name for name, _ in held(research)] == ["weather__b", "weather__a"]
    press_undo(signed_in, "/groups/research")
    assert [name for name, _ in held(research)] == ["weather__b", "weather__c", "weather__a"]


def test_several_members_are_set_at_once(signed_in, research, weather):
    groups.assign(research, list(weather.tools.all()), actor=SYSTEM)
    chosen = ["weather__a", "weather__c"]

    post(signed_in, "group-preload", "research", always="", tool=chosen)
    assert [preload for _, preload in held(research)] == [True, None, True]
    post(signed_in, "group-remove", "research", remove="", tool=chosen)

    assert held(research) == [("weather__b", None)]


@pytest.mark.parametrize("act", ["group-assign", "group-remove", "group-preload", "group-order"])
def test_an_act_on_no_tool_or_on_an_unknown_one_says_so(act, signed_in, research):
    nothing = signed_in.post(reverse(act, args=["research"]), follow=True)
    assert "No tool is selected. Select at least one." in text_of(nothing)
    unknown = signed_in.post(reverse(act, args=["research"]), {"tool": "nowhere"}, follow=True)
    assert "There is no tool called nowhere." in text_of(unknown)


def test_a_tool_of_the_followed_server_has_no_button_to_remove_it(signed_in, weather):
    page = signed_in.get("/groups/mcp:weather").content.decode()
    assert "Remove weather__a" not in page

    refused = signed_in.post(
        reverse("group-remove", args=["mcp:weather"]), {"remove": "weather__a"}, follow=True
    )

    assert "Let the group stop following weather, or hold the tool." in text_of(refused)


def test_settings_are_saved_together_and_undone_together(signed_in, research, weather):
    groups.unfollow(weather.group, actor=SYSTEM)
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

    assert response["Location"] == "/groups/study"
    group = Group.objects.get(group_id="study")
    assert (group.preload_default, group.deferred, group.follows) == (True, False, weather)
    assert len(held(group)) == 3
    page = press_undo(signed_in, "/groups/study")
    assert page.redirect_chain[-1][0] == "/groups/research"
    group.refresh_from_db()
    assert (group.display_name, group.deferred, group.follows) == ("Research", True, None)
    assert held(group) == []


def test_settings_that_cannot_be_keep_what_was_typed(signed_in, research):
    response = post(signed_in, "group-edit", "research", group_id="mcp:weather", display_name="x")

    assert response.status_code == 422
    assert "There is a group called mcp:weather already." in text_of(response)
    assert Group.objects.filter(group_id="research").exists()


def test_saving_what_stands_says_that_nothing_changed(signed_in, research):
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

    assert "Nothing changed" in text_of(response)
    assert "/groups/undo/" not in response.content.decode()


def test_a_group_is_deleted_by_typing_its_id_and_comes_back(signed_in, research, weather):
    groups.assign(research, list(weather.tools.all()), actor=SYSTEM)
    wrong = post(signed_in, "group-delete", "research", typed_name="reserch")
    assert wrong.status_code == 422
    assert "This is not the name" in text_of(wrong)

    assert post(signed_in, "group-delete", "research", typed_name="research")["Location"] == (
        "/groups"
    )
    assert not Group.objects.filter(group_id="research").exists()
    page = press_undo(signed_in, "/groups")

    assert page.redirect_chain[-1][0] == "/groups/research"
    assert len(held(research)) == 3


def test_the_offer_is_made_once_and_a_late_undo_is_refused_in_words(signed_in, research):
    post(signed_in, "group-order", "research")
    post(signed_in, "groups-order", up="research")
    page = signed_in.get("/groups").content.decode()
    [where] = re.findall(r"/groups/undo/\d+", page)
    assert "/groups/undo/" not in signed_in.get("/groups").content.decode()
    signed_in.post(where)

    again = signed_in.post(where, follow=True)

    assert "This was undone already. Reload to see what stands now." in text_of(again)
    unknown = signed_in.post("/groups/undo/999999999999999999999", follow=True)
    assert "There is no such act to undo." in text_of(unknown)


def test_drift_is_said_with_reasons_and_new_tools_are_added_at_once(signed_in, research, weather):
    groups.assign(research, [weather.tools.get(name="a")], actor=SYSTEM)
    tools.hold(weather.tools.get(name="a"), "", actor=SYSTEM)
    make_tool(weather, "d", description=TEXT)

    page = text_of(signed_in.get("/groups/research"))

    assert "weather__a : Held: agents cannot find or call it." in page
    assert "1 new tool of the servers it takes tools from" in page
    post(signed_in, "group-assign", "research", tool="weather__d")
    assert "new tool" not in text_of(signed_in.get("/groups/research"))


def test_advice_is_listed_in_sentences(signed_in, research, weather):
    groups.describe(research, "", actor=SYSTEM)
    make_tool(weather, "silent")
    groups.assign(research, [weather.tools.get(name="silent")], actor=SYSTEM)

    page = text_of(signed_in.get("/groups/research"))

    assert "research has no description. Say in one line what its tools are for" in page
    assert "No description: 1 tool" in page
    assert "weather__silent has no description: agents find it by its name alone." in page


@pytest.mark.parametrize("address", ["https://evil.example/", "//evil.example", "\r\nX: y"])
def test_the_way_back_stays_on_this_site(address, signed_in, research):
    response = post(signed_in, "group-assign", "research", tool="weather__a", address=address)

    assert response["Location"].startswith("/groups/research")
    assert "\n" not in response["Location"]


def test_hostile_texts_are_shown_as_texts(signed_in, research, weather):
    nasty = "<script>alert(1)</script>\u202e"
    groups.edit(research, actor=SYSTEM, display_name=nasty, description=f'"><img src=x> {nasty}')
    make_tool(weather, "d", description=f"Return {nasty} to a town.")
    groups.assign(research, list(weather.tools.all()), actor=SYSTEM)

    for path in ("/groups", "/groups/research"):
        page = signed_in.get(path).content.decode()
        assert "<script>alert" not in page
        assert "<img src=x>" not in page
        assert "&lt;script&gt;alert(1)&lt;/script&gt;⟨U+202E⟩" in page


@pytest.mark.parametrize(
    "path", ["/groups", "/groups/research", "/groups/research?q=t&server=weather"]
)
def test_a_page_costs_the_same_for_few_and_for_many(
    path, signed_in, research, weather, django_assert_max_num_queries
):
    def cost(number):
        fold(weather, *[tool_object(f"t{at}") for at in range(number)], allow_removals=True)
        groups.assign(research, list(weather.tools.all()[: number // 2]), actor=SYSTEM)
        for at in range(number // 10):
            if not Group.objects.filter(group_id=f"g{at}").exists():
                groups.create(f"g{at}", "One", actor=SYSTEM)
        signed_in.get(path)  # the session is written once
        with django_assert_max_num_queries(35) as captured:
            signed_in.get(path)
        return len(captured)

    assert cost(10) == cost(300)
