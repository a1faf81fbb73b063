# Two commands on a fresh machine: `make demo` and `make test`. Both set up what they need, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test slow clean

demo: $(READY)
	$(BIN)/sfumato demo

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto

slow: $(READY)
	$(BIN)/pytest -m slow

clean:
	rm -rf $(VENV) demo demo-*

# torch first and pinned: left open, it would bring gigabytes of CUDA.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "sfumato needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $(READY)
