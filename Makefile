# Exactly two commands set everything up: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-quick lint types format wheel examples bench clean

help:
	@echo 'make demo   runs the main job: two graphs, twelve ranks, two compiles'
	@echo 'make test   runs all tests          make test-quick  without the slow ones'
	@echo 'make lint types wheel examples bench clean'

# plain pip takes minutes to resolve the clouds' clients; uv takes seconds.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'neuron_store needs Python 3.11 or newer; set PYTHON=...'; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -e '.[dev]'
	@touch $@

install: $(STAMP)

demo: $(STAMP)
	@$(BIN)/neuron-store demo $(ARGS)

export PYTHONDONTWRITEBYTECODE=

# `make wheel` and `make examples` run those two files.
APART := --ignore=tests/test_wheel.py --ignore=tests/test_examples.py

test: $(STAMP)
	@$(BIN)/python -m pytest $(APART) $(ARGS)

test-quick: $(STAMP)
	@$(BIN)/python -m pytest $(APART) -m 'not slow and not nfs and not bench' $(ARGS)

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(STAMP)
	@$(BIN)/mypy

wheel: $(STAMP)
	@$(BIN)/python -m pytest -q tests/test_wheel.py

examples: $(STAMP)
	@$(BIN)/python -m pytest -q tests/test_examples.py $(ARGS)

bench: $(STAMP)
	@$(BIN)/python -m pytest benchmarks -q $(ARGS)

clean:
	@rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
