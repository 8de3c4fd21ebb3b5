# `make test` and `make demo` need python3 (3.11 or newer) and a network; all that they install goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: help test lint types demo bench clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/'

test: lint types ## ruff, mypy, then pytest (ARGS="-k name" for some tests)
	$(BIN)/python -m pytest -n auto --dist loadscope --no-loadscope-reorder $(ARGS)

lint: $(VENV)/.dev ## ruff
	$(BIN)/ruff check

types: $(VENV)/.dev ## mypy, strict
	$(BIN)/mypy -n auto

demo: $(VENV)/.demo ## quantize a real model and compare it with the float one
	$(BIN)/python examples/minilm/demo.py $(ARGS)

bench: $(VENV)/.bench ## measure the CPU kernels against their peers
	$(BIN)/python benchmarks/cpu.py $(ARGS)

clean: ## remove the environment, caches and builds
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# One environment; each stamp says that one extra is in it, as pyproject.toml and constraints.txt have it now.
$(VENV)/.%: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	touch $@
