# Every target works on a fresh machine with Python 3.11 or newer and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
COVERAGE := --cov --cov-report=term:skip-covered --cov-fail-under=94

.PHONY: help run test test-all lint docs notebooks bench dist sanitize hooks clean

help:                    ## this list
	@awk -F ':.*##' '/^[a-z-]+:.*##/ { printf "make %-10s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(READY)            ## the default experiment: FedRTS at density 0.2 on handwritten digits
	$(BIN)/fedrts run

test: lint docs          ## style, types, documentation, tests, and how much of the code they reach: what CI runs
	$(BIN)/python -m pytest -n 2 -m "not slow" $(COVERAGE)

test-all: lint docs      ## the same with the slow tests
	$(BIN)/python -m pytest -n 2 $(COVERAGE)

lint: $(READY)           ## style, types, width of Markdown
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python docs/wrap.py --check
	$(BIN)/mypy

docs: $(READY)           ## the documentation as a site in build/site; every warning is an error
	$(BIN)/python docs/generate.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebooks: $(READY)      ## play the tutorial's notebooks in full; their outputs are kept in them
	$(BIN)/python docs/notebooks.py

bench: $(READY)          ## measurements, printed as tables; benchmarks/results holds one run of each
	$(BIN)/python benchmarks/server.py
	$(BIN)/python benchmarks/codec.py
	$(BIN)/python benchmarks/traffic.py
	$(BIN)/python benchmarks/positions.py
	$(BIN)/python benchmarks/blocks.py
	$(BIN)/python benchmarks/digits.py dropout
	$(BIN)/python benchmarks/digits.py values
	$(BIN)/python benchmarks/choosing.py
	$(BIN)/python benchmarks/assumptions.py
	$(BIN)/python benchmarks/diagnosis.py --out runs/diagnosis
	$(BIN)/python benchmarks/agreement.py
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/felt.py
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/million.py
	$(BIN)/python benchmarks/ray_overhead.py
	$(BIN)/python benchmarks/audit.py

dist: $(READY)           ## the packages to publish, in dist/, checked
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[release]"
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

sanitize: $(READY)       ## the tests of the kernels under the address and undefined-behaviour sanitizers
	$(BIN)/python -m fedrts_kernels --sanitize --out build/sanitized.so
	LD_PRELOAD="$$($${CC:-cc} -print-file-name=libasan.so) $$($${CC:-cc} -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
		FEDRTS_KERNELS_LIBRARY=$(CURDIR)/build/sanitized.so $(BIN)/python -m pytest -n 0 tests/unit/programs

hooks: $(READY)          ## check style and generated pages before every commit (pre-commit)
	$(BIN)/pre-commit install

$(READY): pyproject.toml constraints.txt kernels/pyproject.toml kernels/setup.py $(wildcard kernels/src/fedrts_kernels/*.[ch])
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ./kernels
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-compile -c constraints.txt \
		-e ".[datasets,dev,flower,images,kernels,lora,metrics,mlflow,onnx,pandas,parquet,plot,ray,tensorboard,text,wandb]"
	$(BIN)/python -c "import fedrts_kernels; fedrts_kernels.load()" 2>/dev/null || echo "fedrts-kernels: no library (is there a C compiler?): models compute densely"
	touch $@

clean:                   ## remove what make has made
	rm -rf $(VENV) build dist src/*.egg-info kernels/build kernels/src/*.egg-info kernels/src/fedrts_kernels/*.so
