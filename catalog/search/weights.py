"""Every tunable number of ranking, in one place.

How they were chosen is in docs/decisions/. `manage.py evaluate_search` measures a change.
"""

# How often the words of a field count, so that a word in a name says more than one in a parameter.
NAME = 6
SERVER = 2
TITLE = 2
DESCRIPTION = 2
PARAMETERS = 1
GROUPS = 1
HINTS = 4

# BM25: how fast repeated words saturate, and how much long documents are penalized.
BM25_K1 = 2.4
BM25_B = 0.75

# The share of the clauses beside the whole query, in keyword and in semantic scores.
CLAUSE_KEYWORD = 0.4
CLAUSE_SEMANTIC = 0.5

# The share of the semantic score: this much where no word matches, less the better they do.
SEMANTIC = 0.8
SEMANTIC_LESS_BY_COVERAGE = 0.5

# The average cosine is subtracted as background, damped in catalogs of about this many tools.
BACKGROUND_DAMPING = 20

# A tool without any word of the query matches from this cosine on.
SEMANTIC_MATCH = 0.25

# The share of `server_hint` in the score.
SERVER_HINT = 0.25

# The score of a match that would otherwise score nothing.
LEAST_SCORE = 0.001

# Added to the score (at most 1) of tools that the query names: exactly, in another spelling or
# case, or by how the name starts.
EXACT_NAME = 6
SAME_NAME = 4
NAME_PREFIX = 2

# The shares of a tool's vector: description, name, parameters, hints.
VECTOR_SHARES = (0.5, 0.25, 0.25, 0.25)

# A name is suggested for an unknown one from this similarity on (difflib's ratio).
SIMILAR_NAME = 0.6
