# `make run`: the quickstart study.  `make test`: everything that is checked.
# Both make their own environment in .venv; PYTHON names the interpreter for it (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: run test lint engines rings clean

run: $(VENV)/installed-run
	$(BIN)/python -m sweeper +study=quickstart

test: $(VENV)/installed-test lint
	$(BIN)/python -m pytest

lint: $(VENV)/installed-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

$(VENV)/installed-run: $(VENV)/made pyproject.toml
	$(PIP) --editable '.[quickstart]'
	touch $@

$(VENV)/installed-test: $(VENV)/made pyproject.toml
	$(PIP) --editable '.[test]'
	touch $@

$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "sweeper needs Python 3.11 or newer, and $(PYTHON) is older: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	touch $@

# Real engines for the tests that need one of their own: vLLM for CPU, in .engines/vllm.
engines:
	scripts/make_engines.sh

# The tests that boot real engines; those of vLLM only after `make engines`.
rings: $(VENV)/installed-test
	$(BIN)/python -m pytest -m "llamacpp or vllm" tests/real

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
