"""Drive a real Chromium against a real installation: start it, set up the first admin, look."""

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
# The tests talk to 127.0.0.1 and to nobody else.
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
PICTURES = ROOT / ".cache" / "screenshots"  # one of each page, from the last run
PATIENCE = scaled(30_000)  # milliseconds for a sync to end

expect.set_options(timeout=scaled(10_000))


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=parts.chromium(), args=ARGS)
        try:
            yield browser
        finally:
            browser.close()


def set_up(page: Page, toolcrib: Installation, leads_to: str = "Connect your first server") -> None:
    """Make the first admin through the setup link."""
    page.goto(toolcrib.setup_url)
    page.get_by_label("E-mail").fill(ADMIN)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Create admin").click()
    expect(page.get_by_role("heading", name=leads_to).first).to_be_visible()
    page.wait_for_load_state()  # its scripts too


def signed_in(browser: Browser, toolcrib: Installation, *leads_to: str) -> Any:
    """Set the installation up and return the cookies of its admin."""
    context = browser.new_context()
    try:
        set_up(context.new_page(), toolcrib, *leads_to)
        return context.storage_state()
    finally:
        context.close()


def demo_entry() -> dict[str, Any]:
    return {"command": sys.executable, "args": ["-m", "servers.demo"], "cwd": str(ROOT)}


def mcp_json(servers: dict[str, Any]) -> str:
    return json.dumps({"mcpServers": servers}, indent=2)


def three_servers(weather_url: str) -> str:
    """A text with a program, an address that answers and one where nobody is."""
    headers = {"Authorization": "Bearer canary-of-the-browser"}
    return mcp_json(
        {
            "demo": demo_entry(),
            "weather": {"url": weather_url, "headers": headers},
            "nobody": {"url": f"http://127.0.0.1:{free_port()}/mcp"},
        }
    )


def watch(context: BrowserContext) -> list[str]:
    """Collect whatever the console complains about; refusals by the page are told by its text."""
    said: list[str] = []

    def note(message: Any) -> None:
        refused = "the server responded with a status of 4" in message.text
        # htmx's way to say that the page was left while it asked for something.
        left = re.match(r"htmx:(afterRequest|sendAbort|sendError)", message.text)
        if message.type in ("error", "warning") and not refused and not left:
            said.append(f"{message.text} at {message.location.get('url')}")

    context.on("console", note)
    context.on("weberror", lambda error: said.append(str(error.error)))
    return said


def axe(page: Page) -> list[str]:
    """Run axe-core over the page as it is, keep a picture of it, and return what is found."""
    folder = parts.npm_folder()
    assert folder, "axe-core is not installed"
    source = (parts.NPM / "node_modules" / "axe-core" / "axe.min.js").read_text()
    scheme = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light'")
    name = re.sub(r"\W+", "-", urlsplit(page.url).path).strip("-") or "overview"
    picture = page.screenshot(path=PICTURES / f"{name}-{scheme}.png", full_page=True)
    assert len(picture) > 5_000, f"{page.url} looks empty"
    page.evaluate(source)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{page.url} {one['id']}: {one['help']}: {[n['html'][:160] for n in one['nodes'][:3]]}"
        for one in found["violations"]
    ]


def scrolls_sideways(page: Page) -> bool:
    wide: bool = page.evaluate(
        "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    )
    return wide


def moving(page: Page) -> list[str]:
    """Return what still moves for those who asked for less motion."""
    found: list[str] = page.evaluate(
        """[...document.querySelectorAll("*")].filter((one) => {
          const style = getComputedStyle(one);
          const long = (text) => text.split(",").some((part) => parseFloat(part) > 0.01);
          return long(style.transitionDuration) || long(style.animationDuration);
        }).map((one) => `${location.pathname} moves: ${one.outerHTML.slice(0, 120)}`)"""
    )
    return found


def shapeless(page: Page) -> list[str]:
    """Return what has no border left to show its shape where colours are forced."""
    found: list[str] = page.evaluate(
        """[...document.querySelectorAll(
          ".panel, .status, .badge, .button, .notice, .toast, .chip, .empty:not(.filtered), select"
        )].filter((one) => {
          if (!one.checkVisibility()) return false;
          const style = getComputedStyle(one);
          return style.borderTopStyle === "none" || parseFloat(style.borderTopWidth) === 0;
        }).map((one) => `${location.pathname} has no shape: ${one.outerHTML.slice(0, 120)}`)"""
    )
    return found


def paste_and_connect(page: Page, text: str) -> None:
    """Complete the three steps of the import wizard, allowing every command."""
    page.goto(page.url.split("/servers")[0] + "/servers/add")
    page.get_by_label("Paste your mcp.json").fill(text)
    page.get_by_role("button", name="Check servers").click()
    page.wait_for_url("**/servers/add/check")
    for box in page.locator("input[name=confirm]").all():
        box.check()
    page.get_by_role("button", name="Connect servers").click()
    expect(page.get_by_text("with all schemas")).to_be_visible(timeout=PATIENCE)
