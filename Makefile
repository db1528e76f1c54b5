# Exactly two commands set everything up: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install torch demo servers test test-quick lint types format wheel examples bench clean

help:
	@echo 'make demo   runs the main job: two graphs, twelve ranks, two compiles'
	@echo 'make test   runs all tests          make test-quick  without the slow ones'
	@echo 'make servers  runs S3, Azure and GCS servers to try by hand, and prints how to use them'
	@echo 'make torch  adds PyTorch and JAX (CPU), for the backend and its tests'
	@echo 'make lint types wheel examples bench clean'

# plain pip takes minutes to resolve the clouds' clients; uv takes seconds.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'neuron_store needs Python 3.11 or newer; set PYTHON=...'; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -e '.[dev]'
	@touch $@

install: $(STAMP)

# By pip and by itself: uv would bring CUDA's builds of torch along. TORCH_PIP takes arguments for
# pip, such as the index of CPU wheels where the default one has them not.
TORCH_PIP ?=

torch: $(STAMP)
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH_PIP) 'torch==2.13.*'
	@VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --python $(BIN)/python 'jax>=0.8,<0.11' 'jaxlib>=0.8,<0.11'

demo: $(STAMP)
	@$(BIN)/neuron-store demo $(ARGS)

servers: $(STAMP)
	@$(BIN)/python -m tests.servers $(ARGS)

export PYTHONDONTWRITEBYTECODE=

# `make wheel` and `make examples` run those two files.
APART := --ignore=tests/test_wheel.py --ignore=tests/test_examples.py

# Tests of deadlines, races and servers wait more than they work, so several files run at once.
WORKERS ?= 3
SIDE_BY_SIDE := -q -n $(WORKERS) --dist loadscope --no-loadscope-reorder

# torch and JAX start threads, which a forked rank of other tests must not inherit: two runs.
test: $(STAMP)
	@$(BIN)/python -m pytest $(APART) $(SIDE_BY_SIDE) -m 'not torch' $(ARGS)
	@$(BIN)/python -m pytest $(APART) $(SIDE_BY_SIDE) -m torch $(ARGS)

test-quick: $(STAMP)
	@$(BIN)/python -m pytest $(APART) $(SIDE_BY_SIDE) -m 'not slow and not nfs and not bench and not torch' $(ARGS)

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
	@$(BIN)/python -m pytest benchmarks/bench_*.py -q -s --timeout 900 $(ARGS)

clean:
	@rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
