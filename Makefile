# Bare `make` prints the targets. PYTHON, VENV and TORCH_INDEX_URL (where to take torch from) may be set.
PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX_URL ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
INSTALLED := $(VENV)/.installed
CODE := clients/python/shoal services tests benchmarks examples
PROMPT ?= Why is the sky blue? Answer in one sentence.
TOKENS ?= 32
LEVELS ?=

export PROMPT TOKENS
.DEFAULT_GOAL := help
.PHONY: help install demo test check proto proto-check fmt lint types bench clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(INSTALLED)  ## make .venv with everything in it

$(INSTALLED): constraints.txt pyproject.toml clients/python/pyproject.toml VERSION
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Shoal needs Python 3.11 or newer: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) torch
	$(PIP) -e "clients/python[client,dht]" -e ".[control,block,dev]"
	@touch $@

demo: install  ## real tokens through three local servers: make demo PROMPT="..." TOKENS=64
	@$(BIN)/python examples/demo.py --prompt "$$PROMPT" --tokens "$$TOKENS"

test: install  ## every level of tests: make test LEVELS="unit property"
	@$(BIN)/python -m tests.support.run_levels $(LEVELS)

check: install lint types proto-check  ## format, lint, types, import rules, protos, budgets
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest -q -p no:randomly tests/tidy

fmt: install  ## format the code
	$(BIN)/ruff format --quiet $(CODE)
	$(BIN)/ruff check --quiet --fix $(CODE)

lint: install  ## ruff and buf
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/buf lint protos
	$(BIN)/buf breaking protos --against protos/baseline.binpb

types: install  ## mypy, strict
	$(BIN)/mypy $(CODE)

PROTOS := $(wildcard protos/shoal/v1/*.proto)
define generate
$(BIN)/python -m grpc_tools.protoc -I protos --python_out=$(1) --grpc_python_out=$(1) \
	  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --mypy_out=readable_stubs,quiet:$(1) \
	  --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc --mypy_grpc_out=quiet:$(1) $(PROTOS)
endef

proto: install  ## generate the stubs from protos/
	$(call generate,clients/python)

proto-check: install  ## fail if the stubs are not those of protos/
	@fresh=$$(mktemp -d) && trap 'rm -r "$$fresh"' EXIT && $(call generate,"$$fresh") && \
	  diff -r --exclude=__init__.py --exclude=__pycache__ "$$fresh/shoal/v1" clients/python/shoal/v1 || \
	  { echo 'the stubs differ from protos/: run make proto' >&2; exit 1; }

bench: install  ## all benchmarks, one JSON line for each figure
	$(BIN)/python -m benchmarks

clean:  ## remove the virtual environment and all caches in this folder
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
