"""Posting lists score as rank-bm25 does, to the last bit, and define what it leaves open."""

from collections import Counter
from math import log

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rank_bm25 import BM25Okapi

from catalog.search.bm25 import Postings, document
from catalog.search.query import ParsedQuery
from catalog.search.ranking import keyword_scores
from catalog.search.weights import BM25_B, BM25_K1

# Few different words, so that documents share them; then many, as in a catalog.
few = st.lists(st.sampled_from(["get", "list", "issue", "file", "the"]), max_size=6)
many = st.lists(st.integers(0, 40).map(lambda n: f"w{n}"), max_size=30)
corpora = st.lists(few, max_size=12) | st.lists(many, max_size=30)
queries = few | many


def made(documents):
    return Postings([document([(words, 1)]) for words in documents])


def matching(postings, query):
    asked = ParsedQuery("", dict.fromkeys(query, ""), {}, ())
    return np.flatnonzero(keyword_scores(postings, asked).fit).tolist()


@given(corpora.filter(any), queries)
def test_scores_are_those_of_rank_bm25_to_the_last_bit(documents, query):
    library = BM25Okapi(documents, k1=BM25_K1, b=BM25_B)
    assume(library.average_idf > 0)

    assert made(documents).scores(query).tolist() == library.get_scores(query).tolist()


@given(corpora.filter(any), queries)
def test_where_the_library_gives_nothing_its_own_formula_runs_on_an_idf_above_zero(
    documents, query
):
    library = BM25Okapi(documents, k1=BM25_K1, b=BM25_B)
    assume(library.average_idf <= 0)
    holding = Counter(word for words in documents for word in set(words))
    total = len(documents)
    library.idf = {
        word: np.log1p((total - n + 0.5) / (n + 0.5)).item() for word, n in holding.items()
    }

    scores = made(documents).scores(query)

    assert np.allclose(scores, library.get_scores(query), rtol=1e-12, atol=0)
    assert all(scores[at] > 0 for at, held in enumerate(documents) if set(held) & set(query))


def test_a_large_corpus_of_weighted_fields_scores_as_the_library_does():
    random = np.random.default_rng(6)
    texts = [[f"w{n}" for n in random.zipf(1.3, 40) if n < 5_000] for _ in range(800)]
    names = [[f"w{n}" for n in random.integers(0, 900, 3)] for _ in texts]
    library = BM25Okapi(
        [name * 6 + text * 2 for name, text in zip(names, texts, strict=True)], k1=BM25_K1, b=BM25_B
    )
    postings = Postings(
        [document([(name, 6), (text, 2)]) for name, text in zip(names, texts, strict=True)]
    )

    for query in (["w1", "w2", "w700"], ["w5", "w5", "nowhere"], names[3], texts[9]):
        assert postings.scores(query).tolist() == library.get_scores(query).tolist()


@given(corpora, queries)
def test_a_document_matches_if_and_only_if_it_shares_a_word(documents, query):
    expected = [at for at, held in enumerate(documents) if set(held) & set(query)]

    assert matching(made(documents), query) == expected


@pytest.mark.parametrize(
    "documents",
    [
        [["get"]],
        [["get"], ["list"]],
        [["get"], ["get"]],
        [["get"]] * 20,
        [["get"], ["get"], ["list"], ["list"]],
        [[], ["get"]],
    ],
)
def test_a_match_scores_above_zero_where_rank_bm25_alone_gives_nothing(documents):
    postings = made(documents)
    found = matching(postings, ["get"])

    assert len(found) == documents.count(["get"])
    assert (postings.scores(["get"])[found] > 0).all()


def test_a_word_in_just_half_of_the_documents_matches_although_it_scores_nothing():
    documents = [["get", "one"], ["get", "two"], ["three"], ["four"]]

    assert made(documents).scores(["get"]).tolist() == [0, 0, 0, 0]
    assert matching(made(documents), ["get"]) == [0, 1]


@pytest.mark.parametrize("documents", [[], [[]], [[], []]])
def test_a_corpus_without_words_has_no_matches(documents):
    postings = made(documents)

    assert postings.scores(["get"]).tolist() == [0] * len(documents)
    assert matching(postings, ["get"]) == []
    assert postings.holding("get", np.array([0])) == [False]


def test_it_is_known_which_document_holds_a_word():
    postings = made([["get"], ["list"], ["get", "list"]])
    everyone = np.arange(3)

    assert postings.holding("get", everyone) == [True, False, True]
    assert postings.holding("list", everyone) == [False, True, True]
    assert postings.holding("delete", everyone) == [False] * 3


def test_the_most_a_document_can_score_counts_unknown_words_as_the_rarest():
    postings = made([["get"], ["list"], ["one"], ["two"], ["three"]])

    assert postings.most(["nowhere"]) == pytest.approx((BM25_K1 + 1) * (log(5.5) - log(0.5)))
    assert postings.most(["get", "nowhere"]) > postings.most(["nowhere"])
