# Everything runs in its own .venv, with the exact releases of constraints/tested.txt. torch is installed first, so that
# its build can be chosen; a machine without GPUs need not fetch CUDA:
#   make test TORCH='torch --index-url https://download.pytorch.org/whl/cpu'
PYTHON ?= python3
TORCH ?= torch
TESTED := constraints/tested.txt
BIN := .venv/bin
LATEST := .venv-latest/bin

.PHONY: demo test check test-latest constraints clean

demo: .venv/ready
	$(BIN)/python examples/demo.py

test: .venv/ready
	$(BIN)/python -m pytest

# What CI runs beside the tests: style, types, and whether the tests notice planted faults.
check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python scripts/mutation_check.py

.venv/ready: pyproject.toml $(TESTED)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint $(TESTED) $(TORCH)
	$(BIN)/pip install --quiet --constraint $(TESTED) --editable '.[dev]'
	touch $@

# The suite with the newest release of everything, in a venv of its own, made anew each time: what a user who installs
# today gets. Not part of CI. ARGS goes to pytest.
test-latest:
	rm -rf .venv-latest
	$(PYTHON) -m venv .venv-latest
	$(LATEST)/pip install --quiet $(TORCH)
	$(LATEST)/pip install --quiet --editable '.[dev]'
	@echo 'Releases that differ from $(TESTED) (<: tested, >: newest):'
	@$(LATEST)/python scripts/freeze.py | diff $(TESTED) - || true
	$(LATEST)/python -m pytest $(ARGS)

# Moves the tested set to what test-latest has installed. CONTRIBUTING.md says when.
constraints:
	$(LATEST)/python scripts/freeze.py > $(TESTED).new
	mv $(TESTED).new $(TESTED)

clean:
	rm -rf .venv .venv-latest
