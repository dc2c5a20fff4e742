"""Every page of the URL conf in Chromium: structure, accessibility, access rights."""

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
OPEN_ALL = "document.querySelectorAll('main details').forEach(element => { element.open = true })"
# An open menu covers other targets, and only one is open at a time.
CLOSE_MENUS = (
    "document.querySelectorAll('[data-menu]').forEach(element => { element.open = false })"
)
# WCAG 2.5.8: targets of 24 px, or spacing; links within a sentence are exempt.
TARGETS = "axe.run(document, {runOnly: {type: 'rule', values: ['target-size']}})"
# A control named `remove` shadows the method of its form in scripts.
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
def examples(populated):
    ids = addresses.run_agent(
        populated, "sweeper", "weather__get_forecast", query="weather forecast", city="Oslo"
    )
    # Long names, as users and other tests create them, whatever the order of tests.
    for group in ("sweep", LONG_ID):
        body = {"group_id": group, "display_name": LONG, "description": LONG}
        status, response = populated.api("POST", "/groups", body)
        assert status < 300, response
    status, body = populated.api("POST", "/agents", {"name": LONG, "groups": ["sweep", LONG_ID]})
    assert status < 300, body
    yield {
        "public_name": "weather__get_forecast",
        "group_id": "mcp:weather",
        "slug": "weather",
        "name": "sweeper",
        **ids,
    }
    for name in ("sweeper", LONG):
        populated.api("DELETE", f"/agents/{name}")
    for group in ("sweep", LONG_ID):
        populated.api("DELETE", f"/groups/{group}")


@pytest.fixture(scope="module")
def responses(browser, populated, cookies, examples):
    """The responses of every URL to an admin."""
    context = browser.new_context(base_url=populated.url, storage_state=cookies)
    try:
        return addresses.fetch_all(context, examples)
    finally:
        context.close()


def test_every_url_has_an_example_and_none_of_them_fails(responses):
    wrong = [
        f"{response.name} {response.path}: {response.status}"
        for response in responses
        if response.kind == "wrong"
    ]
    assert wrong == []
    assert len(addresses.page_paths(responses)) >= 20


def test_every_page_has_one_heading_a_unique_title_and_a_skip_link(responses):
    wrong, titles = [], {}
    for response in responses:
        if response.kind != "page":
            continue
        title = re.search(r"<title>(.*?)</title>", response.text, re.S)
        text = title.group(1).strip() if title else ""
        if response.text.count("<h1") != 1:
            wrong.append(f"{response.path}: {response.text.count('<h1')} h1")
        if not text or text.startswith("Toolcrib"):
            wrong.append(f"{response.path}: title {text!r}")
        if (
            'class="skip" href="#main"' not in response.text
            or '<main id="main"' not in response.text
        ):
            wrong.append(f"{response.path}: no skip link")
        if "?" not in response.path and titles.setdefault(text, response.name) != response.name:
            wrong.append(f"{response.path}: has the title of {titles[text]}, {text!r}")
    assert wrong == []


@pytest.mark.needs_npm
@pytest.mark.parametrize("theme", driving.THEMES)
def test_axe_finds_nothing_and_no_request_goes_to_another_host(
    theme, responses, populated, open_page
):
    page = open_page(color_scheme=theme, bypass_csp=True)
    foreign = []
    page.on("request", lambda request: _record_foreign(request.url, populated.url, foreign))
    violations = []
    for path in addresses.page_paths(responses):
        page.goto(path)
        page.evaluate(OPEN_ALL)
        violations += driving.run_axe(page)
        if theme == "light":
            page.evaluate(CLOSE_MENUS)
            small = page.evaluate(TARGETS)["violations"]
            violations += [
                f"{path} target: {n['html'][:160]}" for v in small for n in v["nodes"][:3]
            ]
    assert foreign == []
    assert "\n".join(violations) == ""


def _record_foreign(url, ours, foreign):
    parts = urlsplit(url)
    if parts.scheme in ("http", "https", "ws", "wss") and parts.netloc != urlsplit(ours).netloc:
        foreign.append(url)


def test_every_page_works_at_320_pixels_with_forced_colours_and_reduced_motion(
    responses, open_page
):
    page = open_page(width=320, height=640, forced_colors="active", reduced_motion="reduce")
    wrong = []
    extra = [f"/agents/{LONG}", f"/agents/{LONG}/settings", f"/groups/{LONG_ID}", "/patterns/"]
    for path in [*addresses.page_paths(responses), *extra]:
        page.goto(path)
        page.evaluate(OPEN_ALL)
        if widest := driving.scrolls_sideways(page):
            wrong.append(f"{path} scrolls sideways: {widest}")
        wrong += (
            driving.animated_elements(page)
            + driving.borderless_elements(page)
            + page.evaluate(SHADOWED)
        )
    assert "\n".join(wrong) == ""


def test_every_destination_is_reached_with_tab_and_enter_alone(populated, open_page):
    page = open_page()
    page.goto("/")
    links = [link.get_attribute("href") for link in page.locator(".sidebar .nav a").all()]
    assert len(links) >= 7
    for address in links:
        page.goto("/palette")
        for _ in range(40):
            page.keyboard.press("Tab")
            focused = page.evaluate("document.activeElement.getAttribute('href')")
            if focused == address and page.evaluate("!!document.activeElement.closest('.nav')"):
                break
        else:
            pytest.fail(f"{address} is not reached by Tab")
        page.keyboard.press("Enter")
        expect(page).to_have_url(re.compile(re.escape(address) + "($|/)"))
        expect(page.locator("h1")).to_be_visible()


def test_no_page_traps_the_keyboard(responses, open_page):
    """Tab returns to the start of the page, however long the page is."""
    page = open_page()
    trapped = []
    for path in addresses.page_paths(responses):
        page.goto(path)
        # One step back from the start leaves the page; one step forward is the skip link.
        page.locator("main").focus()
        before, stays = None, 0
        for _ in range(12):
            page.keyboard.press("Tab")
            now = page.evaluate(
                "(() => { const all = [...document.querySelectorAll('*')];"
                " return all.indexOf(document.activeElement) })()"
            )
            # Date inputs have several tab stops, and the end of a page is not a trap.
            stays = stays + 1 if now == before else 0
            if stays == 6:
                trapped.append(path)
                break
            before = now
    assert trapped == []


def test_an_operator_sees_a_page_or_the_required_role(browser, populated, responses, examples):
    process = populated.command("shell", "-c", OPERATOR.format(driving.PASSWORD))
    assert process.returncode == 0, process.stderr
    context = browser.new_context(base_url=populated.url)
    page = context.new_page()
    page.goto("/sign-in")
    page.get_by_label("E-mail").fill("otto@example.org")
    page.get_by_label("Password").fill(driving.PASSWORD)
    page.keyboard.press("Enter")
    expect(page.get_by_role("navigation", name="Pages").first).to_be_visible()
    wrong, pages = [], 0
    for response in addresses.fetch_all(context, examples):
        if response.status == 403:
            if "This requires the role admin" not in response.text:
                wrong.append(f"{response.path}: 403 without the role")
        elif response.kind == "wrong":
            wrong.append(f"{response.path}: {response.status}")
        pages += response.kind == "page"
    context.close()
    assert wrong == []
    assert pages >= 15


def test_a_signed_out_user_sees_only_the_sign_in_form(browser, populated, responses):
    context = browser.new_context(base_url=populated.url)
    open_to_all = [
        response.path
        for response in responses
        if response.kind != "act"
        and "/sign-in"
        not in context.request.get(response.path, max_redirects=0).headers.get("location", "")
    ]
    page = context.new_page()
    page.goto("/sign-in")
    expect(page.locator("h1")).to_have_count(1)
    context.close()
    assert open_to_all == []
