# Each command does its own set-up: from a fresh clone `make paper` and `make test` need only python3 (3.11 or newer), make, and a package index.

PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
RUNS   ?= runs
REPORT ?= report

PY    := $(VENV)/bin/python
READY := $(VENV)/.ready
PAGE  := $(abspath $(REPORT))/index.html
# Open the page where somebody can see it; never fail because nobody can.
OPEN  := if [ -n "$$DISPLAY$$WAYLAND_DISPLAY" ] || [ "$$(uname)" = Darwin ]; then $(PY) -m webbrowser -t "file://$(PAGE)" || true; fi

# Warnings are errors, but for those that torch itself gives at the first use of forward mode (as in pyproject.toml) and of the compiler.
WARNINGS := -W error -W 'ignore:`torch.jit.script:DeprecationWarning'

.DEFAULT_GOAL := help
.PHONY: help setup paper full test quick check lint types format examples docs bench coverage clean

help: ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-10s %s\n", $$1, $$2 }'

setup: $(READY) ## create .venv and install fsmap with everything for development

# The environment is made once, and again only when what it is made of has changed.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "fsmap needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V). Try: make PYTHON=python3.12"; exit 1; }
	@echo "setting up $(VENV) (a minute or two, once)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
	@echo "ready: $(VENV)/bin/fsmap, or activate with: . $(VENV)/bin/activate"

# Most experiments keep one core busy: these run on two, then `all` takes what is left, or failed.
FIRST  := mixture-posterior fourier fourier-points fourier-pX fourier-noise mixture-bma
BESIDE := uci-table reparam image-table logdet-mc moons-eigs moons-pathology transfer label-noise \
          moons-solutions

# results/ holds full-size runs that are kept with the code: of two runs of an experiment the report shows the full-size one.
# An experiment that fails does not keep the others' report from being built; it still fails the command.
paper: $(READY) ## every CPU-scale experiment of the paper at quick size, and the report (with results/)
	@$(VENV)/bin/fsmap run $(BESIDE) --quick --out $(RUNS) --resume --silent > /dev/null 2>&1 & \
	$(VENV)/bin/fsmap run $(FIRST) --quick --out $(RUNS) --resume; wait; \
	$(VENV)/bin/fsmap run all --quick --out $(RUNS) --resume; status=$$?; \
	if [ $$status -eq 130 ]; then exit 130; fi; \
	if ls $(RUNS)/*/summary.json > /dev/null 2>&1; then \
	  $(VENV)/bin/fsmap report $(RUNS) $(wildcard results) --out $(REPORT) || exit 1; \
	  $(OPEN); \
	else \
	  echo "no experiment has results yet, so there is no report"; \
	fi; exit $$status

# Interrupted, it goes on where it was; experiments for a GPU are skipped.
full: $(READY) ## every CPU-scale experiment at the paper's size into results/ (about an hour)
	$(VENV)/bin/fsmap run all --device cpu --out results --resume

test: $(READY) ## all tests and doctests
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS) --dist worksteal

quick: $(READY) ## the tests that are not marked slow
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS) --dist worksteal -m "not slow"

check: lint types test examples docs ## what has to pass before a change goes in

lint: $(READY) ## ruff: rules and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(READY) ## ruff: mend what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: $(READY) ## mypy --strict
	$(PY) -m mypy

examples: $(READY) ## run every script in examples/
	@set -e; for script in $(wildcard examples/*.py); do \
	  echo "$$script"; OMP_NUM_THREADS=1 $(PY) $(WARNINGS) $$script > /dev/null; done

docs: $(READY) ## the documentation site, in build/docs; a warning is an error
	$(PY) -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "built: build/docs/index.html"

bench: $(READY) ## time, memory and error of every estimator, beside what one would write today
	$(PY) -m benchmarks
	$(PY) -m benchmarks.loops
	$(PY) -m benchmarks.hutchpp

coverage: $(READY) ## tests with branch coverage
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS) --dist worksteal --cov --cov-report=term-missing:skip-covered

clean: ## remove caches and build products; keeps .venv, runs and the report
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage src/*.egg-info
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2> /dev/null || true
