# Every target works on a fresh machine with Python 3.11 or newer and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: run test test-all lint bench clean

run: $(READY)            ## the default experiment: FedRTS at density 0.2 on handwritten digits
	$(BIN)/fedrts run

test: lint               ## what CI runs
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-all: lint           ## the slow tests too
	$(BIN)/python -m pytest -n 2

lint: $(READY)           ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)          ## measurements, printed as tables; benchmarks/results holds one run of each
	$(BIN)/python benchmarks/server.py
	$(BIN)/python benchmarks/codec.py
	$(BIN)/python benchmarks/traffic.py
	$(BIN)/python benchmarks/positions.py
	$(BIN)/python benchmarks/digits.py dropout
	$(BIN)/python benchmarks/digits.py values
	$(BIN)/python benchmarks/agreement.py
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/million.py
	$(BIN)/python benchmarks/ray_overhead.py

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev,flower,images,plot,ray,text]"
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info
