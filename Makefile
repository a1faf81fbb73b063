# Two commands on a fresh machine: `make demo` and `make test`. Both set up what they need, once. `make docs` builds the site.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Python keeps what it compiles: the tests start many processes, and each would compile PyTorch again where the
# environment forbids that. pip compiles nothing; the second core compiles PyTorch while pip installs the rest.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

.PHONY: demo test slow gpu-test browser-test docs tables render clean

demo: $(READY)
	$(BIN)/sfumato demo

# While mypy uses one core, the other one compiles what the tests import: all workers of pytest need it at once.
test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pytest --collect-only >/dev/null 2>&1 & $(BIN)/mypy; status=$$?; wait; exit $$status
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal

slow: $(READY)
	$(BIN)/pytest -m slow

# On a machine with a GPU: the tests that are skipped elsewhere.
gpu-test: $(READY)
	$(BIN)/pytest -m gpu

# The page of `sfumato serve` in a real browser. Debian: apt-get install chromium chromium-driver
browser-test: $(READY)
	$(BIN)/pytest -m browser -rs

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo 'open build/site/index.html'

# Runs what is missing of all tables: hours on a GPU. DATA is a folder with NAME.npz, see python -m benchmarks --help.
# Speed benchmarks are left out: they need an idle machine, some of them the authors' programs. Run python -m benchmarks speed-NAME.
DATA ?= .
WORKERS ?= 1
tables: $(READY)
	$(BIN)/python -m benchmarks all --folder $(DATA) --workers $(WORKERS)
	$(BIN)/python -m benchmarks render

render: $(READY)
	$(BIN)/python -m benchmarks render

clean:
	rm -rf $(VENV) demo demo-*

# torch first and pinned: left open, it would bring gigabytes of CUDA.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "sfumato needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt torch setuptools
	$(BIN)/python -m compileall -qq $(VENV)/lib/python*/site-packages/torch $(VENV)/lib/python*/site-packages/sympy & \
	$(PIP) -c constraints.txt --no-build-isolation -e '.[dev]'; status=$$?; wait; exit $$status
	$(PIP) --no-deps jax-privacy==2.0.0  # a test compares with its auditing.py, which needs no JAX
	touch $(READY)
