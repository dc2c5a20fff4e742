"""Screenshots of every page at two widths in both themes.

Run as `python -m tests.support.screenshots [folder]`. Most pages are those of `make demo`; separate
installations provide the first-run pages, the empty pages and failing servers.
"""

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from tests.support import browser as driving
from tests.support.installation import READY, ROOT, Installation, Process
from tests.support.upstreams.running import running_http, stdio_argv

WIDTHS = {1280: 800, 390: 844}
BAD_TEXT = '{\n  "mcpServers": {\n    "weather": {"url": "https://example.com/mcp",}\n    "x"\n'


def mixed_servers(stack: ExitStack, weather: str) -> str:
    """Return an mcp.json with healthy servers, failing servers and entries with problems."""
    raw = stack.enter_context(running_http("raw_http"))
    crash = {"command": sys.executable, "args": ["-c", "raise SystemExit('no licence found')"]}
    return driving.mcp_json(
        {
            "weather": {"url": weather, "headers": {"Authorization": "Bearer not-shown"}},
            "toolcrib-demo": driving.demo_entry(),
            "many": {"command": sys.executable, "args": stdio_argv("many")[1:], "cwd": str(ROOT)},
            "crm": {"url": f"{raw}/html", "headers": {"X-Api-Key": "not-shown"}},
            "tickets": {"url": f"{raw}/401"},
            "ledger": crash,
            "reports": {"url": f"{raw}/500?api_key=sk-1234567890abcdef1234"},
            "wiki": {"url": f"{raw}/${{WIKI_SPACE}}/mcp", "retries": 3},
            "both": {"url": "https://example.com/mcp", "command": "npx"},
        }
    )


@contextmanager
def page_opener(
    browser: Browser, toolcrib: Installation, cookies: object
) -> Iterator[Callable[[str, int], Page]]:
    contexts = []

    def open_page(theme: str, width: int) -> Page:
        context = browser.new_context(
            base_url=toolcrib.url,
            storage_state=cookies,  # type: ignore[arg-type]
            color_scheme=theme,  # type: ignore[arg-type]
            viewport={"width": width, "height": WIDTHS[width]},
        )
        contexts.append(context)
        return context.new_page()

    yield open_page
    for context in contexts:
        context.close()


class Camera:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        folder.mkdir(parents=True, exist_ok=True)

    def save(
        self, page: Page, name: str, theme: str, width: int, *, full_page: bool = True
    ) -> None:
        page.screenshot(path=self.folder / f"{name}-{width}-{theme}.png", full_page=full_page)
        self.count += 1


# Pages of the demo installation, by file name.
PAGES = {
    "overview": "/",
    "servers": "/servers",
    "servers-filtered": "/servers?state=failing&sort=-tokens",
    "servers-none": "/servers?q=nothing-like-it",
    "server": "/servers/tickets",
    "server-tools": "/servers/toolbox/tools",
    "server-syncs": "/servers/analytics/syncs",
    "server-settings": "/servers/analytics/settings",
    "server-crashed": "/servers/crm",
    "tools": "/tools",
    "tools-by-cost": "/tools?sort=-tokens",
    "tools-waiting": "/tools?state=waiting",
    "tools-none": "/tools?q=nothing-like-it",
    "tool": "/tools/tickets__create_ticket",
    "tool-waiting": "/tools/analytics__compare_periods",
    "tool-held": "/tools/tickets__delete_ticket",
    "tool-custom-add": "/tools/custom/add",
    "try": "/tools/calendar__create_event/try",
    "groups": "/groups",
    "group": "/groups/mcp:tickets",
    "group-mixed": "/groups/daily:support",
    "group-over": "/groups/trial:everything",
    "group-json": "/groups/daily:support?tab=json",
    "group-curl": "/groups/daily:support?tab=curl",
    "group-change": "/groups/mcp:tickets?tab=change",
    "group-filtered": "/groups/daily:support?q=nothing-like-it",
    "group-empty": "/groups/empty",
    "group-settings": "/groups/daily:support/edit",
    "groups-compare": "/groups/all/compare?group=daily:support&group=mcp:tickets",
    "search": "/search",
    "search-found": "/search?q=open+a+ticket+for+a+customer&agent=support-desk",
    "search-none": "/search?q=delete_ticket&agent=support-desk",
    "search-regex": "/search?q=^tickets__.*ticket$&mode=regex",
    "golden": "/search/golden",
    "hints": "/search/hints",
    "missed": "/search/missed",
    "agents": "/agents",
    "agent-add": "/agents/new/add",
    "agent": "/agents/support-desk",
    "agent-keys": "/agents/archivist/keys",
    "agent-connect": "/agents/support-desk/connect",
    "agent-settings": "/agents/analyst/settings",
    "approvals": "/approvals",
    "sessions": "/sessions",
    "sessions-errors": "/sessions?errors=1&agent=handyman",
    "sessions-none": "/sessions?agent=nobody",
    "usage": "/usage",
    "usage-narrowed": "/usage?range=24h&agent=support-desk&sort=-errors",
    "usage-nothing": "/usage?agent=nobody",
    "audit": "/audit",
    "audit-local": "/audit?target=server&times=local",
    "audit-none": "/audit?q=nothing-like-it",
    "settings": "/settings/general",
    "settings-tokens": "/settings/tokens",
    "settings-sync": "/settings/sync",
    "settings-retention": "/settings/retention",
    "people": "/settings/people",
    "about": "/settings/about",
    "profile": "/settings/profile",
    "palette": "/palette?q=ticket",
    "patterns": "/patterns/",
    "not-found": "/servers/no-such-server",
}
# Pages of an installation with failing servers.
FAILING_PAGES = {
    "servers-failing": "/servers",
    "add-url": "/servers/add?source=url",
    "add-command": "/servers/add?source=command",
    "add-demo": "/servers/add?source=demo",
    "progress": "/servers/add/progress",
    "server-http": "/servers/weather/settings",
    "failing-auth": "/servers/tickets",
    "failing-html": "/servers/crm/syncs",
    "attention": "/",
}
# Pages of an empty installation.
EMPTY_PAGES = (
    ("first-run", "/"),
    ("servers-empty", "/servers"),
    ("agents-empty", "/agents"),
    ("groups-empty", "/groups"),
    ("search-empty", "/search"),
    ("golden-empty", "/search/golden"),
    ("approvals-empty", "/approvals"),
    ("tools-empty", "/tools"),
    ("sessions-empty", "/sessions"),
    ("usage-empty", "/usage"),
    ("audit-empty", "/audit"),
)


def empty_pages(camera: Camera, open_page: Callable[[str, int], Page]) -> None:
    for page, theme, width in themes_and_widths(open_page):
        walk(camera, page, dict(EMPTY_PAGES), theme, width)
        page.goto("/servers/add")
        camera.save(page, "add", theme, width)
        page.get_by_label("Paste your mcp.json").fill(BAD_TEXT)
        page.get_by_role("button", name="Check servers").click()
        page.locator("#source-problem .notice").wait_for()
        camera.save(page, "add-bad-json", theme, width)


def check_pages(camera: Camera, open_page: Callable[[str, int], Page], text: str) -> None:
    for page, theme, width in themes_and_widths(open_page):
        page.goto("/servers/add")
        page.get_by_label("Paste your mcp.json").fill(text)
        page.get_by_role("button", name="Check servers").click()
        page.wait_for_url("**/check")
        camera.save(page, "check", theme, width)


def first_minute(camera: Camera, browser: Browser) -> None:
    """Photograph the end of the import wizard and the first agent, in a new installation."""
    with tempfile.TemporaryDirectory() as folder, Installation(Path(folder) / "data") as toolcrib:
        context = browser.new_context(base_url=toolcrib.url)
        page = context.new_page()
        driving.set_up(page, toolcrib)

        def save(name: str) -> None:
            for theme in driving.THEMES:
                for width, height in WIDTHS.items():
                    page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
                    page.set_viewport_size({"width": width, "height": height})
                    camera.save(page, name, theme, width)

        page.get_by_role("button", name="Use the demo server").click()
        page.get_by_role("button", name="Create groups").wait_for(timeout=90_000)
        save("first-saving")
        page.get_by_role("button", name="Create groups").click()
        save("first-group")
        page.get_by_role("button", name="Connect an agent").click()
        key = page.locator(".new-key code").inner_text()
        save("first-agent")
        toolcrib.api("POST", "/sessions", {}, key)
        page.locator(".first-request.ok").wait_for()
        save("first-request")
        page.goto("/")
        save("first-overview")
        context.close()


def fill(page: Page, text: str) -> None:
    page.goto("/servers/add")
    page.get_by_label("Paste your mcp.json").fill(text)
    page.get_by_role("button", name="Check servers").click()
    page.wait_for_url("**/check")
    for box in page.locator("input[name=confirm]").all():
        box.check()
    page.get_by_role("button", name=re.compile("^Connect")).click()


def new_key(camera: Camera, page: Page, theme: str, width: int) -> None:
    page.goto("/agents/archivist/keys")
    page.get_by_role("button", name="Create key").click()
    page.locator(".new-key").wait_for()
    camera.save(page, "agent-new-key", theme, width)


def overlays(camera: Camera, page: Page, theme: str, width: int) -> None:
    """Photograph overlays: the palette, the keyboard shortcuts, a selection and the undo toast."""
    page.goto("/")
    page.keyboard.press("Control+k")
    page.keyboard.type("ticket")
    page.locator("#palette-found [role=option]", has_text="tickets__").first.wait_for()
    camera.save(page, "palette-open", theme, width, full_page=False)
    page.goto("/servers")
    page.keyboard.press("?")
    page.locator("dialog[open]").wait_for()
    camera.save(page, "keys", theme, width, full_page=False)
    page.goto("/groups/daily:support?in=no")
    for box in page.locator("[data-pick] input").all()[:2]:
        box.check()
    page.locator("[data-given=demand] input[name=on]").first.check()
    page.locator(".toast").wait_for()
    camera.save(page, "group-undo", theme, width, full_page=False)
    page.get_by_role("button", name="Undo").click()
    page.locator("#live", has_text="Undone.").wait_for(state="attached")


def session_pages(toolcrib: Installation) -> dict[str, str]:
    """Return the paths of the newest session with an error and the newest with a fork."""
    rows = toolcrib.api("GET", "/sessions?limit=100")[1]["items"]
    failed = next(row for row in rows if row["errors"] and row["agent"] == "handyman")
    forked = next(row for row in rows if row["agent"] == "analyst" and not row["parent"])
    return {"session": f"/sessions/{failed['id']}", "session-forked": f"/sessions/{forked['id']}"}


def demo_pages(camera: Camera, browser: Browser, folder: Path) -> None:
    toolcrib = Installation(folder)
    with Process(toolcrib._argv("demo"), toolcrib.env) as process:
        toolcrib.process = process
        setup = process.wait_for_line(READY, 300).rpartition("/setup/")[2]
        toolcrib.setup_url = f"{toolcrib.url}/setup/{setup}"
        cookies = driving.set_up_and_sign_in(browser, toolcrib, "Overview")
        toolcrib.api("POST", "/groups", {"group_id": "empty", "display_name": "Nothing yet"})
        pages = {**PAGES, **session_pages(toolcrib)}
        with page_opener(browser, toolcrib, cookies) as open_page:
            for page, theme, width in themes_and_widths(open_page):
                new_key(camera, page, theme, width)
                overlays(camera, page, theme, width)
                walk(camera, page, pages, theme, width)


def failing_pages(camera: Camera, browser: Browser, folder: Path) -> None:
    """Photograph set-up, import and servers that fail in many ways."""
    with ExitStack() as stack:
        toolcrib = stack.enter_context(Installation(folder, {"TOOLCRIB_CONNECT_TIMEOUT": "3"}))
        with page_opener(browser, toolcrib, None) as open_page:
            for page, theme, width in themes_and_widths(open_page):
                walk(
                    camera, page, {"setup": toolcrib.setup_url, "sign-in": "/sign-in"}, theme, width
                )
        cookies = driving.set_up_and_sign_in(browser, toolcrib)
        open_page = stack.enter_context(page_opener(browser, toolcrib, cookies))
        weather = stack.enter_context(running_http("healthy"))
        text = mixed_servers(stack, weather)
        empty_pages(camera, open_page)
        check_pages(camera, open_page, text)
        page = open_page("light", 1280)
        fill(page, text)
        camera.save(page, "connecting", "light", 1280)
        expect(page.get_by_text("with all schemas")).to_be_visible(timeout=90_000)
        for page, theme, width in themes_and_widths(open_page):
            walk(camera, page, FAILING_PAGES, theme, width)


def themes_and_widths(open_page: Callable[[str, int], Page]) -> Iterator[tuple[Page, str, int]]:
    for theme in driving.THEMES:
        for width in WIDTHS:
            yield open_page(theme, width), theme, width


def walk(camera: Camera, page: Page, pages: dict[str, str], theme: str, width: int) -> None:
    for name, path in pages.items():
        page.goto(path)
        for details in page.locator(".runs details").all()[:1]:
            details.locator("summary").click()
        camera.save(page, name, theme, width)


def main(folder: Path) -> None:
    camera = Camera(folder)
    with (
        tempfile.TemporaryDirectory(prefix="toolcrib-shots-") as data,
        driving.chromium() as browser,
    ):
        demo_pages(camera, browser, Path(data) / "demo")
        first_minute(camera, browser)
        failing_pages(camera, browser, Path(data) / "kinds")
    sys.stdout.write(f"{camera.count} screenshots are in {folder}.\n")


if __name__ == "__main__":
    os.environ.pop("DJANGO_SETTINGS_MODULE", None)
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "screenshots")
