"""Tunable weights and thresholds of search ranking.

The decisions in docs/ describe how they were chosen; `manage.py evaluate_search` measures a change.
"""

# How often the terms of each field count: a term in a name outweighs one in a parameter.
NAME = 6
SERVER = 2
TITLE = 2
DESCRIPTION = 2
PARAMETERS = 1
GROUPS = 1
HINTS = 4  # by people
PHRASES = 1  # hints of other sources

# BM25: how fast repeated words saturate, and how much long documents are penalized.
BM25_K1 = 2.4
BM25_B = 0.75

# The share of the clauses relative to the whole query, in keyword and in semantic scores.
CLAUSE_KEYWORD = 0.4
CLAUSE_SEMANTIC = 0.5

# The share of the semantic score if no term matches, and how much full coverage reduces it.
SEMANTIC = 0.8
SEMANTIC_LESS_BY_COVERAGE = 0.5

# The average cosine is subtracted as background, damped in catalogs of about this many tools.
BACKGROUND_DAMPING = 20

# The minimum cosine of a match without a common term.
SEMANTIC_MATCH = 0.2

# Below this coverage by the best tool, a query is likely a person's sentence, and the response to
# an agent says how to ask.
LOW_COVERAGE = 0.2

# The share of `server_hint` in the score.
SERVER_HINT = 0.25

# The minimum score of a match.
LEAST_SCORE = 0.001

# Added to the score (at most 1) of a tool whose name is the query: exactly, after normalization,
# or as a prefix.
EXACT_NAME = 6
SAME_NAME = 4
NAME_PREFIX = 2

# The weights of a tool's vectors: description, name, parameters, hints by people.
VECTOR_SHARES = (0.5, 0.25, 0.25, 0.25)

# The share of the vector of other hints, where it raises the similarity of a tool.
PHRASE_VECTOR = 0.8

# The minimum similarity of a suggested name (difflib's ratio).
SIMILAR_NAME = 0.6
