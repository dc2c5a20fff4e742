"""Template tags and filters."""

from datetime import UTC, datetime, timedelta

import pytest
from django import forms
from django.template import Context, Template
from django.test import RequestFactory
from django.utils import timezone
from django.utils.safestring import SafeString

from toolcrib.pages import style_guide
from toolcrib.templatetags import toolcrib as tags


def render(source, path="/tools/", **values):
    request = RequestFactory().get(path)
    return Template(source).render(Context({"request": request, **values}))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.42, "420 ms"),
        (0.9996, "1.0 s"),
        (1.23, "1.2 s"),
        (59.6, "1 min"),
        (75, "1 min 15 s"),
        (7500, "2 h 5 min"),
        (90_000, "1 d 1 h"),
        (None, "–"),
    ],
)
def test_durations_use_the_two_largest_units(seconds, text):
    assert tags.duration(seconds) == text


def test_numbers_have_thousands_separators_and_a_minus_sign():
    assert tags.thousands(1234567) == "1,234,567"
    assert tags.tokens(1940) == "≈1,940 tokens"
    assert tags.tokens(1) == "≈1 token"
    assert tags.thousands(None) == "–"
    assert tags.thousands(-1940) == "−1,940"


@pytest.mark.parametrize(
    ("age", "text"),
    [
        (timedelta(seconds=2), "just now"),
        (timedelta(seconds=42), "42 s ago"),
        (timedelta(minutes=2, seconds=5), "2 min ago"),
        (timedelta(hours=5, seconds=5), "5 h ago"),
        (timedelta(days=1, seconds=5), "1 day ago"),
        (timedelta(minutes=-5, seconds=-5), "in 5 min"),
    ],
)
def test_times_are_shown_as_distances(age, text):
    assert f">{text}</time>" in tags.ago(timezone.now() - age)


def test_a_time_has_its_full_form_as_title():
    html = tags.ago(datetime(2025, 11, 3, 14, 2, 11, tzinfo=UTC))

    assert 'datetime="2025-11-03T14:02:11+00:00"' in html
    assert 'title="Mon 3 Nov 2025, 14:02:11 UTC"' in html
    assert tags.ago(None) == "never"


@pytest.mark.parametrize(
    "code", [0x202E, 0x200B, 0x2066, 0xE0041, 0x07, 0x1B, 0xAD, 0x3164, 0xFEFF]
)
def test_hidden_characters_are_escaped(code):
    assert tags.visible(f"a{chr(code)}b") == f"a⟨U+{code:04X}⟩b"


def test_ordinary_text_of_any_script_is_unchanged():
    text = "Straße, 東京, עברית, naïve 🙂\n\tline two"
    assert tags.visible(text) == text
    assert tags.visible("a\r\nb") == "a\nb"


def test_visible_text_is_escaped_even_if_marked_as_safe():
    assert render("{{ text|visible }}", text=SafeString("<b>")) == "&lt;b&gt;"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Return it. Then stop.", "Return it."),
        ("Return a city, e.g. Oslo. Then stop.", "Return a city, e.g. Oslo."),
        ("\n\n# Title here\nmore", "Title here"),
        ("Reads v1.2 files", "Reads v1.2 files"),
        ("", ""),
    ],
)
def test_the_first_sentence_is_found(text, sentence):
    assert tags.first_sentence(text) == sentence


def test_a_long_first_sentence_is_cut_at_a_word():
    assert tags.first_sentence("word " * 100, 20) == "word word word word…"


def test_a_query_string_changes_one_parameter_and_keeps_the_others():
    path = "/tools/?server=a&server=b&q=x+y&after=9"

    assert render("{% query_string q='z' %}", path) == "?server=a&amp;server=b&amp;q=z"
    assert render("{% query_string q=None %}", path) == "?server=a&amp;server=b"
    assert render("{% query_string after='12' q='' %}", "/?q=x") == "?after=12"


def test_a_sort_header_shows_its_order_and_reverses_it():
    head = "{% sort_header 'tokens' 'Tokens' default='-tokens' number=True %}"

    assert 'aria-sort="descending"' in render(head)
    assert 'href="?sort=tokens"' in render(head)
    assert 'aria-sort="ascending"' in render(head, "/?sort=tokens")
    assert "aria-sort" not in render(head, "/?sort=name")


def test_a_status_has_a_glyph_and_a_label():
    html = render("{% status 'failing' count=3 %}")

    assert "#glyph-triangle" in html
    assert "Failing, 3 retries" in html
    assert "tone-bad" in html
    assert "&lt;odd&gt;" in render("{% status state %}", state="<odd>")


def test_a_badge_states_that_the_server_reports_it():
    assert "reported by server" in render("{% badge 'destructive' %}")
    assert tags.claims({"readOnlyHint": True, "destructiveHint": "yes"}) == ["read-only"]


def test_a_token_bar_has_its_number_and_names_its_estimator():
    html = render("{% token_bar 1640 300 0 0 budget=1500 %}")

    assert "≈1,940 / 1,500" in html
    assert "≈440 over" in html
    assert "Estimated with" in html
    assert 'fill="url(#hatch)"' in html


def test_a_diff_marks_added_and_removed_text():
    html = render(
        "{% diff spans %}", spans=[("same", "a "), ("removed", "<b>"), ("added", "\u202ec")]
    )

    assert "a <del>" in html
    assert "[removed: </i>&lt;b&gt;" in html
    assert "[added: </i>⟨U+202E⟩c" in html


def test_a_field_references_its_help_text_and_errors():
    class NameForm(forms.Form):
        name = forms.CharField(help_text="Short.")

    html = render("{% error_summary form %}{% field form.name %}", form=NameForm({}))

    assert 'aria-describedby="id_name_helptext id_name_error"' in html
    assert 'id="id_name_helptext"' in html
    assert 'id="id_name_error"' in html
    assert '<a href="#id_name">Name</a>' in html
    assert "Correct 1 field:" in html


def test_progress_shows_the_failed_stage():
    html = render("{% progress 'crm' 'listing' failed=True note='The response is HTML.' %}")

    assert html.index("#glyph-check") < html.index("#glyph-cross")
    assert "listing" in html
    assert "Failed" in html


def test_a_schema_is_rendered_as_an_outline():
    rows = tags.outline(style_guide.SAMPLES["schema"])

    assert [(row["name"], row["type"], row["required"]) for row in rows] == [
        ("city", "string", True),
        ("units", "string", False),
        ("days", "integer or null", False),
        ("places", "list of object", False),
    ]
    assert rows[1]["choices"] == ['"metric"', '"imperial"']
    assert [row["name"] for row in rows[3]["fields"]] == ["lat", "lon"]


@pytest.mark.parametrize(
    "schema", [{}, {"properties": 3}, {"properties": {"a": True}}, {"items": []}, {"type": 7}, None]
)
def test_a_schema_of_any_shape_can_be_outlined(schema):
    assert isinstance(tags.outline(schema), list)
    assert isinstance(tags.type_name(schema), str)


def test_a_deep_schema_is_truncated():
    schema = {"type": "string"}
    for _ in range(50):
        schema = {"type": "object", "properties": {"deeper": schema}}

    html = render("{% schema_outline schema %}", schema=schema)

    assert html.count("deeper") == tags.OUTLINE_DEPTH


def test_every_component_renders_without_inline_script_or_style():
    html = render(
        "{% include 'toolcrib/pages/style_guide.html' %}", "/patterns/", **style_guide.sample()
    )

    assert " style=" not in html
    assert " onclick=" not in html
    assert "<script>" not in html
    for label, _tone, _glyph in tags.STATUSES.values():
        assert label in html
