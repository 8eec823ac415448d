# `make test` on a fresh clone makes .venv, installs BeaconScope into it and runs the tests.

PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
PEERS := .venv-peers
BIN := $(VENV)/bin
# Two processes with one thread each beat one process with two on small models.
WORKERS ?= 2
PYTEST_ARGS ?=
BENCH_ARGS ?=
BENCHMARKS := recording attentions decoding gpu analyze detection replay report accuracy architectures
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: test test-js test-browser demo docs reference models lint types format test-oldest test-peers bench bench-quick bench-peers install clean

# The browser has a target of its own.
test: install
	$(BIN)/python -m pytest -n $(WORKERS) --ignore tests/browser $(PYTEST_ARGS)

# The report's front end: ESLint, and its modules under node's test runner.
test-js: node_modules/installed
	npm run --silent lint
	npm run --silent test

# The report in Debian's Chromium.
test-browser: install
	command -v chromium > /dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; }
	$(BIN)/python -m pytest tests/browser $(PYTEST_ARGS)

# Records, and shows, a first trace; installs what running needs and nothing of the development tools.
demo: $(VENV)/running
	$(BIN)/beaconscope demo

# The documentation as a site in site/.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The pages of the reference that are written from the code.
reference: install
	$(BIN)/python -m docs._reference

# Every causal architecture of transformers, recorded and compared with it: writes docs/models.md.
models: install
	$(BIN)/python benchmarks/architectures.py --workers $(WORKERS) --docs

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python benchmarks/$$name.py || exit 1; done

# Each benchmark for less than a minute: shows that it runs, not what it measures.
bench-quick: install
	printf '%s\n' $(BENCHMARKS) | xargs -P $(WORKERS) -I NAME $(BIN)/python benchmarks/NAME.py --quick

bench-peers: $(PEERS)/installed
	$(PEERS)/bin/python benchmarks/decoding.py $(BENCH_ARGS)

# The old end of the supported range of transformers.
test-oldest: $(OLDEST)/installed
	$(OLDEST)/bin/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

# Our policies against those of kvpress, which needs an older transformers and pandas.
test-peers: $(PEERS)/installed
	$(PEERS)/bin/python -m pytest tests/peers $(PYTEST_ARGS)

install: $(VENV)/installed

$(VENV)/running: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/installed: $(VENV)/running
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,docs,browser,gguf,dask,ray]'
	# Once here, rather than in the first report of each process of the tests.
	$(BIN)/python -c 'from beaconscope.report.space import compile_umap; compile_umap()'
	touch $@

$(OLDEST)/installed: pyproject.toml constraints.txt constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	# A pin of constraints-oldest.txt takes the place of the same package's pin in constraints.txt.
	awk -F== '!/^#/ && !($$1 in seen) { seen[$$1]; print }' constraints-oldest.txt constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/pip install --quiet -c $(OLDEST)/constraints.txt -e '.[test,gguf]'
	touch $@

$(PEERS)/installed: pyproject.toml constraints.txt constraints-oldest.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet kvpress==0.5.5 $$(grep '^torch==' constraints.txt) \
	    $$(grep '^transformers==' constraints-oldest.txt) -e '.[test]'
	touch $@

node_modules/installed: package.json
	npm install --no-package-lock --no-audit --no-fund --silent
	touch $@

clean:
	rm -rf node_modules $(VENV) $(OLDEST) $(PEERS) build dist site .mypy_cache .ruff_cache .pytest_cache
