"""Chromium tests against a real installation: set-up, import wizard, axe and layout checks."""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.support import parts
from tests.support.installation import ROOT, Installation, free_port
from tests.support.people import PASSWORD
from tests.support.waiting import scaled

ADMIN = "ada@example.org"
# The tests connect to 127.0.0.1 only.
ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-proxy-server",
]
THEMES = ("light", "dark")
SCREENSHOTS = ROOT / ".cache" / "screenshots"  # one for each page, from the last run
SYNC_TIMEOUT_MS = scaled(30_000)  # time limit of a sync

expect.set_options(timeout=scaled(10_000))


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=parts.chromium(), args=ARGS)
        try:
            yield browser
        finally:
            browser.close()


def set_up(
    page: Page, toolcrib: Installation, next_heading: str = "Connect your first server"
) -> None:
    """Create the first admin through the setup link."""
    page.goto(toolcrib.setup_url)
    page.get_by_label("E-mail").fill(ADMIN)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Create admin").click()
    expect(page.get_by_role("heading", name=next_heading).first).to_be_visible()
    page.wait_for_load_state()  # until its scripts have run


def set_up_and_sign_in(browser: Browser, toolcrib: Installation, *next_heading: str) -> Any:
    """Create the first admin and return the cookies of the signed-in browser."""
    context = browser.new_context()
    try:
        set_up(context.new_page(), toolcrib, *next_heading)
        return context.storage_state()
    finally:
        context.close()


def demo_entry() -> dict[str, Any]:
    return {"command": sys.executable, "args": ["-m", "servers.demo"], "cwd": str(ROOT)}


def mcp_json(servers: dict[str, Any]) -> str:
    return json.dumps({"mcpServers": servers}, indent=2)


def three_servers(weather_url: str) -> str:
    """Return an mcp.json with a command, a URL that works and a URL with no listener."""
    headers = {"Authorization": "Bearer canary-of-the-browser"}
    return mcp_json(
        {
            "demo": demo_entry(),
            "weather": {"url": weather_url, "headers": headers},
            "nobody": {"url": f"http://127.0.0.1:{free_port()}/mcp"},
        }
    )


def collect_console_errors(context: BrowserContext) -> list[str]:
    """Return a list that collects console errors; 4xx responses are not errors of the page."""
    errors: list[str] = []

    def record(message: Any) -> None:
        refused = "the server responded with a status of 4" in message.text
        # htmx logs these when the page is left during a request.
        aborted = re.match(r"htmx:(afterRequest|sendAbort|sendError)", message.text)
        if message.type in ("error", "warning") and not refused and not aborted:
            errors.append(f"{message.text} at {message.location.get('url')}")

    context.on("console", record)
    context.on("weberror", lambda error: errors.append(str(error.error)))
    return errors


def run_axe(page: Page) -> list[str]:
    """Run axe-core on the page in its current state, save a screenshot, return the violations."""
    folder = parts.npm_folder()
    assert folder, "axe-core is not installed"
    source = (parts.NPM / "node_modules" / "axe-core" / "axe.min.js").read_text()
    scheme = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light'")
    name = re.sub(r"\W+", "-", urlsplit(page.url).path).strip("-") or "overview"
    screenshot = page.screenshot(path=SCREENSHOTS / f"{name}-{scheme}.png", full_page=True)
    assert len(screenshot) > 5_000, f"{page.url} renders empty"
    page.evaluate(source)
    results = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{page.url} {rule['id']}: {rule['help']}: {[n['html'][:160] for n in rule['nodes'][:3]]}"
        for rule in results["violations"]
    ]


def scrolls_sideways(page: Page) -> str:
    """Return the element that reaches furthest beyond the window, or an empty string."""
    widest: str = page.evaluate(
        """() => {
          const page = document.documentElement;
          if (page.scrollWidth <= page.clientWidth) return "";
          const right = (element) => element.getBoundingClientRect().right;
          const clips = (element) => getComputedStyle(element).overflowX !== "visible";
          const isClipped = (element) => {
            for (let outer = element.parentElement; outer && outer !== document.body; ) {
              if (clips(outer)) return true;
              outer = outer.parentElement;
            }
            return false;
          };
          const shown = (element) => element.checkVisibility() && !isClipped(element);
          const all = [...document.body.querySelectorAll("*")].filter(shown);
          return all.reduce((a, b) => (right(b) > right(a) ? b : a)).outerHTML.slice(0, 200);
        }"""
    )
    return widest


def animated_elements(page: Page) -> list[str]:
    """Return the elements with a transition or animation (for `prefers-reduced-motion`)."""
    elements: list[str] = page.evaluate(
        """[...document.querySelectorAll("*")].filter((element) => {
          const style = getComputedStyle(element);
          const long = (text) => text.split(",").some((part) => parseFloat(part) > 0.01);
          return long(style.transitionDuration) || long(style.animationDuration);
        }).map((element) => `${location.pathname} animated: ${element.outerHTML.slice(0, 120)}`)"""
    )
    return elements


def borderless_elements(page: Page) -> list[str]:
    """Return the components without a border, which are invisible in forced-colors mode."""
    elements: list[str] = page.evaluate(
        """[...document.querySelectorAll(
          ".panel, .status, .badge, .button, .notice, .toast, .chip, .empty:not(.filtered), select"
        )].filter((element) => {
          if (!element.checkVisibility()) return false;
          const style = getComputedStyle(element);
          return style.borderTopStyle === "none" || parseFloat(style.borderTopWidth) === 0;
        }).map((element) => `${location.pathname} borderless: ${element.outerHTML.slice(0, 99)}`)"""
    )
    return elements


def paste_and_connect(page: Page, text: str) -> None:
    """Complete the three steps of the import wizard, allowing every command."""
    page.goto(page.url.split("/servers")[0] + "/servers/add")
    page.get_by_label("Paste your mcp.json").fill(text)
    page.get_by_role("button", name="Check servers").click()
    page.wait_for_url("**/servers/add/check")
    for box in page.locator("input[name=confirm]").all():
        box.check()
    page.get_by_role("button", name=re.compile("^Connect")).click()
    expect(page.get_by_text("with all schemas")).to_be_visible(timeout=SYNC_TIMEOUT_MS)
