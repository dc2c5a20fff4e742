"""XSS: sixty payloads in every field that servers and agents write stay text on every page."""

import json
import sys
from urllib.parse import quote, urlsplit

import pytest

from tests.support import browser as driving
from tests.support import page_addresses as addresses
from tests.support.installation import Installation
from tests.support.upstreams.hostile import ALL, PAYLOADS
from tests.support.upstreams.running import running_http
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.needs_chromium,
    pytest.mark.timeout(900),
]
# Runs before all other scripts of a page, outside the content security policy.
TRAP = """
window.__violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.__violations.push(`${event.violatedDirective} ${event.blockedURI} ${event.sample}`);
});
"""
LOOK = """() => {
  const wrong = [...window.__violations];
  if ("__x" in window) wrong.push("a script ran");
  for (const element of document.querySelectorAll("*")) {
    for (const { name, value } of element.attributes) {
      if (/^(hx-)?on/.test(name)) wrong.push(`${name} on ${element.tagName}`);
      if (/^(href|src|action|formaction|data|srcdoc)$/.test(name)
          && /^[\\u0000-\\u0020]*(javascript|data):/i.test(value)) wrong.push(`${name}=${value}`);
    }
  }
  const unsafe = "main :is(script, iframe, object, embed, base, meta, link, math, marquee, style)";
  for (const element of document.querySelectorAll(unsafe)) {
    wrong.push(element.outerHTML.slice(0, 200));
  }
  return wrong;
}"""
OPEN_ALL = "document.querySelectorAll('details').forEach(element => { element.open = true })"
CRASH = f"import sys; sys.stderr.write({ALL!r}); sys.exit(3)"


def plant_servers(toolcrib, url):
    for body in (
        {"name": PAYLOADS[13], "slug": "hostile", "transport": "http", "url": url},
        {
            "name": PAYLOADS[14],
            "slug": "crasher",
            "transport": "stdio",
            "command": sys.executable,
            "args": ["-c", CRASH],
            "confirm_argv": [sys.executable, "-c", CRASH],
        },
    ):
        status, response = toolcrib.api("POST", "/servers", {**body, "description": ALL})
        assert status < 300, response
    wait_for(
        lambda: len(toolcrib.tool_names("hostile")) > 30,
        60,
        what="the hostile tools are in the catalog",
    )
    status, body = toolcrib.api("PATCH", "/servers/hostile", {"trust": "review_changes"})
    assert status == 200, body


def plant_groups_and_agents(toolcrib):
    """Create groups and agents with payloads; names that the API rejects are no risk."""
    for number, payload in enumerate(PAYLOADS):
        fields = {"display_name": payload[:120], "description": payload}
        toolcrib.api("POST", "/groups", {"group_id": f"g{number}", **fields})
        toolcrib.api("POST", "/agents", {"name": payload[:80], "description": payload})
    names = [f"hostile__{name}" for name in toolcrib.tool_names("hostile") if "tool_" in name]
    status, body = toolcrib.api("POST", "/groups/g0/members", {"tools": names})
    assert status < 300, body


def search_and_call(toolcrib, session):
    """Search for each payload and call a tool with it, one by one, since queries are truncated."""
    _, key = toolcrib.api("POST", "/agents/bad/keys", {"name": PAYLOADS[13]})
    for payload in PAYLOADS:
        text = payload.replace("\0", "")
        path, token = f"/sessions/{session}", key["key"]
        status, body = toolcrib.api("POST", f"{path}/search", {"query": text}, token)
        assert status == 200, body
        body = {"tool_name": f"no__{text}"[:120], "arguments": {text: text}}
        status, response = toolcrib.api("POST", f"{path}/call", body, token)
        assert status == 200, response


def count_pending(toolcrib):
    return len(toolcrib.api("GET", "/tools?state=waiting&limit=100")[1]["items"])


@pytest.fixture(scope="module")
def planted(tmp_path_factory, browser):
    """An installation with payloads in every field, and the cookies of its admin."""
    with (
        running_http("hostile", "--http", "0") as url,
        Installation(tmp_path_factory.mktemp("planted")) as toolcrib,
    ):
        cookies = driving.set_up_and_sign_in(browser, toolcrib)
        plant_servers(toolcrib, f"{url}/mcp")
        plant_groups_and_agents(toolcrib)
        clean = ALL.replace("\0", "")  # NUL is rejected by the API
        call = {"choice": PAYLOADS[0], PAYLOADS[0]: clean}
        ids = addresses.run_agent(toolcrib, "bad", "hostile__tool_0", query=clean[:480], **call)
        search_and_call(toolcrib, ids["session_id"])
        for number in (2, 4):
            path = f"/tools/hostile__tool_{number}/try"
            status, body = toolcrib.api("POST", path, {"arguments": {}})
            assert status == 200, body
        toolcrib.api("POST", "/servers/hostile/sync")
        wait_for(lambda: count_pending(toolcrib) > 30, 60, what="the changes are pending review")
        yield toolcrib, cookies, ids


def normalize(text):
    """Remove characters that pages mark or omit: invisible characters and whitespace."""
    return "".join(char for char in text if char.isprintable() and not char.isspace())


NEEDLES = [normalize(payload) for payload in PAYLOADS]


def payloads_on(page):
    """Return the numbers of the payloads that the page shows completely as text."""
    text = normalize(page.locator("body").text_content())
    return {number for number, needle in enumerate(NEEDLES) if needle in text}


def watched(browser, planted):
    toolcrib, cookies, _ = planted
    context = browser.new_context(base_url=toolcrib.url, storage_state=cookies)
    context.add_init_script(TRAP)
    wrong = driving.collect_console_errors(context)
    context.on("dialog", lambda dialog: (wrong.append("a dialog opened"), dialog.dismiss()))
    ours = urlsplit(toolcrib.url).netloc

    def check_request(request):
        parts = urlsplit(request.url)
        # The URLs of a tool and of an agent contain their names, including payloads.
        planted_path = "__x" in parts.path and not parts.path.startswith(("/tools/", "/agents/"))
        if parts.scheme in ("http", "https") and (parts.netloc != ours or planted_path):
            wrong.append(f"requested {request.url}")

    context.on("request", check_request)
    return context, wrong


def test_sixty_payloads_in_every_field_stay_text_on_every_page(browser, planted):
    toolcrib, _, ids = planted
    context, wrong = watched(browser, planted)
    page = context.new_page()
    examples = {
        "public_name": "hostile__tool_0",
        "group_id": "g0",
        "slug": "hostile",
        "name": "bad",
        **ids,
    }
    paths = addresses.page_paths(addresses.fetch_all(context, examples))
    _, tools = toolcrib.api("GET", "/tools?server=hostile&limit=100")
    paths += [f"/tools/{quote(tool['name'], safe='')}" for tool in tools["items"]]
    _, agents = toolcrib.api("GET", "/agents?limit=100")
    paths += [f"/agents/{quote(agent['name'], safe='')}" for agent in agents["items"]]
    paths += [f"/groups/g{number}" for number in range(1, len(PAYLOADS))]
    paths += ["/servers/crasher", "/servers/crasher/syncs"]
    paths += [f"/tools?q={quote(PAYLOADS[13])}", f"/palette?q={quote(PAYLOADS[14])}"]
    seen = set()
    for path in paths:
        page.goto(path, wait_until="domcontentloaded")
        page.evaluate(OPEN_ALL)
        wrong += [f"{path}: {problem}" for problem in page.evaluate(LOOK)]
        seen |= payloads_on(page)
    context.close()
    assert wrong == []
    missing = sorted(set(range(len(PAYLOADS))) - seen)
    assert missing == [], f"never shown as text: {[PAYLOADS[number] for number in missing]}"


def test_the_detection_works(browser, planted):
    """The test above can fail: a payload that is not escaped is detected."""
    context, _ = watched(browser, planted)
    page = context.new_page()
    page.goto("/servers")
    page.evaluate("document.querySelector('main').innerHTML = " + json.dumps(PAYLOADS[13]))
    wait_for(lambda: page.evaluate(LOOK), 10, what="the payload is detected")
    problems = " ".join(page.evaluate(LOOK))
    context.close()
    assert "onerror on IMG" in problems
    assert "script-src" in problems
