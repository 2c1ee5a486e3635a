PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: install lint format types test test-real build check demo benchmark clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Type checkers do not follow an editable install's import hook: links show them the packages as they are imported.
types: install
	@mkdir -p typings/gqa
	@for package in corpus convert uptrain eval; do ln -sfn ../../$$package typings/gqa/$$package; done
	$(BIN)/mypy

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m "not real"

test-real: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m real

build: install
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

check: lint types test test-real build
	$(PYTHON) tests/installed.py dist

demo: install
	$(BIN)/python examples/demo.py

benchmark: install
	$(BIN)/python benchmarks/convert.py

clean:
	rm -rf build dist typings .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
