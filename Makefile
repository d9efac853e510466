# make train     sets up the environments if needed, and runs the laptop job; repeated, it continues the job
# make test      sets up the environments if needed, and runs the tests;  make test-all: the slow tests, too
# make check     checks format, lint, spelling, import contracts and types, and runs the quick tests, in five minutes
# make lint      the same without the tests
# make mutate    breaks the code in small ways and lists what no quick test notices; takes hours, or ARGS="--sample 40"
# make docs      builds the documentation into site/;  make docs-serve: serves it while you write
# make gpu-evidence   measures kernels, actor, engine and whole steps on this machine's GPU
# make gpu-wheels     collects the packages that gpu-evidence needs on a machine with only Python and torch
# make clean     deletes both environments and caches; runs/ stays

PYTHON ?= python3.11
RUN ?= runs/laptop
ARGS ?=
TRAIN_LOCK ?= setup/train.lock
ROLLOUT_LOCK ?= setup/rollout.lock
# Package index of the torch build to install; empty: the index that pip is configured with.
TORCH_INDEX ?=

BIN := .venv/train/bin

# For `make gpu-evidence`: the train environment if it exists, otherwise python3 with the collected wheels.
EVIDENCE_PYTHON ?= $(or $(wildcard .venv/train/bin/python),python3)
GPU_WHEELS ?= .gpu-wheels
GPU_PYTHON ?= python3.12

.PHONY: setup train lint check docs docs-serve test test-all mutate gpu-evidence gpu-wheels clean

setup:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null || { \
	  echo "set-up failed: '$(PYTHON)' is not a Python 3.11 that runs here. Install Python 3.11," >&2; \
	  echo "or give its path: make PYTHON=/path/to/python3.11 ..." >&2; \
	  echo "On PATH: $$(ls $$(echo "$$PATH" | tr ':' ' ') 2>/dev/null | grep -xE 'python3(\.[0-9]+)?' | sort -u | tr '\n' ' ')" >&2; \
	  exit 3; }
	@$(PYTHON) setup/environments.py --train-lock "$(TRAIN_LOCK)" --rollout-lock "$(ROLLOUT_LOCK)" --torch-index "$(TORCH_INDEX)"

train: setup
	@$(BIN)/prorl train "run_dir=$(RUN)" $(ARGS)

# One worker more than cores, because many tests wait; at most four, because engines and ranks need memory.
PYTEST := $(BIN)/python -m pytest --numprocesses=$(shell n=$$(nproc); echo $$((n < 4 ? n + 1 : 4)))

lint: setup
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/codespell
	@$(BIN)/lint-imports
	@$(BIN)/mypy

check: lint
	@$(PYTEST) --dist=worksteal -m "not slow and not vllm and not nemo and not starts" $(ARGS)

test: setup
	@$(PYTEST) -m "not slow" $(ARGS)

test-all: setup
	@$(PYTEST) $(ARGS)

mutate: setup
	@$(BIN)/python tests/mutate.py $(ARGS)

# Generates the pages that come from the code, then builds the site.
docs: setup
	@$(BIN)/python docs/configuration.py
	@$(BIN)/python setup/schemas.py
	@$(BIN)/python docs/schema_list.py
	@$(BIN)/python docs/commands.py
	@$(BIN)/python docs/data_sources.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

docs-serve: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve $(ARGS)

gpu-evidence:
	@$(EVIDENCE_PYTHON) benchmarks/gpu_evidence.py \
	  $(if $(filter $(BIN)/%,$(EVIDENCE_PYTHON)),,$(if $(wildcard $(GPU_WHEELS)/*.whl),--wheels $(GPU_WHEELS))) $(ARGS)

gpu-wheels:
	@$(GPU_PYTHON) -m pip wheel --quiet --no-deps --wheel-dir $(GPU_WHEELS) -r setup/gpu-wheels.txt
	@ls -l $(GPU_WHEELS)

clean:
	rm -rf .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +
