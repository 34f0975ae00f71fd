# Everything runs in its own .venv. torch is installed first, as constraints/cpu.txt says; on a machine with GPUs:
#   make test TORCH='torch'
PYTHON ?= python3
TORCH ?= -r constraints/cpu.txt
BIN := .venv/bin

.PHONY: demo test check clean

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

.venv/ready: pyproject.toml constraints/cpu.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv
