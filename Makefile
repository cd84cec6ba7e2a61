# The commands a newcomer needs: `make test` and `make demo`. Each prepares .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH := .venv-bench

.PHONY: test test-slow check demo bench figures clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

test: $(STAMP)  ## the whole suite but the slow tests, about half an hour on two cores
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(STAMP)  ## the tests that take minutes
	$(BIN)/python -m pytest -m slow --timeout=3600

check: $(STAMP)  ## linter, formatter, type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

demo: $(STAMP)  ## train, kill -9, resume, and the proof that nothing was lost or repeated
	$(BIN)/python examples/demo.py

bench: $(BENCH)/.installed  ## beside other libraries, for hours; PEERS="--scale 0.02 --rounds 1" tries it out
	$(BENCH)/bin/python -m benchmarks.peers $(PEERS)

$(BENCH)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@

figures: $(STAMP)  ## every other figure that the documentation quotes
	$(BIN)/python -m benchmarks.all

clean:
	rm -rf $(VENV) $(BENCH) demo-output build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
