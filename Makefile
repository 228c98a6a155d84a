# Every target makes its own environment first: `make demo` works in a fresh clone.
PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed
BIN := $(VENV)/bin
RECIPE ?= recipes/tiny.yaml
PEERS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z.-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.venv: $(INSTALLED) ## make the environment of constraints.txt (PYTHON=python3.12 picks the interpreter)

# torch comes first and alone, so that it is the build that this machine's registry gives for the pinned version.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@

demo: $(INSTALLED) ## train a head for the bundled target and report what it is worth (RECIPE=recipes/tiny.yaml)
	$(BIN)/accelerate launch --quiet --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
		trainers/eagle.py $(RECIPE)
	$(BIN)/python -m inference.report $(RECIPE)

test: $(INSTALLED) ## run the fast tests
	$(BIN)/python -m pytest

test-all: $(INSTALLED) ## run the slow tests too
	$(BIN)/python -m pytest -m "slow or not slow"

lint: $(INSTALLED) ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED) ## run every benchmark (PEERS="--peer specforge=VENV --peer speculators=VENV" measures beside them)
	$(BIN)/python -m data_pipelines.prompts recipes/tiny_full.yaml
	@set -e; for script in decode gpu lossless; do echo "== benchmarks/$$script.py"; \
		$(BIN)/python benchmarks/$$script.py recipes/tiny_full.yaml report.head=assets/demo_head; done
	$(BIN)/python benchmarks/train_step.py $(PEERS)
	$(BIN)/python benchmarks/train_quality.py recipes/tiny.yaml report.threads=1 $(PEERS)

clean: ## remove the environment and caches, never runs/
	rm -rf $(VENV) *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
