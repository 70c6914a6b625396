PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

ECOSYSTEM := .venv-ecosystem
OLDEST := .venv-oldest

# Beside other programs PyTorch's threads wait for each other many times as long without this (src/dcnet/training/processors.py)
export GOMP_SPINCOUNT ?= 2000

.PHONY: demo test slow lint docs bench ecosystem oldest mutants sanitize clean

## demo: train a plain network and three decoupled ones on handwritten digits, on the CPU, and write a report, in about two minutes
demo: $(READY)
	$(BIN)/python examples/demo.py

## test: the whole suite
test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal -rs

## ecosystem: the tests that meet other people's packages, all of them installed in a virtual environment of its own (some GB); none may be skipped for want of one
ecosystem: $(ECOSYSTEM)/.ready
	DCNET_ECOSYSTEM=1 $(ECOSYSTEM)/bin/python -m pytest -n 2 --dist worksteal -rs $$(grep -l "needs(" tests/test_*.py)

## oldest: the whole suite with the oldest PyTorch and Triton that are supported, in a virtual environment of its own (some GB)
oldest: $(OLDEST)/.ready
	$(OLDEST)/bin/python -m pytest -n 2 --dist worksteal -rs -W "ignore:Conversion of an array:DeprecationWarning"

## slow: the checks that take minutes, such as killing a training run twenty times
slow: $(READY)
	$(BIN)/python -m pytest -m slow

## lint: ruff and mypy
lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

## docs: the guides, and a reference made of the docstrings, as pages in build/site
docs: $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

## bench: layers and networks as ratios to their plain twins, on a GPU if there is one
bench: $(READY)
	$(BIN)/python benchmarks/geometries_cpu.py --repeats 5
	$(BIN)/dcnet bench --out bench.csv

## mutants: plant known mistakes in the source, one at a time, and see the tests catch each (minutes)
mutants: $(READY)
	$(BIN)/python tools/mutants.py

## sanitize: the fused kernels under compute-sanitizer, where there is a GPU (graph capture and torch.compile do not go with it)
sanitize: $(READY)
	compute-sanitizer --error-exitcode 9 $(BIN)/python -m pytest tests/test_chain.py tests/test_fused*.py tests/test_fuse.py -o addopts="" -q -x \
		-k "not ranks and not export and not compile and not cuda_graph and not registered and not every_operator"

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

# apart from .venv: what these packages ask for must not decide what everybody else tests with
$(ECOSYSTEM)/.ready: pyproject.toml constraints.txt
	test -x $(ECOSYSTEM)/bin/python || $(PYTHON) -m venv $(ECOSYSTEM)
	$(ECOSYSTEM)/bin/python -m pip install --quiet -c constraints.txt -e ".[dev,ecosystem]"
	touch $@

$(OLDEST)/.ready: pyproject.toml constraints-oldest.txt
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet -c constraints-oldest.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv $(ECOSYSTEM) $(OLDEST) build runs src/*.egg-info
