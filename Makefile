# Every target sets up what it needs: a virtual environment with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Two workers share two cores; the shapes in the annotations are checked while the tests run.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --jaxtyping-packages=ncdwf,beartype.beartype

.PHONY: run test fast check reproduce bench clean

run: .venv/installed
	$(BIN)/ncdwf run digits-5-5

test: .venv/installed-dev
	$(PYTEST)

fast: .venv/installed-dev
	$(PYTEST) -m "not slow"

check: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

reproduce: .venv/installed
	$(BIN)/ncdwf reproduce digits-proxy
	$(BIN)/ncdwf reproduce digits --docs docs/digits.md --docs README.md

bench: .venv/installed
	$(BIN)/python benchmarks/speed.py --records benchmarks/RECORDS.md

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) -e .
	touch $@

.venv/installed-dev: .venv/installed
	$(INSTALL) -e '.[dev]'
	touch $@
