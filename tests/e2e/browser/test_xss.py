"""Sixty scripts in every field that servers and agents write; every page shows them as text."""

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
# Runs before anything else on each page, beyond the reach of the policy.
TRAP = """
window.__violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.__violations.push(`${event.violatedDirective} ${event.blockedURI} ${event.sample}`);
});
"""
LOOK = """() => {
  const wrong = [...window.__violations];
  if ("__x" in window) wrong.push("a script ran");
  for (const one of document.querySelectorAll("*")) {
    for (const { name, value } of one.attributes) {
      if (/^(hx-)?on/.test(name)) wrong.push(`${name} on ${one.tagName}`);
      if (/^(href|src|action|formaction|data|srcdoc)$/.test(name)
          && /^[\\u0000-\\u0020]*(javascript|data):/i.test(value)) wrong.push(`${name}=${value}`);
    }
  }
  const strange = "main :is(script, iframe, object, embed, base, meta, link, math, marquee, style)";
  for (const one of document.querySelectorAll(strange)) wrong.push(one.outerHTML.slice(0, 200));
  return wrong;
}"""
OPEN_ALL = "document.querySelectorAll('details').forEach(one => { one.open = true })"
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
        status, told = toolcrib.api("POST", "/servers", {**body, "description": ALL})
        assert status < 300, told
    wait_for(lambda: len(toolcrib.tool_names("hostile")) > 30, 60, what="hostile tools are there")
    status, told = toolcrib.api("PATCH", "/servers/hostile", {"trust": "review_changes"})
    assert status == 200, told


def plant_groups_and_agents(toolcrib):
    """Whatever name the API takes is shown; those it refuses are no danger."""
    for number, payload in enumerate(PAYLOADS):
        words = {"display_name": payload[:120], "description": payload}
        toolcrib.api("POST", "/groups", {"group_id": f"g{number}", **words})
        toolcrib.api("POST", "/agents", {"name": payload[:80], "description": payload})
    names = [f"hostile__{name}" for name in toolcrib.tool_names("hostile") if "tool_" in name]
    status, told = toolcrib.api("POST", "/groups/g0/members", {"tools": names})
    assert status < 300, told


def ask_for_all(toolcrib, session):
    """Look for each script and call a tool with it, one by one: a query is cut, a field is not."""
    _, key = toolcrib.api("POST", "/agents/bad/keys", {"name": PAYLOADS[13]})
    for payload in PAYLOADS:
        text = payload.replace("\0", "")
        path, token = f"/sessions/{session}", key["key"]
        status, told = toolcrib.api("POST", f"{path}/search", {"query": text}, token)
        assert status == 200, told
        body = {"tool_name": f"no__{text}"[:120], "arguments": {text: text}}
        status, told = toolcrib.api("POST", f"{path}/call", body, token)
        assert status == 200, told


def waiting(toolcrib):
    return len(toolcrib.api("GET", "/tools?state=waiting&limit=100")[1]["items"])


@pytest.fixture(scope="module")
def planted(tmp_path_factory, browser):
    """An installation full of scripts, and the cookies of its admin."""
    with (
        running_http("hostile", "--http", "0") as url,
        Installation(tmp_path_factory.mktemp("planted")) as toolcrib,
    ):
        cookies = driving.set_up_and_sign_in(browser, toolcrib)
        plant_servers(toolcrib, f"{url}/mcp")
        plant_groups_and_agents(toolcrib)
        clean = ALL.replace("\0", "")  # NUL is refused at the door
        call = {"choice": PAYLOADS[0], PAYLOADS[0]: clean}
        session = addresses.run_agent(toolcrib, "bad", "hostile__tool_0", query=clean[:480], **call)
        ask_for_all(toolcrib, session)
        for number in (2, 4):
            path = f"/tools/hostile__tool_{number}/try"
            status, told = toolcrib.api("POST", path, {"arguments": {}})
            assert status == 200, told
        toolcrib.api("POST", "/servers/hostile/sync")
        wait_for(lambda: waiting(toolcrib) > 30, 60, what="the changes wait for a decision")
        yield toolcrib, cookies, session


def bare(text):
    """A text without what pages mark or leave out: hidden characters and white space."""
    return "".join(one for one in text if one.isprintable() and not one.isspace())


NEEDLES = [bare(payload) for payload in PAYLOADS]


def shown(page):
    """Which scripts the page shows as text, each with all its characters."""
    text = bare(page.locator("body").text_content())
    return {number for number, needle in enumerate(NEEDLES) if needle in text}


def watched(browser, planted):
    toolcrib, cookies, _ = planted
    context = browser.new_context(base_url=toolcrib.url, storage_state=cookies)
    context.add_init_script(TRAP)
    wrong = driving.collect_console_errors(context)
    context.on("dialog", lambda dialog: (wrong.append("a dialog opened"), dialog.dismiss()))
    ours = urlsplit(toolcrib.url).netloc

    def note(asked):
        parts = urlsplit(asked.url)
        # The addresses of a tool and of an agent hold their names, scripts and all.
        planted_path = "__x" in parts.path and not parts.path.startswith(("/tools/", "/agents/"))
        if parts.scheme in ("http", "https") and (parts.netloc != ours or planted_path):
            wrong.append(f"asked for {asked.url}")

    context.on("request", note)
    return context, wrong


def test_sixty_scripts_in_every_field_stay_text_on_every_page(browser, planted):
    toolcrib, _, session = planted
    context, wrong = watched(browser, planted)
    page = context.new_page()
    examples = {
        "public_name": "hostile__tool_0",
        "group_id": "g0",
        "slug": "hostile",
        "name": "bad",
        "session_id": session,
    }
    paths = addresses.page_paths(addresses.fetch_all(context, examples))
    _, tools = toolcrib.api("GET", "/tools?server=hostile&limit=100")
    paths += [f"/tools/{quote(one['name'], safe='')}" for one in tools["items"]]
    _, agents = toolcrib.api("GET", "/agents?limit=100")
    paths += [f"/agents/{quote(one['name'], safe='')}" for one in agents["items"]]
    paths += [f"/groups/g{number}" for number in range(1, len(PAYLOADS))]
    paths += ["/servers/crasher", "/servers/crasher/syncs"]
    paths += [f"/tools?q={quote(PAYLOADS[13])}", f"/palette?q={quote(PAYLOADS[14])}"]
    seen = set()
    for path in paths:
        page.goto(path, wait_until="domcontentloaded")
        page.evaluate(OPEN_ALL)
        wrong += [f"{path}: {one}" for one in page.evaluate(LOOK)]
        seen |= shown(page)
    context.close()
    assert wrong == []
    missing = sorted(set(range(len(PAYLOADS))) - seen)
    assert missing == [], f"never seen as text: {[PAYLOADS[one] for one in missing]}"


def test_the_trap_works(browser, planted):
    """The test above can fail: a script that is let through is noticed."""
    context, _ = watched(browser, planted)
    page = context.new_page()
    page.goto("/servers")
    page.evaluate("document.querySelector('main').innerHTML = " + json.dumps(PAYLOADS[13]))
    wait_for(lambda: page.evaluate(LOOK), 10, what="the trap notices")
    found = " ".join(page.evaluate(LOOK))
    context.close()
    assert "onerror on IMG" in found
    assert "script-src" in found
