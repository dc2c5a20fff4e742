"""Prompts and resources of a server: its Tools tab, and the API."""

from django.db import transaction
from django.utils import timezone

from catalog.definitions import features
from catalog.models import Feature
from sessions_app.models import Call
from tests.support.factories import make_server

LISTINGS = {
    "prompt": [{"name": "summarize", "description": "Sum it up. In short."}],
    "resource": [
        {"uri": "docs://<b>guide</b>", "name": "guide", "description": "The guide."},
        {"uri": "no scheme", "name": "invalid"},
    ],
    "template": [{"uriTemplate": "docs://{page}", "name": "pages"}],
}
GUIDE = "crib://docs/docs%3A%2F%2F%3Cb%3Eguide%3C%2Fb%3E"


def add_features():
    server = make_server(slug="docs")
    remote, invalid = features.read_features(LISTINGS, 100_000)
    with transaction.atomic():
        assert features.apply_features(server, remote, LISTINGS)
    assert invalid == 1
    return server


def test_the_tools_tab_lists_prompts_and_resources_with_their_uses(operator, page_of):
    server = add_features()
    now = timezone.now()
    Call.objects.create(
        server=server,
        tool_name=GUIDE,
        path="resource",
        state="succeeded",
        accepted_at=now,
        deadline=now,
    )
    page = page_of(operator, "/servers/docs/tools").content.decode()
    for text in ("summarize", "docs__summarize", "Sum it up.", GUIDE, "Resource template"):
        assert text in page
    assert "In short" not in page
    assert "<b>guide" not in page
    row = page[page.index(GUIDE) :]
    assert '<td class="num">1</td>' in row[: row.index("</tr>")]


def test_the_api_lists_them_in_pages(client, operator_token):
    add_features()
    found, cursor = [], ""
    for _ in range(2):
        response = client.get(
            f"/api/v1/servers/docs/features?limit=2&cursor={cursor}",
            HTTP_AUTHORIZATION=f"Bearer {operator_token}",
        )
        body = response.json()
        found += [(item["kind"], item["name"]) for item in body["items"]]
        cursor = body["next_cursor"]
    assert cursor is None
    assert found == [
        ("prompt", "docs__summarize"),
        ("resource", GUIDE),
        ("template", "crib://docs/docs%3A%2F%2F{page}"),
    ]
    assert Feature.objects.count() == 3
