PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# The files with tests that need a GPU; elsewhere these are skipped, or run on the CPU alone.
CUDA_TESTS := $(addprefix tests/,test_modes.py test_fused.py test_devices.py test_stacks_on_devices.py test_notebook.py \
	curvature/test_engine.py curvature/test_gauss_newton.py curvature/test_stopwatch.py lab/test_bench.py \
	lab/test_bench_kernels.py)

.PHONY: demo test test-cuda lint format bench docs clean

demo: $(INSTALLED)
	$(BIN)/adahessian demo

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

# On a machine with a GPU, in an environment whose torch can use it: make test-cuda PYTEST="python -m pytest"
test-cuda: PYTEST ?= $(BIN)/python -m pytest
test-cuda:
	$(PYTEST) --tb=short --show-capture=no -k "not cpu" $(CUDA_TESTS) --record results/tests-cuda.json

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BIN)/adahessian bench --parts update

docs: $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[docs]"
	$(BIN)/sphinx-build --fail-on-warning docs site

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist site demo
