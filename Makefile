# Toolcrib: `make run` starts it, `make test` checks it. Needs Python 3.11 to 3.13 and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --require-hashes
PORT ?= 8000
DEMO ?= var-demo
export PORT

.PHONY: run demo test lint types fast screenshots bench soak lock clean

run: $(VENV)/run.stamp
	@exec $(BIN)/python manage.py serve

# A filled installation to look at, in a folder of its own.
demo: $(VENV)/run.stamp
	@exec env -u DATABASE_URL -u REDIS_URL TOOLCRIB_DATA="$(DEMO)" $(BIN)/python manage.py demo

test: $(VENV)/test.stamp
	@$(BIN)/python -m tests.support.parts
	@$(MAKE) --no-print-directory lint types
	@$(BIN)/python manage.py makemigrations --check --dry-run
	@$(BIN)/python -m pytest -q -n 2 --dist loadgroup --durations=10

lint: $(VENV)/test.stamp
	@$(BIN)/ruff format --check --quiet . && $(BIN)/ruff check --quiet .

types: $(VENV)/test.stamp
	@$(BIN)/mypy .

fast: $(VENV)/test.stamp
	@$(BIN)/python -m pytest -q -n 2 --dist loadgroup -m "not needs_chromium"

screenshots: $(VENV)/test.stamp
	@$(BIN)/python -m tests.support.screenshots

bench: $(VENV)/test.stamp
	@$(BIN)/python bench/sync.py
	@$(BIN)/python bench/changes.py
	@$(BIN)/python bench/tokens.py
	@$(BIN)/python bench/session.py
	@$(BIN)/python bench/pages.py
	@$(BIN)/python bench/dispatch.py --over http --sizes 100 10000
	@$(BIN)/python bench/faults.py --short

# Every fault at full length: an hour and a half or more, on a machine that does nothing else.
soak: $(VENV)/test.stamp
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
	uv pip compile pyproject.toml --override .ci/overrides.in --universal --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-header --no-annotate -o requirements.lock
	uv pip compile --group test -c requirements.lock --universal --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-header --no-annotate -o tests/requirements.lock
	uv pip compile tests/servers.in --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header --no-annotate -o tests/servers.lock
	for name in mcp1 fastmcp; do uv pip compile tests/clients-$$name.in --universal \
	  --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate \
	  -o tests/clients-$$name.lock; done
	uv pip compile tests/peers-mcp-proxy.in --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header --no-annotate -o tests/peers-mcp-proxy.lock

clean:
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache
