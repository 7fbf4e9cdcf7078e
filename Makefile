# kiln: `make serve` serves the bundled model, `make test` runs every check. Both set up what they need.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

.PHONY: setup serve test lint bench curve clean

setup: $(VENV)/.installed

serve: setup
	$(BIN)/kiln serve $(ARGS)

test: $(VENV)/.tested-with lint
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.tested-with
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.tested-with
	$(BIN)/python -m bench $(ARGS)

curve: setup
	$(BIN)/python -m bench.curve $(ARGS)

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "kiln needs Python 3.11 or newer; set PYTHON=/path/to/python"; exit 1; }
	@echo "==> setting up $(VENV); the first time compiles llama.cpp, about 4 minutes"
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt scripts/install_llama.py
	$(BIN)/python scripts/install_llama.py
	$(PIP) -e .
	@$(BIN)/python -c 'from kiln.backends.llamacpp.library import start_backend; start_backend()'
	@touch $@

$(VENV)/.tested-with: $(VENV)/.installed
	$(PIP) -e '.[test]'
	@touch $@
