# `make demo` and `make test` set up everything they need in .venv, once.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test soak lint types docs bench browser clean

demo: $(READY)
	$(BIN)/manyhands compare diloco ssp easgd bsp --task digits --workers 2 --target accuracy=0.95

test: lint types
	$(BIN)/pytest -n 2

# Whole runs of every method with every fault, then the fault tests 20 times in a row: about an hour.
soak: $(READY)
	$(BIN)/python tests/soak.py 20 1

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY)
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/python docs/generate.py

bench: $(READY)
	$(BIN)/manyhands bench virtual

# Chromium, which tests of reports look through and --png draws with; where it cannot be installed, tests skip and say so.
browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name && exit 0; done; \
	echo "no Chromium: installing it from Debian's packages"; \
	{ apt-get update && apt-get install -y --no-install-recommends chromium; } || \
	{ echo "Chromium could not be installed: do it by hand, for example with apt-get install chromium" >&2; exit 1; }

# What can be made again. Records in runs/ stay, and so does .venv.
clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache
	find src tests docs benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt hatch_build.py
	$(PYTHON) -m venv .venv
	$(BIN)/pip install torch==2.13.0
	$(BIN)/pip install -e '.[dev]' -c constraints.txt
	touch $@
