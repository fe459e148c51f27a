# `make train` and `make test` each set up everything they need; nothing else has to be run first.

# A pyenv shim can exist without its Python, hence the trial run.
PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

PACKAGES := schedules engine models cli bench

# make train SCHEDULE=gpipe RANKS=4 MICROBATCHES=8 CHUNKS=… STEPS=200 DATA=… ARGS='--lr 1e-3 …': only those given are passed.
TRAIN_ARGUMENTS = \
	$(if $(SCHEDULE),--schedule $(SCHEDULE)) \
	$(if $(RANKS),--ranks $(RANKS)) \
	$(if $(CHUNKS),--chunks $(CHUNKS)) \
	$(if $(MICROBATCHES),--microbatches $(MICROBATCHES)) \
	$(if $(STEPS),--steps $(STEPS)) \
	$(if $(DATA),--data '$(DATA)') \
	$(ARGS)

.DEFAULT_GOAL := help
.PHONY: help setup train test test-slow lint format types bench clean

help:  ## say what each target does
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | awk -F '\t' '{ printf "make %-10s %s\n", $$1, $$2 }'
	@echo
	@echo "make train SCHEDULE=gpipe RANKS=4 MICROBATCHES=8 STEPS=200    (also CHUNKS=, DATA=, ARGS='--lr 1e-3')"

train: $(STAMP)  ## train a small GPT on real text over a pipeline of local processes
	@$(BIN)/stagewright train $(TRAIN_ARGUMENTS)

test: $(STAMP)  ## run the tests, two at a time (ARGS='-k name' to choose)
	$(BIN)/pytest -n 2 --dist worksteal $(ARGS)

test-slow: $(STAMP)  ## run the long tests
	$(BIN)/pytest -m slow $(ARGS)

lint: $(STAMP)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy cannot follow the editable install, so it reads a tree of links that has the installed names.
types: $(STAMP)  ## mypy --strict over all packages
	@mkdir -p build/types/stagewright
	@for package in $(PACKAGES); do ln -sfn ../../../$$package build/types/stagewright/$$package; done
	$(BIN)/mypy --strict $(PACKAGES:%=-p stagewright.%)

bench: $(STAMP)  ## measure bubbles, overhead and memory
	$(BIN)/python -m stagewright.bench $(ARGS)

setup: $(STAMP)  ## make the virtual environment (the other targets do so by themselves)

clean:  ## remove the virtual environment and everything built
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "stagewright needs Python 3.11 or newer, $(PYTHON) is older: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
