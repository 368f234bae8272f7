# Each target sets up what it needs: a virtual environment in .venv with pinned versions.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-colossalai lint bench crash large clean

## demo: train on four ranks, kill the job, resume it on two and on three
demo: .venv/installed
	$(BIN)/python examples/demo.py

## test: lint, types, and all tests with coverage
test: lint
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --fail-under=95

## test-colossalai: against ColossalAI 0.5.0 itself, which is installed into .venv-colossalai (1.2 GB) once
test-colossalai: .venv/installed
	$(BIN)/python -m pytest tests/colossalai -m colossalai

lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

## bench: side by side with PyTorch DCP and with the disk's own speed
bench: .venv/installed
	$(BIN)/python -m benchmarks

## crash: cut saves of every kind at every operation, and look at what a crash may leave
crash: .venv/installed
	$(BIN)/python -m campaigns.crash

## large: a model of 3 GB straight into the shards of four ranks, and a tensor of 3 GB
large: .venv/installed
	$(BIN)/python -m campaigns.large

.venv/installed: requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement requirements-dev.txt --editable .
	touch $@

clean:
	rm -rf .venv .venv-colossalai demo_run crash_violations .coverage* .mypy_cache .pytest_cache .ruff_cache .hypothesis
