"""Browser and installation fixtures for this folder only.

Playwright's event loop would interfere with tests that run their own, hence the scope.
"""

import pytest
from playwright.sync_api import PageAssertions  # type: ignore[attr-defined]

from tests.support import browser as driving
from tests.support.installation import Installation
from tests.support.upstreams.running import running_http


@pytest.fixture(scope="package")
def browser():
    with driving.chromium() as browser, pytest.MonkeyPatch.context() as patched:
        patched.setattr(PageAssertions, "to_have_url", _to_have_url_and_scripts)
        yield browser


_to_have_url = PageAssertions.to_have_url


def _to_have_url_and_scripts(self, *args, **options):
    """Wait for the scripts too: a page has its URL before its scripts have run."""
    _to_have_url(self, *args, **options)
    self._sync(self._impl_obj._actual_page.wait_for_load_state("load", None))


@pytest.fixture(scope="package")
def weather_url():
    with running_http("healthy") as url:
        yield url


@pytest.fixture(scope="package")
def toolcrib(tmp_path_factory):
    """A shared installation; its admin is created on first use of `cookies`."""
    with Installation(tmp_path_factory.mktemp("toolcrib")) as toolcrib:
        yield toolcrib


@pytest.fixture
def fresh(tmp_path):
    """An installation without an admin."""
    with Installation(tmp_path / "data") as toolcrib:
        yield toolcrib


@pytest.fixture(scope="package")
def cookies(browser, toolcrib):
    return driving.set_up_and_sign_in(browser, toolcrib)


@pytest.fixture
def open_page(browser, toolcrib, cookies):
    """Open pages as the admin: open_page(width=320). Console errors fail the test."""
    contexts = []

    def open_one(*, width=1280, height=800, **options):
        state = options.pop("storage_state", cookies)
        context = browser.new_context(
            base_url=toolcrib.url,
            storage_state=state,
            viewport={"width": width, "height": height},
            **options,
        )
        contexts.append((context, driving.collect_console_errors(context)))
        return context.new_page()

    yield open_one
    errors = []
    for context, console_errors in contexts:
        context.close()
        errors += console_errors
    assert errors == []


@pytest.fixture(scope="package")
def populated(browser, toolcrib, cookies, weather_url):
    """The shared installation with three servers, one of them unreachable."""
    context = browser.new_context(base_url=toolcrib.url, storage_state=cookies)
    page = context.new_page()
    page.goto("/servers")
    driving.paste_and_connect(page, driving.three_servers(weather_url))
    context.close()
    return toolcrib
