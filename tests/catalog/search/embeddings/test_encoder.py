"""Semantic search with the real model: results, pending vectors, and an unavailable model."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from catalog.search.embeddings import encoder as sentence_encoder
from catalog.search.embeddings.encoder import WIDTH, ModelUnavailable, batches, passage
from catalog.search.embeddings.matrix import DetachedMatrix, Matrix
from catalog.search.engine import search
from catalog.search.evaluation import passages
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


def first(index, query, strategy="hybrid", **parameters):
    result = search(index, query=query, strategy=strategy, **parameters)
    assert result.strategy == strategy
    return result.hits[0].name if result.hits else None


def test_vectors_are_those_of_the_published_model(encoder):
    happy, very, dog = encoder.encode_documents(
        [sentence_encoder.PART_SEPARATOR.join([text]) for text in (
            "That is a happy person", "That is a very happy person", "That is a happy dog"
        )]
    )  # fmt: skip

    assert happy @ very == pytest.approx(0.9429, abs=2e-4)
    assert happy @ dog == pytest.approx(0.6946, abs=2e-4)
    assert np.linalg.norm(happy) == pytest.approx(1, abs=1e-5)


def test_int8_query_vectors_are_close_to_full_precision(encoder):
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
def test_a_tool_without_a_common_term_is_found(index, query, name, strategy):
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
def test_queries_in_other_languages_find_similar_tools(index, query, name):
    assert first(index, query) == name


@pytest.mark.parametrize("strategy", ["hybrid", "bm25", "embedding"])
@pytest.mark.parametrize(
    "query",
    ["发送电子邮件", "¿?!…", "--- ***", "x" * 500, "天気 🔥", "\ud800", "\x00", "' OR 1=1 --", "a"],
)
def test_any_query_returns_a_result(index, query, strategy):
    result = search(index, query=query, strategy=strategy)

    assert result.strategy == strategy
    assert result.total >= len(result.hits)
    assert all(np.isfinite(hit.score) for hit in result.hits)


@pytest.mark.parametrize("query", ["zzzz", "?!", "…"])
def test_a_meaningless_query_finds_nothing(index, query):
    assert search(index, query=query).total == 0


def test_a_query_with_two_clauses_finds_a_tool_for_each(index):
    query = "look up the forecast for Oslo, and then send an e-mail about it to Ann"

    hits = [hit.name for hit in search(index, query=query, limit=2).hits]

    assert set(hits) == {"weather__get_forecast", "mail__send_message"}


def test_hits_include_both_partial_scores(index):
    hit = search(index, query="open an issue").hits[0]

    assert (hit.bm25, hit.embedding) == (1, 1)
    assert set(hit.matched) == {"open", "issue"}


def test_a_misspelled_term_is_corrected_and_explained(index):
    hit = search(index, query="forcast", strategy="bm25").hits[0]

    assert hit.name == "weather__get_forecast"
    assert hit.reasons == ("“forcast” → “forecast”",)
    assert hit.matched == ("forecast",)


def test_hints_are_found_by_keyword_and_semantically(encoder):
    tools = [
        tool("a__x1", "Does it.", hints=("book a train",)),
        tool("a__x2", "Does it."),
        tool("a__x3", "Does that."),
    ]
    index = Index(tools, DetachedMatrix(encoder, {one.key: one.passage for one in tools}))

    assert first(index, "train", "bm25") == "a__x1"
    assert first(index, "railway tickets", "embedding") == "a__x1"


def test_phrases_raise_a_tool_and_never_lower_it(encoder):
    plain = [tool("a__x1", "Convert a currency."), tool("a__x2", "Translate a text.")]
    phrased = [replace(plain[0], phrases=("feed the neighbour's cat",)), plain[1]]

    def scores(tools, query):
        index = Index(tools, DetachedMatrix(encoder, passages(tools)))
        return index.similarities(encoder.encode_queries([query]))[:, 0]

    far, near = "exchange rate of the dollar", "who looks after my cat"
    assert scores(phrased, far) == pytest.approx(scores(plain, far), abs=1e-3)
    assert scores(phrased, near)[0] > scores(plain, near)[0] + 0.2
    assert scores(phrased, near)[1] == pytest.approx(scores(plain, near)[1], abs=1e-3)


def test_a_tool_whose_phrases_have_no_vector_yet_is_scored_without_them(encoder):
    item = replace(tool("a__x1", "Convert a currency."), phrases=("feed the cat",))
    matrix = DetachedMatrix(encoder, {item.key: item.passage})
    vectors = encoder.encode_queries(["convert euros"])

    similarities = Index([item], matrix).similarities(vectors)

    expected = matrix.products(matrix.rows([item.key]), vectors)
    assert similarities == pytest.approx(expected)
    assert not np.isnan(similarities).any()


def test_a_server_hint_raises_tools_and_excludes_none(encoder):
    tools = [tool(f"{server}__list_items", "List items.") for server in ("calendar", "shop", "zoo")]
    index = Index(tools, DetachedMatrix(encoder, {one.key: one.passage for one in tools}))

    for hint in ("shop", "zoo", "calendar"):
        result = search(index, query="list items", server_hint=hint)
        assert result.hits[0].name == f"{hint}__list_items"
        assert result.total == 3


def test_tools_without_vectors_are_found_by_keyword(encoder):
    vectors = DetachedMatrix(encoder, {one.key: one.passage for one in TOOLS[1:]})
    index = Index(TOOLS, vectors)

    result = search(index, query="forecast")
    assert result.hits[0].name == "weather__get_forecast"
    assert result.note.startswith("1 of 5 tools")
    assert search(index, query="forecast", strategy="embedding").hits[0].name == TOOLS[0].name

    vectors.add({TOOLS[0].key: encoder.encode_documents([TOOLS[0].passage])[0]})
    assert search(index, query="forecast").note == ""
    assert first(index, "will it rain") == "weather__get_forecast"


def test_search_without_any_vectors_falls_back_to_keywords_with_a_note(encoder):
    result = search(Index(TOOLS, DetachedMatrix(encoder, {})), query="forecast")

    assert (result.strategy, result.hits[0].name) == ("bm25", "weather__get_forecast")
    assert "still being computed" in result.note


def test_weights_with_a_wrong_checksum_are_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(sentence_encoder, "WEIGHTS_SHA256", "0" * 64)

    with pytest.raises(ModelUnavailable, match="wrong checksum"):
        sentence_encoder.load(tmp_path)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sentence_encoder, "PACKAGE", "no_such_package")

    with pytest.raises(ModelUnavailable, match="run: toolcrib install-model"):
        sentence_encoder.load(tmp_path)


def test_a_corrupt_graph_makes_the_model_unavailable(tmp_path):
    (tmp_path / sentence_encoder.GRAPH).mkdir()
    (tmp_path / sentence_encoder.GRAPH / "queries.onnx").write_bytes(b"nonsense")

    with pytest.raises(ModelUnavailable, match="does not run"):
        sentence_encoder.load(tmp_path)


def test_batches_contain_every_text_once_with_similar_lengths():
    lengths = [3, 40, 4, 90, 5, 41] + [7] * 40

    result = list(batches(lengths))

    assert sorted(at for batch in result for at in batch) == list(range(len(lengths)))
    assert all(len(batch) <= sentence_encoder.BATCH for batch in result)
    ratio = sentence_encoder.MAX_LENGTH_RATIO
    assert all(lengths[batch[-1]] <= ratio * lengths[batch[0]] for batch in result)


def test_a_passage_has_separate_parts_of_limited_length():
    parts = passage("createIssue", "d" * 9_000, "ownerName\x1f", ("bug",)).split(
        sentence_encoder.PART_SEPARATOR
    )

    assert len(parts) == 4
    assert parts[1:] == ["create Issue", "create Issue: owner Name", "bug"]
    assert len(parts[0]) == sentence_encoder.MAX_PART_LENGTH


def test_adding_rows_does_not_move_existing_ones():
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
