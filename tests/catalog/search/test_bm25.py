"""Posting lists: the same scores as rank-bm25 to the last bit, and the cases it leaves open."""

from collections import Counter
from math import log

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rank_bm25 import BM25Okapi

from catalog.search.bm25 import Postings, make_document
from catalog.search.query import ParsedQuery
from catalog.search.ranking import keyword_scores
from catalog.search.weights import BM25_B, BM25_K1

# Few distinct terms, which documents share; then many, as in a catalog.
few = st.lists(st.sampled_from(["get", "list", "issue", "file", "the"]), max_size=6)
many = st.lists(st.integers(0, 40).map(lambda n: f"w{n}"), max_size=30)
corpora = st.lists(few, max_size=12) | st.lists(many, max_size=30)
queries = few | many


def make_postings(documents):
    return Postings([make_document([(words, 1)]) for words in documents])


def matching_documents(postings, query):
    parsed = ParsedQuery("", dict.fromkeys(query, ""), {}, ())
    return np.flatnonzero(keyword_scores(postings, parsed).normalized).tolist()


@given(corpora.filter(any), queries)
def test_scores_are_those_of_rank_bm25_to_the_last_bit(documents, query):
    library = BM25Okapi(documents, k1=BM25_K1, b=BM25_B)
    assume(library.average_idf > 0)

    assert make_postings(documents).scores(query).tolist() == library.get_scores(query).tolist()


@given(corpora.filter(any), queries)
def test_where_the_average_idf_is_not_positive_scores_use_a_positive_idf(documents, query):
    library = BM25Okapi(documents, k1=BM25_K1, b=BM25_B)
    assume(library.average_idf <= 0)
    holding = Counter(word for words in documents for word in set(words))
    total = len(documents)
    library.idf = {
        word: np.log1p((total - n + 0.5) / (n + 0.5)).item() for word, n in holding.items()
    }

    scores = make_postings(documents).scores(query)

    assert np.allclose(scores, library.get_scores(query), rtol=1e-12, atol=0)
    assert all(scores[at] > 0 for at, terms in enumerate(documents) if set(terms) & set(query))


def test_a_large_corpus_of_weighted_fields_scores_as_in_the_library():
    random = np.random.default_rng(6)
    texts = [[f"w{n}" for n in random.zipf(1.3, 40) if n < 5_000] for _ in range(800)]
    names = [[f"w{n}" for n in random.integers(0, 900, 3)] for _ in texts]
    library = BM25Okapi(
        [name * 6 + text * 2 for name, text in zip(names, texts, strict=True)], k1=BM25_K1, b=BM25_B
    )
    postings = Postings(
        [make_document([(name, 6), (text, 2)]) for name, text in zip(names, texts, strict=True)]
    )

    for query in (["w1", "w2", "w700"], ["w5", "w5", "nowhere"], names[3], texts[9]):
        assert postings.scores(query).tolist() == library.get_scores(query).tolist()


@given(corpora, queries)
def test_a_document_matches_if_and_only_if_it_shares_a_term(documents, query):
    expected = [at for at, terms in enumerate(documents) if set(terms) & set(query)]

    assert matching_documents(make_postings(documents), query) == expected


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
def test_a_match_scores_above_zero_where_rank_bm25_gives_zero(documents):
    postings = make_postings(documents)
    matches = matching_documents(postings, ["get"])

    assert len(matches) == documents.count(["get"])
    assert (postings.scores(["get"])[matches] > 0).all()


def test_a_term_in_exactly_half_of_the_documents_matches_although_it_scores_zero():
    documents = [["get", "one"], ["get", "two"], ["three"], ["four"]]

    assert make_postings(documents).scores(["get"]).tolist() == [0, 0, 0, 0]
    assert matching_documents(make_postings(documents), ["get"]) == [0, 1]


@pytest.mark.parametrize("documents", [[], [[]], [[], []]])
def test_a_corpus_without_terms_has_no_matches(documents):
    postings = make_postings(documents)

    assert postings.scores(["get"]).tolist() == [0] * len(documents)
    assert matching_documents(postings, ["get"]) == []
    assert postings.contain("get", np.array([0])) == [False]


def test_contain_returns_the_documents_with_a_term():
    postings = make_postings([["get"], ["list"], ["get", "list"]])
    documents = np.arange(3)

    assert postings.contain("get", documents) == [True, False, True]
    assert postings.contain("list", documents) == [False, True, True]
    assert postings.contain("delete", documents) == [False] * 3


def test_the_maximum_score_counts_unknown_terms_as_the_rarest():
    postings = make_postings([["get"], ["list"], ["one"], ["two"], ["three"]])

    assert postings.max_score(["nowhere"]) == pytest.approx((BM25_K1 + 1) * (log(5.5) - log(0.5)))
    assert postings.max_score(["get", "nowhere"]) > postings.max_score(["nowhere"])
