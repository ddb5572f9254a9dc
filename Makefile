# Everything a newcomer or a CI needs; each target works alone on a fresh clone and sets up `.venv` by itself.
#
#   make demo                  train a real model with two asynchronous replicas; numbers and a picture at the end
#   make test                  all tests
#   make check                 lint, types, and the tests that start no process, in three minutes
#   make horovod               build Horovod for the installed torch, into `.venv` (HOROVOD_ARGS=--mpi, --nccl)
#   make native                build the native libraries of the ops again (an install has built what it could)
#   make gpu                   all that needs a GPU, in at most eight minutes, with its results in runs/gpu
#   make kills                 ranks die in turn, in all places; what that costs the others, in runs/elastic: KILLS=8 for a
#                              short look, KILLS=100 for numbers. It fails where a target is missed
#   make soak                  ten minutes of training with a kill every 15 s, and torchft beside it, in runs/elastic
#                              (SOAK_S=600). It fails where a target is missed
#   make servers               what a push to a server takes, and kills of servers and workers, in runs/servers
#                              (SERVER_KILLS=30, WORKER_KILLS=100)
#   make projects              models of other people's libraries under every strategy, beside DDP; the libraries are
#                              installed into `.venv-projects`
#   make docs                  build the documentation site into build/site, without warnings; `make docs-serve` shows it
#   make dist                  build the source package and the wheel into dist
#   make lint | types | bench | clean
#
# Variables: PYTHON (which Python makes the environment), PIP_ARGS (more options for pip), TORCH (which torch: a
# requirement for pip; it stays installed until another is asked for), DEMO_ARGS, TEST_ARGS, BENCH_ARGS, ELASTIC_ARGS,
# HOROVOD_ARGS, PROJECTS_ARGS.

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
BENCH_ARGS ?= --out runs/bench
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install $(PIP_ARGS)

# Torch alone comes from its own index, and what it needs from the usual one: with both at once, pip would take any package
# from whichever has the higher version.
# On Linux a plain "torch" is the CUDA build, with gigabytes of libraries: it comes only when it is asked for.
ASKED := $(if $(TORCH),ask)
ifeq ($(shell uname -sm),Linux x86_64)
TORCH ?= torch==2.13.0+cpu
else
TORCH ?= torch==2.13.0
endif

.PHONY: help venv demo test check horovod native gpu lint types bench docs docs-serve dist kills soak servers projects format clean ask
help:
	@sed -n 's/^#   //p' Makefile

venv: $(VENV)/.ready-test

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: $(ASKED) | $(BIN)/python
	@if [ -n "$(ASKED)" ] || ! $(BIN)/python -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; then \
	  echo "pip install $(TORCH)"; \
	  $(PIP) --quiet "$(TORCH)" || { \
	    $(PIP) --quiet --no-deps --index-url $(TORCH_CPU_INDEX) "$(TORCH)" && $(PIP) --quiet "$(TORCH)"; } || { echo; \
	    echo "pip found no $(TORCH). Say where the CPU build is, or ask for another build:"; \
	    echo "  make $(firstword $(MAKECMDGOALS) test) TORCH_CPU_INDEX=<an index with the CPU build>"; \
	    echo "  make $(firstword $(MAKECMDGOALS) test) TORCH=torch==2.13.0     (on Linux: with CUDA, several gigabytes)"; \
	    exit 1; } ; \
	fi
	@$(BIN)/python -m pip --disable-pip-version-check freeze | grep '^torch==' > $@ || true

# The constraint keeps this torch whatever another package would like. An install builds the native libraries, those whose sources have changed.
NATIVE := setup.py cuda_ext/build.py $(wildcard cuda_ext/csrc/*)
$(VENV)/.ready-%: pyproject.toml $(NATIVE) $(VENV)/.torch
	$(PIP) --quiet --constraint $(VENV)/.torch --editable ".[$*]"
	@touch $@

demo: $(VENV)/.ready-demo
	$(BIN)/python examples/char_lm.py --beside-one $(DEMO_ARGS)

# What no run of many tests has: numbers, other people's models, and what runs alone.
SHARED := not benchmark and not project and not alone
# The types take one core for a minute; the tests share both with them, and some of them wait.
check: export OMP_NUM_THREADS ?= 1
check: lint
	@$(MAKE) --no-print-directory types & types=$$!; \
	$(BIN)/python -m pytest -q -n $(TEST_JOBS) --dist loadfile \
	  -m "not processes and $(SHARED)" $(TEST_ARGS); tests=$$?; \
	wait $$types && exit $$tests

# Most tests wait, for processes and for deadlines, so three files run at a time; those that measure time come after them, alone.
# Status 5 says that there was none. Threads of OpenMP that wait for each other on a core that others need cost most.
TEST_JOBS ?= 3
test: export OMP_NUM_THREADS ?= 1
test: $(VENV)/.ready-test
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder \
	  -m "$(SHARED)" $(TEST_ARGS); beside=$$?; \
	$(BIN)/python -m pytest -m "alone and not benchmark" $(TEST_ARGS); alone=$$?; \
	case $$beside,$$alone in 0,0|0,5|5,0) ;; *) exit 1 ;; esac

horovod: $(VENV)/.ready-test
	$(BIN)/python -m lightning_async.horovod.build $(HOROVOD_ARGS)

native: $(VENV)/.ready-test
	$(BIN)/python cuda_ext/build.py

gpu: $(VENV)/.ready-test
	PYTHON=$(BIN)/python bash tests/gpu/run.sh

lint: $(VENV)/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.ready-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.ready-test
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

bench: $(VENV)/.ready-test
	$(BIN)/python -m tests.benchmarks.averaging $(BENCH_ARGS)
	$(BIN)/python -m tests.benchmarks.ops --out runs/ops
	$(BIN)/python -m tests.benchmarks.checkpoints --out runs/bench

docs docs-serve: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.ready-docs
	$(BIN)/python -m mkdocs build --quiet --strict

docs-serve: $(VENV)/.ready-docs
	$(BIN)/python -m mkdocs serve

dist: $(VENV)/.ready-release
	$(BIN)/python -m build

# A few, of which each place has one or none: a percentile is of KILLS=100.
KILLS ?= 8
SERVER_KILLS ?= 30
WORKER_KILLS ?= 100
kills: $(VENV)/.ready-test
	$(BIN)/python -m tests.benchmarks.elastic --out runs/elastic --strict --kills $(KILLS) $(ELASTIC_ARGS)

SOAK_S ?= 600
soak: $(VENV)/.ready-soak
	$(BIN)/python -m tests.benchmarks.soak --out runs/elastic --strict --seconds $(SOAK_S) $(ELASTIC_ARGS)

servers: $(VENV)/.ready-test
	$(BIN)/python -m tests.benchmarks.server --out runs/servers --kills $(SERVER_KILLS) --worker-kills $(WORKER_KILLS)
	$(BIN)/python -m tests.benchmarks.served_kills --out runs/servers --server-kills $(SERVER_KILLS) --worker-kills $(WORKER_KILLS)

# The libraries have an environment of their own: what they need must not decide what the other tests run with.
projects:
	$(MAKE) VENV=.venv-projects .venv-projects/.ready-projects
	.venv-projects/bin/python -m pytest -m project -rP tests/projects $(PROJECTS_ARGS)

clean:
	rm -rf $(VENV) .venv-projects runs build dist *.egg-info lightning_async/ops/lib .pytest_cache .ruff_cache .hypothesis
