# PYTHON: an interpreter, 3.11 or newer, to make the environment with. VENV: where the environment is.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# TORCH: the version of torch. Each has an environment of its own.
TORCH ?= 2.13.0
VENV ?= $(if $(filter 2.13.0,$(TORCH)),.venv,.venv-$(TORCH))
ARGS ?=
# Processes that run tests; 0 runs them in this one, for a debugger.
JOBS ?= 2

BIN := $(VENV)/bin
# Always with the constraints: a looser torch can bring gigabytes of GPU libraries with it.
PINS := constraints/torch-$(TORCH).txt constraints/packages.txt
PIP_INSTALL := $(BIN)/python -m pip install --quiet $(PINS:%=-c %)
# timm needs torchvision, which not every version of torch has.
COMMA := ,
ZOO := $(if $(shell grep ^torchvision== $(PINS) 2>/dev/null),$(COMMA)zoo)
STAMP := $(VENV)/.scopetrace-env

.DEFAULT_GOAL := help
.PHONY: help env demo test test-slow test-all test-exhaustive lint budgets format zoo dynamic steps orders zoo-onnx exported bench bench-view clients integrations docs pictures release-check ci clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

env: $(STAMP) ## Make the environment (.venv) and install scopetrace into it

$(STAMP): pyproject.toml $(PINS)
	@test -x $(BIN)/python || test -n "$(PYTHON)" || { echo "No Python 3.11 or newer found: make $(MAKECMDGOALS) PYTHON=/path/to/python" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --upgrade pip
	$(PIP_INSTALL) torch==$(TORCH)
	$(PIP_INSTALL) --editable '.[onnx$(ZOO)]' --group dev
	@touch $@

demo: $(STAMP) ## Trace a vision transformer and show its modules
	$(BIN)/scopetrace show timm:vit_tiny_patch16_224 --input x=1x3x224x224 --depth 2

# A file stays in one process, since its tests may share what is slow to make.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

test: $(STAMP) ## Run the tests in a few minutes (ARGS="-k name" for some, TORCH=2.15.0 for another torch)
	$(PYTEST) -m "not slow and not exhaustive" $(ARGS)

test-slow: $(STAMP) ## Run the slow tests alone
	$(PYTEST) -m "slow and not exhaustive" $(ARGS)

test-all: $(STAMP) ## Run the slow tests too
	$(PYTEST) -m "not exhaustive" $(ARGS)

test-exhaustive: $(STAMP) ## Run all of what the slow tests run samples of
	$(PYTEST) -m exhaustive $(ARGS)

lint: $(STAMP) ## Check style, format, types and budgets
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python .ci/budgets.py

budgets: $(STAMP) ## Print what each room of the source holds beside its budget (ARGS=--lower to lower these to it)
	$(BIN)/python .ci/budgets.py $(ARGS)

format: $(STAMP) ## Rewrite the code in the project's format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

zoo: $(STAMP) ## Trace real models and compare with torch.export
	$(BIN)/python benchmarks/zoo.py $(ARGS)

dynamic: $(STAMP) ## Trace real models with dynamic sizes, run them at others, and compare with torch.export
	$(BIN)/python -m benchmarks.dynamic $(ARGS)

steps: $(STAMP) ## Trace training steps of real models, and compare gradients and memory with eager
	$(BIN)/python -m benchmarks.steps $(ARGS)

exported: $(STAMP) ## Make ExportedPrograms of real models and compare with torch.export
	$(BIN)/python -m benchmarks.exported $(ARGS)

orders: $(STAMP) ## Compare the execution order of real models with what hooks see in a run
	$(BIN)/python -m benchmarks.orders $(ARGS)

zoo-onnx: $(STAMP) ## Write real models as ONNX files with functions, beside torch.onnx.export
	$(BIN)/python benchmarks/zoo_onnx.py $(ARGS)

bench: $(STAMP) ## Time tracing against the other ways to get a graph
	$(BIN)/python benchmarks/bench.py $(ARGS)

bench-view: $(STAMP) ## Compare summaries and pages with torchinfo, fvcore, torchview and torchlens, where these are installed
	$(BIN)/python -m benchmarks.views $(ARGS)

clients: $(STAMP) ## Install compilers that read ExportedPrograms, and compare them on torch.export's program and on ours
	$(BIN)/python -m benchmarks.clients $(ARGS)

integrations: ## Test scopetrace.integrations with Lightning and the Trainer of transformers, in .venv-integrations
	$(MAKE) env VENV=.venv-integrations
	.venv-integrations/bin/python -m pip install --quiet $(PINS:%=-c %) --editable '.[lightning,trainer]'
	.venv-integrations/bin/python -m pytest tests/test_callbacks.py tests/test_backend.py "tests/test_docs.py::test_the_blocks_of_a_page_print_what_it_says[docs/howto/watch-a-training-run.md]"

docs: $(STAMP) ## Build the documentation as a site, in site/
	$(PIP_INSTALL) --group docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

pictures: $(STAMP) ## Make the pictures of the documentation anew; needs Graphviz and Chromium
	$(BIN)/python docs/pictures.py

release-check: $(STAMP) ## Build wheel and sdist, install them where there is torch alone, and run the README's commands
	$(BIN)/python .ci/release_check.py $(ARGS)

ci: ## Do what CI does
	.ci/run

clean: ## Remove .venv, caches and build output
	rm -rf .venv .venv-* .clients .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
