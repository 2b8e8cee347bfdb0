# `make run`: the quickstart study.  `make test`: everything that is checked.
# Both make their own environment in .venv; PYTHON names the interpreter for it (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: run test lint clean

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

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
