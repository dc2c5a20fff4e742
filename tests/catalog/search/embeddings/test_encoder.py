"""Search by meaning with the real model: what it finds, what it costs, what happens without it."""

from pathlib import Path

import numpy as np
import pytest

from catalog.search.embeddings import encoder as sentence_encoder
from catalog.search.embeddings.encoder import WIDTH, ModelUnavailable, batches, passage
from catalog.search.embeddings.matrix import DetachedMatrix, Matrix
from catalog.search.engine import search
from catalog.search.index import Index, Searchable


def tool(name, description="", parameters="", hints=()):
    slug, _, own = name.partition("__")
    return Searchable(name, own, slug, "", description, parameters, (), hints)


TOOLS = [
    tool("weather__get_forecast", "Return the forecast for a city.", "city\ndays"),
    tool("git__create_issue", "Open a new issue in a repository.", "repository\ntitle\nbody"),
    tool("mail__send_message", "Send an e-mail to somebody.", "to\nsubject\nbody"),
    tool("files__remove", "Delete a file from the disk.", "path"),
    tool("sums__convert", "Convert an amount of money between currencies.", "amount\nfrom\nto"),
]


@pytest.fixture(scope="module")
def encoder(request):
    root = Path(request.config.rootpath)
    return sentence_encoder.load(root / ".cache" / "models")


@pytest.fixture(scope="module")
def index(encoder):
    return Index(TOOLS, DetachedMatrix(encoder, {one.key: one.passage for one in TOOLS}))


def first(index, query, strategy="hybrid", **asked):
    answer = search(index, query=query, strategy=strategy, **asked)
    assert answer.strategy == strategy
    return answer.hits[0].name if answer.hits else None


def test_vectors_are_those_of_the_published_model(encoder):
    happy, very, dog = encoder.encode_documents(
        [sentence_encoder.PARTS.join([text]) for text in (
            "That is a happy person", "That is a very happy person", "That is a happy dog"
        )]
    )  # fmt: skip

    assert happy @ very == pytest.approx(0.9429, abs=2e-4)
    assert happy @ dog == pytest.approx(0.6946, abs=2e-4)
    assert np.linalg.norm(happy) == pytest.approx(1, abs=1e-5)


def test_queries_in_bytes_point_where_full_precision_points(encoder):
    text = "How do I create an issue in a repository and assign it to a colleague?"

    assert float(encoder.encode_queries([text])[0] @ encoder.encode_documents([text])[0]) > 0.98


@pytest.mark.parametrize("strategy", ["hybrid", "embedding"])
@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("will it rain tomorrow", "weather__get_forecast"),
        ("report a bug", "git__create_issue"),
        ("erase a document", "files__remove"),
        ("how many euros are ten dollars", "sums__convert"),
    ],
)
def test_a_tool_is_found_that_shares_no_word_with_the_query(index, query, name, strategy):
    assert first(index, query, strategy) == name


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("enviar un e-mail a alguien", "mail__send_message"),
        ("eine E-Mail senden", "mail__send_message"),
        ("envoyer un message", "mail__send_message"),
        ("convertir la monnaie", "sums__convert"),
    ],
)
def test_queries_in_other_languages_find_what_is_near(index, query, name):
    assert first(index, query) == name


@pytest.mark.parametrize("strategy", ["hybrid", "bm25", "embedding"])
@pytest.mark.parametrize(
    "query",
    ["发送电子邮件", "¿?!…", "--- ***", "x" * 500, "天気 🔥", "\ud800", "\x00", "' OR 1=1 --", "a"],
)
def test_any_query_is_answered(index, query, strategy):
    answer = search(index, query=query, strategy=strategy)

    assert answer.strategy == strategy
    assert answer.total >= len(answer.hits)
    assert all(np.isfinite(hit.score) for hit in answer.hits)


@pytest.mark.parametrize("query", ["zzzz", "?!", "…"])
def test_what_means_nothing_finds_nothing(index, query):
    assert search(index, query=query).total == 0


def test_several_wishes_in_one_sentence_find_a_tool_for_each(index):
    query = "look up the forecast for Oslo, and then send an e-mail about it to Ann"

    hits = [hit.name for hit in search(index, query=query, limit=2).hits]

    assert set(hits) == {"weather__get_forecast", "mail__send_message"}


def test_both_parts_are_told_for_people(index):
    hit = search(index, query="open an issue").hits[0]

    assert (hit.bm25, hit.embedding) == (1, 1)
    assert set(hit.matched) == {"open", "issue"}


def test_a_mistake_in_a_word_is_mended_and_said(index):
    hit = search(index, query="forcast", strategy="bm25").hits[0]

    assert hit.name == "weather__get_forecast"
    assert hit.reasons == ("“forcast” → “forecast”",)
    assert hit.matched == ("forecast",)


def test_an_admins_words_are_found_by_word_and_by_meaning(encoder):
    tools = [
        tool("a__x1", "Does it.", hints=("book a train",)),
        tool("a__x2", "Does it."),
        tool("a__x3", "Does that."),
    ]
    index = Index(tools, DetachedMatrix(encoder, {one.key: one.passage for one in tools}))

    assert first(index, "train", "bm25") == "a__x1"
    assert first(index, "railway tickets", "embedding") == "a__x1"


def test_a_server_hint_lifts_and_leaves_nothing_out(encoder):
    tools = [tool(f"{server}__list_items", "List items.") for server in ("calendar", "shop", "zoo")]
    index = Index(tools, DetachedMatrix(encoder, {one.key: one.passage for one in tools}))

    for hint in ("shop", "zoo", "calendar"):
        answer = search(index, query="list items", server_hint=hint)
        assert answer.hits[0].name == f"{hint}__list_items"
        assert answer.total == 3


def test_tools_whose_vectors_are_still_to_come_are_found_by_their_words(encoder):
    apart = DetachedMatrix(encoder, {one.key: one.passage for one in TOOLS[1:]})
    index = Index(TOOLS, apart)

    answer = search(index, query="forecast")
    assert answer.hits[0].name == "weather__get_forecast"
    assert answer.note.startswith("1 of 5 tools")
    assert search(index, query="forecast", strategy="embedding").hits[0].name == TOOLS[0].name

    apart.matrix.add({TOOLS[0].key: encoder.encode_documents([TOOLS[0].passage])[0]})
    assert search(index, query="forecast").note == ""
    assert first(index, "will it rain") == "weather__get_forecast"


def test_a_search_before_any_vector_goes_by_words_and_says_so(encoder):
    answer = search(Index(TOOLS, DetachedMatrix(encoder, {})), query="forecast")

    assert (answer.strategy, answer.hits[0].name) == ("bm25", "weather__get_forecast")
    assert "still being computed" in answer.note


def test_weights_that_are_not_the_expected_ones_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sentence_encoder, "WEIGHTS_SHA256", "0" * 64)

    with pytest.raises(ModelUnavailable, match="not the ones expected"):
        sentence_encoder.load(tmp_path)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sentence_encoder, "PACKAGE", "no_such_package")

    with pytest.raises(ModelUnavailable, match="no_such_package is missing"):
        sentence_encoder.load(tmp_path)


def test_a_broken_graph_is_no_model(tmp_path):
    (tmp_path / sentence_encoder.GRAPH).mkdir()
    (tmp_path / sentence_encoder.GRAPH / "queries.onnx").write_bytes(b"nonsense")

    with pytest.raises(ModelUnavailable, match="does not run"):
        sentence_encoder.load(tmp_path)


def test_batches_hold_every_text_once_and_like_lengths():
    lengths = [3, 40, 4, 90, 5, 41] + [7] * 40

    made = list(batches(lengths))

    assert sorted(at for some in made for at in some) == list(range(len(lengths)))
    assert all(len(some) <= sentence_encoder.BATCH for some in made)
    assert all(lengths[some[-1]] <= sentence_encoder.PADDING * lengths[some[0]] for some in made)


def test_a_passage_keeps_its_parts_apart_and_bounded():
    parts = passage("createIssue", "d" * 9_000, "ownerName\x1f", ("bug",)).split(
        sentence_encoder.PARTS
    )

    assert len(parts) == 4
    assert parts[1:] == ["create Issue", "create Issue: owner Name", "bug"]
    assert len(parts[0]) == sentence_encoder.LONGEST_PART


def test_rows_that_come_later_do_not_move_those_there():
    matrix = Matrix()
    vectors = np.random.default_rng(1).normal(size=(3_000, WIDTH)).astype(np.float32)
    keys = [f"k{n}" for n in range(3_000)]
    matrix.add(dict(zip(keys[:10], vectors, strict=False)))
    rows = matrix.rows([*keys[:10], "later"])
    before = matrix.products(rows, vectors[:2])

    matrix.add(dict(zip(keys, vectors, strict=True)))

    assert np.allclose(matrix.products(rows, vectors[:2])[:10], before[:10], rtol=1e-4)
    assert np.isnan(before[10]).all()
    assert np.allclose(
        matrix.products(matrix.rows(keys), vectors[:2]),
        vectors @ vectors[:2].T,
        rtol=1e-3,
        atol=1e-3,
    )
