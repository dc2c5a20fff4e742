"""Every page offers only links and forms that the reader's role may use."""

import re
from html import unescape
from urllib.parse import urlsplit

import pytest
from django.urls import Resolver404, resolve

from tests.support.every_page import page_requests
from tests.support.people import make_person
from tests.support.seeding import seed
from toolcrib.lib.roles import Role, required_role_of

pytestmark = [pytest.mark.django_db, pytest.mark.timeout(300)]
LINK = re.compile(r'<a\b[^>]*?\shref="(/[^"]*)"')
FORM = re.compile(r'<form\b[^>]*?\smethod="post"[^>]*?>|<form\b[^>]*?>')
ACTION = re.compile(r'\s(?:form)?action="([^"]*)"')
BUTTON = re.compile(r'\sformaction="([^"]*)"')
# Of everybody who has signed in: they declare no role.
FOR_ALL = {"sign-out", "theme"}


def _targets(page: str, path: str):
    """Yield (URL, whether it is sent as a form)."""
    main = page.partition("<dialog")[0]  # dialogs are filled by a script
    for match in LINK.finditer(main):
        yield unescape(match[1]), False
    for match in FORM.finditer(main):
        if 'method="post"' in match[0]:
            action = ACTION.search(match[0])
            yield unescape(action[1]) if action else path, True
    for match in BUTTON.finditer(main):
        yield unescape(match[1]), True


@pytest.mark.parametrize("role", [Role.VIEWER, Role.OPERATOR])
def test_no_page_offers_what_its_reader_may_not_do(client, role):
    examples = seed(tools=12, groups=3, calls=30, sessions=4)
    client.force_login(make_person("otto@example.org", role))
    wrong, pages = set(), 0
    for request in page_requests(examples):
        response = request.send(client)
        if response.status_code != 200 or "html" not in response.headers["Content-Type"]:
            continue
        pages += 1
        for url, is_form in _targets(response.content.decode(), request.path):
            try:
                match = resolve(urlsplit(url).path or urlsplit(request.path).path)
            except Resolver404:
                continue
            if match.url_name in FOR_ALL or url.startswith("/api/"):
                continue
            if required_role_of(match.func, write=is_form) > role:
                wrong.add((request.label, url, "form" if is_form else "link"))
    assert pages > 30
    assert not wrong, "\n".join(map(str, sorted(wrong)))


def test_a_viewer_reads_figures_and_neither_payloads_nor_exports(client):
    examples = seed(tools=4, groups=2, calls=10, sessions=2)
    client.force_login(make_person("vera@example.org", Role.VIEWER))
    session = f"/sessions/{examples['session_id']}"
    page = client.get(f"{session}?step=5").content.decode()
    assert "Arguments and results are shown to operators and admins." in page
    for path in (f"{session}.json", "/audit/export.csv", "/usage/tools.csv", "/approvals/calls"):
        response = client.get(path)
        assert (path, response.status_code) == (path, 403)
    assert client.post("/approvals/some_tool/approve").status_code == 403
