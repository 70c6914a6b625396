PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test lint bench mutants clean

## demo: draw the curves of every operator and check the one that must equal nn.Conv2d
demo: $(READY)
	$(BIN)/python examples/demo.py

## test: the whole suite
test: $(READY)
	$(BIN)/python -m pytest -n 2

## lint: ruff and mypy
lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

## bench: one layer on this CPU as a ratio to nn.Conv2d, then layers and networks on what is here, a GPU if there is one
bench: $(READY)
	$(BIN)/python benchmarks/layer_cpu.py
	$(BIN)/dcnet bench --out bench.csv

## mutants: plant known mistakes in the source, one at a time, and see the tests catch each (minutes)
mutants: $(READY)
	$(BIN)/python tools/mutants.py

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv build runs src/*.egg-info
