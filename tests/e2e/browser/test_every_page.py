"""Every page of the URL conf, in a real Chromium: whole, reachable, and good for everybody."""

import re
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect

from tests.support import browser as driving
from tests.support import page_addresses as addresses

pytestmark = [
    pytest.mark.needs_chromium,
    pytest.mark.timeout(900),
]
OPEN_ALL = "document.querySelectorAll('main details').forEach(one => { one.open = true })"
# A menu lies over what is under it, and only one is open at a time: its targets have its own rows.
CLOSE_MENUS = "document.querySelectorAll('[data-menu]').forEach(one => { one.open = false })"
# What WCAG 2.5.8 asks: 24 px, or room around it; links within a sentence are excepted.
TARGETS = "axe.run(document, {runOnly: {type: 'rule', values: ['target-size']}})"
# A control called `remove` hides the method of its form from every script.
SHADOWED = """(() => {
  const plain = document.createElement("form");
  return [...document.forms].flatMap((form) => [...form.elements])
    .filter((control) => typeof plain[control.name] === "function")
    .map((control) => `${location.pathname} has a control called ${control.name}`);
})()"""
LONG = "A-name-that-nobody-would-break-" + "x" * 49
LONG_ID = "g" + "o" * 63
OPERATOR = """
from django.contrib.auth.models import User
from toolcrib.lib.roles import Role, give_role
user = User(username="otto@example.org")
give_role(user, Role.OPERATOR)
user.set_password("{}")
user.save()
"""


@pytest.fixture(scope="module")
def examples(filled):
    session = addresses.run_agent(
        filled, "sweeper", "weather__get_forecast", query="weather forecast", city="Oslo"
    )
    # Other tests leave long names behind, and so do people: they are here in any order of tests.
    for group in ("sweep", LONG_ID):
        body = {"group_id": group, "display_name": LONG, "description": LONG}
        status, told = filled.api("POST", "/groups", body)
        assert status < 300, told
    status, told = filled.api("POST", "/agents", {"name": LONG, "groups": ["sweep", LONG_ID]})
    assert status < 300, told
    yield {
        "public_name": "weather__get_forecast",
        "group_id": "mcp:weather",
        "slug": "weather",
        "name": "sweeper",
        "session_id": session,
    }
    for name in ("sweeper", LONG):
        filled.api("DELETE", f"/agents/{name}")
    for group in ("sweep", LONG_ID):
        filled.api("DELETE", f"/groups/{group}")


@pytest.fixture(scope="module")
def answers(browser, filled, cookies, examples):
    """What every address answers to an admin."""
    context = browser.new_context(base_url=filled.url, storage_state=cookies)
    try:
        return addresses.fetch_all(context, examples)
    finally:
        context.close()


def test_every_address_has_an_example_and_none_of_them_fails(answers):
    wrong = [f"{one.name} {one.path}: {one.status}" for one in answers if one.kind == "wrong"]
    assert wrong == []
    assert len(addresses.page_paths(answers)) >= 20


def test_every_page_has_one_heading_a_title_of_its_own_and_a_way_past_the_navigation(answers):
    wrong, titles = [], {}
    for one in answers:
        if one.kind != "page":
            continue
        title = re.search(r"<title>(.*?)</title>", one.text, re.S)
        words = title.group(1).strip() if title else ""
        if one.text.count("<h1") != 1:
            wrong.append(f"{one.path}: {one.text.count('<h1')} h1")
        if not words or words.startswith("Toolcrib"):
            wrong.append(f"{one.path}: title {words!r}")
        if 'class="skip" href="#main"' not in one.text or '<main id="main"' not in one.text:
            wrong.append(f"{one.path}: no skip link")
        if "?" not in one.path and titles.setdefault(words, one.name) != one.name:
            wrong.append(f"{one.path}: has the title of {titles[words]}, {words!r}")
    assert wrong == []


@pytest.mark.needs_npm
@pytest.mark.parametrize("theme", driving.THEMES)
def test_axe_finds_nothing_and_nothing_is_asked_of_another_host(theme, answers, filled, open_page):
    page = open_page(color_scheme=theme, bypass_csp=True)
    strangers = []
    page.on("request", lambda asked: _note_stranger(asked.url, filled.url, strangers))
    found = []
    for path in addresses.page_paths(answers):
        page.goto(path)
        page.evaluate(OPEN_ALL)
        found += driving.run_axe(page)
        if theme == "light":
            page.evaluate(CLOSE_MENUS)
            small = page.evaluate(TARGETS)["violations"]
            found += [f"{path} target: {n['html'][:160]}" for v in small for n in v["nodes"][:3]]
    assert strangers == []
    assert "\n".join(found) == ""


def _note_stranger(url, ours, strangers):
    parts = urlsplit(url)
    if parts.scheme in ("http", "https", "ws", "wss") and parts.netloc != urlsplit(ours).netloc:
        strangers.append(url)


def test_every_page_is_good_at_320_pixels_with_forced_colours_and_less_motion(answers, open_page):
    page = open_page(width=320, height=640, forced_colors="active", reduced_motion="reduce")
    wrong = []
    more = [f"/agents/{LONG}", f"/agents/{LONG}/settings", f"/groups/{LONG_ID}", "/patterns/"]
    for path in [*addresses.page_paths(answers), *more]:
        page.goto(path)
        page.evaluate(OPEN_ALL)
        if driving.scrolls_sideways(page):
            wrong.append(f"{path} scrolls sideways")
        wrong += (
            driving.animated_elements(page)
            + driving.borderless_elements(page)
            + page.evaluate(SHADOWED)
        )
    assert "\n".join(wrong) == ""


def test_every_destination_is_reached_by_tab_and_enter_alone(filled, open_page):
    page = open_page()
    page.goto("/")
    wanted = [one.get_attribute("href") for one in page.locator(".sidebar .nav a").all()]
    assert len(wanted) >= 7
    for address in wanted:
        page.goto("/palette")
        for _ in range(40):
            page.keyboard.press("Tab")
            here = page.evaluate("document.activeElement.getAttribute('href')")
            if here == address and page.evaluate("!!document.activeElement.closest('.nav')"):
                break
        else:
            pytest.fail(f"{address} is not reached by Tab")
        page.keyboard.press("Enter")
        expect(page).to_have_url(re.compile(re.escape(address) + "($|/)"))
        expect(page.locator("h1")).to_be_visible()


def test_no_page_traps_the_keyboard(answers, open_page):
    """Tab comes round to the page's beginning however long the page is."""
    page = open_page()
    trapped = []
    for path in addresses.page_paths(answers):
        page.goto(path)
        # Backwards from the start leaves the page at once; one step forward is the skip link.
        page.locator("main").focus()
        before, stays = None, 0
        for _ in range(12):
            page.keyboard.press("Tab")
            now = page.evaluate(
                "(() => { const all = [...document.querySelectorAll('*')];"
                " return all.indexOf(document.activeElement) })()"
            )
            # A date has parts of its own to step through, and the end of a page is no trap.
            stays = stays + 1 if now == before else 0
            if stays == 6:
                trapped.append(path)
                break
            before = now
    assert trapped == []


def test_an_operator_sees_a_page_or_is_told_which_role_is_needed(
    browser, filled, answers, examples
):
    made = filled.command("shell", "-c", OPERATOR.format(driving.PASSWORD))
    assert made.returncode == 0, made.stderr
    context = browser.new_context(base_url=filled.url)
    page = context.new_page()
    page.goto("/sign-in")
    page.get_by_label("E-mail").fill("otto@example.org")
    page.get_by_label("Password").fill(driving.PASSWORD)
    page.keyboard.press("Enter")
    expect(page.get_by_role("navigation", name="Pages").first).to_be_visible()
    wrong, seen = [], 0
    for one in addresses.fetch_all(context, examples):
        if one.status == 403:
            if "This requires the role admin" not in one.text:
                wrong.append(f"{one.path}: 403 without the role")
        elif one.kind == "wrong":
            wrong.append(f"{one.path}: {one.status}")
        seen += one.kind == "page"
    context.close()
    assert wrong == []
    assert seen >= 15


def test_a_stranger_sees_the_sign_in_form_and_nothing_else(browser, filled, answers):
    context = browser.new_context(base_url=filled.url)
    open_to_all = [
        one.path
        for one in answers
        if one.kind != "act"
        and "/sign-in"
        not in context.request.get(one.path, max_redirects=0).headers.get("location", "")
    ]
    page = context.new_page()
    page.goto("/sign-in")
    expect(page.locator("h1")).to_have_count(1)
    context.close()
    assert open_to_all == []
