# The commands people use daily. `make` alone lists them.
PYTHON ?= python3
BIN := .venv/bin
# Processes that run the tests side by side; 0 runs them one after another. Much of their time they wait, but each imports
# and collects all tests.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder
# Set for an install that is what was asked for, and not what comes before another goal.
IS_GOAL = IS_GOAL=$(filter $@,$(MAKECMDGOALS))
# Checked here, in words that every Python understands: an old one could not even read the install script.
define CHECK_PYTHON
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	echo "install: Python 3.11 or newer is needed, found: $$($(PYTHON) --version 2>&1 | tail -n 1);" \
	"name one with make PYTHON=/path/to/python3.11" >&2; exit 1; }
endef

.DEFAULT_GOAL := help
.PHONY: help install install-test install-gpu lock demo test test-slow test-release test-all coverage test-cpus check format bench bench-trainer bench-loop bench-discovery bench-tui bench-multinode gpu-check screenshots docs docs-check wheel clean

help: ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

install: ## .venv with what a run on this machine's CPU needs; more with EXTRAS=recipes,monitors
	$(CHECK_PYTHON)
	@$(IS_GOAL) EXTRAS="$(EXTRAS)" $(PYTHON) scripts/install.py core

install-test: ## the same, and vLLM for the CPU and the test tools
	$(CHECK_PYTHON)
	@$(IS_GOAL) $(PYTHON) scripts/install.py test

install-gpu: ## .venv for a machine with NVIDIA GPUs: PyPI's vLLM and its torch
	$(CHECK_PYTHON)
	@$(IS_GOAL) EXTRAS="$(EXTRAS)" $(PYTHON) scripts/install.py gpu

lock: | $(BIN)/uv ## after a change of constraints.txt: the versions for GPUs, and the hashes of both
	@$(BIN)/python scripts/lock_gpu.py
	@$(BIN)/python -m scripts.lock_hashes

$(BIN)/uv:
	@$(MAKE) install

demo: install ## three runs on two slots, on this machine, from nothing to a report
	@$(BIN)/prl demo

test: install-test ## what to run before every commit: a guard of every promise, in some minutes
	@$(PYTEST) -m "not slow and not release"

test-slow: install-test ## real engines, kills, learning, and what `make test` tries once of each kind, with the full budgets
	@PRL_TEST_BUDGET=full $(PYTEST) -m "(slow or budget) and not release"

test-release: install-test ## before a release: what needs a package index, other Pythons, a container, or long learning
	@PRL_TEST_BUDGET=full $(PYTEST) -m release

test-all: install-test ## every test (real processes, real vLLM on the CPU), with the full budgets
	@PRL_TEST_BUDGET=full $(PYTEST)

coverage: install-test ## the same, and which lines and branches they reach, in all processes: build/coverage
	@rm -rf build/coverage
	@PRL_TEST_BUDGET=full COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml \
		COVERAGE_FILE=$(CURDIR)/build/coverage/data $(PYTEST); result=$$?; \
	export COVERAGE_FILE=$(CURDIR)/build/coverage/data; \
	$(BIN)/coverage combine -q && $(BIN)/coverage report; exit $$result

test-cpus: install-test ## numeric and learning tests on every instruction set of this CPU, each twice
	@HF_HUB_OFFLINE=1 $(BIN)/python scripts/test_cpus.py

check: install-test ## lint, format, types, import layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/test_imports.py

format: install-test ## format and sort imports
	@$(BIN)/ruff check --fix -q .
	@$(BIN)/ruff format .

bench: install-test ## every benchmark in benchmarks/; results in benchmarks/results/
	@$(BIN)/python -m benchmarks.run

bench-trainer: install-test ## the trainer's step, memory and publishing against the peft library
	@$(BIN)/python -m benchmarks.run trainer

bench-loop: install-test ## the asynchronous loop: what the orchestrator costs
	@$(BIN)/python -m benchmarks.run loop

bench-discovery: install-test ## how soon the trainer sees a new run; the idle supervisor
	@$(BIN)/python -m benchmarks.run discovery

bench-tui: install-test ## prl-tui beside wandb leet on the same numbers; our widgets beside others
	@$(BIN)/python -m benchmarks.run tui tui_widgets

screenshots: install-test ## pictures of prl-tui for the documents, from a demo that is run for them
	@$(BIN)/python scripts/screenshots.py

bench-multinode: install-test ## what the barriers of a group cost; the supervisor of 1,000 nodes with 5,000 runs
	@$(BIN)/python -m benchmarks.run multinode
	@$(BIN)/python -m benchmarks.supervisor_scale

gpu-check: ## what this machine's GPU does, beside what is asked of one, in eight minutes; on a CPU, to try it, with TINY=1
	@$(BIN)/python -m benchmarks.gpu $(if $(TINY),--tiny) $(ARGS)

docs: install-test ## the site of the documents, into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-check: install-test ## the documents: names are real, generated pages are new, the site builds, the tutorial and the how-to pages run
	@$(BIN)/python -m pytest -q tests/test_docs.py tests/test_reference.py tests/test_site.py tests/integration/test_docs_commands.py tests/integration/test_docs_how_to.py

wheel: install ## the package to install elsewhere: dist/prl_multirun-*.whl
	@rm -rf build/lib build/bdist.*
	@$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean: ## remove what was built (not the runs in outputs/)
	rm -rf .venv build dist site *.egg-info models .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
