PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Some virtual machines report AMX, but any bfloat16 product that uses it is an illegal instruction.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

# The files with tests that need a GPU. On other machines these tests are skipped or run on the CPU only.
CUDA_TESTS := $(addprefix tests/,algorithm/test_fused.py hessian/test_attention.py hessian/test_engine.py \
	test_training_step.py test_modes.py test_devices.py test_stacks_on_devices.py lab/test_bench.py)

.PHONY: demo test test-cuda lint format bench docs docs-pages package clean

demo: $(INSTALLED)
	$(BIN)/adahessian demo

# A worker that dies fails the run, instead of being replaced.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup --max-worker-restart=0

# On a machine with a GPU, in an environment whose torch can use it: make test-cuda PYTEST="python -m pytest"
test-cuda: PYTEST ?= $(BIN)/python -m pytest
test-cuda:
	$(PYTEST) --tb=short --show-capture=no -k "not cpu" $(CUDA_TESTS) --record results/tests-cuda.json

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/adahessian report results --markdown RESULTS.md --check

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BIN)/adahessian bench --workloads gpt2-124m --modes update --output runs/bench.json

# Builds the site in site/. This executes the gallery, which takes a few minutes.
docs: $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[docs]"
	$(BIN)/python -m sphinx --fail-on-warning docs site

# The same without executing the gallery, in another folder.
docs-pages: $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[docs]"
	$(BIN)/python -m sphinx --quiet --fail-on-warning --fresh-env --define plot_gallery=0 docs build/pages

# Builds and checks the distributions, and runs the README's first snippet with the wheel.
package: $(INSTALLED)
	rm -rf dist build/installed
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	$(BIN)/pip install --quiet --no-deps --no-index --target build/installed dist/*.whl
	PYTHONPATH=build/installed $(BIN)/python tests/first_snippet.py

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist site docs/gallery docs/sg_execution_times.rst demo
