# Toolcrib: `make run` starts it, `make test` tests it. Needs Python 3.11 to 3.13 and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST = $(BIN)/python -m pytest -q -n 2 --durations=10
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --require-hashes
PORT ?= 8000
DEMO ?= var-demo
export PORT
# glibc: memory freed by one thread is reused by the others.
export MALLOC_ARENA_MAX = 2

.PHONY: run demo test test-all test-clients lint types screenshots bench soak lock clean

run: $(VENV)/run.stamp
	@exec $(BIN)/python manage.py serve

# A filled installation to look at, in a folder of its own.
demo: $(VENV)/run.stamp
	@exec env -u DATABASE_URL -u REDIS_URL TOOLCRIB_DATA="$(DEMO)" $(BIN)/python manage.py demo

# Lint, types, unit and component tests on SQLite, and one end-to-end test of each kind.
test: $(VENV)/test.stamp
	@$(BIN)/python -m tests.support.parts needs_chromium
	@$(MAKE) --no-print-directory lint types
	@$(BIN)/python manage.py makemigrations --check --dry-run
	@$(PYTEST) -m "not e2e or smoke"

# And PostgreSQL, Redis, every page in both themes, hostile inputs, crashes, clients.
test-all: test
	@$(BIN)/python -m tests.support.parts
	@$(PYTEST) -m "e2e and not smoke and not on_demand and not bench"

# Every MCP client that is not ours, in its newest version, installed on demand; writes the table of
# docs/clients.md.
test-clients: export CLIENT_VERSIONS = newest
test-clients: $(VENV)/test.stamp
	@$(BIN)/python -m tests.support.parts needs_client
	@$(PYTEST) -m needs_client
	@$(BIN)/python -m tests.support.client_table

lint: $(VENV)/test.stamp
	@$(BIN)/ruff format --check --quiet . && $(BIN)/ruff check --quiet .

types: $(VENV)/test.stamp
	@$(BIN)/mypy .

screenshots: $(VENV)/test.stamp
	@$(BIN)/python -m tests.support.screenshots

bench: $(VENV)/test.stamp
	@$(BIN)/python bench/sync.py
	@$(BIN)/python bench/changes.py
	@$(BIN)/python bench/tokens.py
	@$(BIN)/python bench/session.py
	@$(BIN)/python bench/search.py --sizes 500 10000
	@$(BIN)/python bench/pages.py
	@$(BIN)/python bench/dispatch.py
	@$(BIN)/python bench/rules.py
	@$(BIN)/python bench/scripts.py
	@$(BIN)/python bench/script_lag.py
	@$(BIN)/python bench/stubs.py
	@$(BIN)/python bench/scale.py
	@$(BIN)/python bench/rest.py
	@$(BIN)/python bench/workers.py
	@$(BIN)/python bench/faults.py --short

# Small runs of all benches, kill rounds and the fault table at full length, and long property runs:
# two hours or more on a machine that does nothing else.
soak: $(VENV)/test.stamp
	@$(BIN)/python -m tests.support.parts
	@MODEL_STEPS=20000 $(BIN)/python -m pytest -q -o timeout=0 tests/sessions_app/sessions/test_session_model.py
	@$(BIN)/python -m pytest -q -m bench
	@KILL_ROUNDS=200 $(BIN)/python -m pytest -q -o timeout=0 tests/e2e/live/test_script_kills.py
	@$(BIN)/python bench/faults.py

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else "Toolcrib needs Python 3.11 to 3.13; this is %d.%d. Try: make run PYTHON=python3.12" % v)'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/run.stamp: requirements.lock | $(VENV)/bin/pip
	@echo "Installing Toolcrib into $(VENV) (once) ..."
	@$(PIP) -r requirements.lock
	@touch $@

$(VENV)/test.stamp: tests/requirements.lock $(VENV)/run.stamp
	@echo "Installing what the tests need into $(VENV) (once) ..."
	@$(PIP) -r tests/requirements.lock
	@touch $@

# For maintainers, with uv installed: the locks hold hashes and no index address.
lock:
	uv pip compile pyproject.toml --group model --extra scripts --extra typescript --override .ci/overrides.in --universal --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-header --no-annotate -o requirements.lock
	uv pip compile --group test -c requirements.lock --universal --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-header --no-annotate -o tests/requirements.lock
	uv pip compile tests/servers.in --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header --no-annotate -o tests/servers.lock
	for name in mcp1 fastmcp openapi openai_agents crewai; do uv pip compile tests/clients-$$name.in --universal \
	  --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate \
	  -o tests/clients-$$name.lock; done
	uv pip compile tests/peers-mcp-proxy.in --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header --no-annotate -o tests/peers-mcp-proxy.lock

clean:
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache
