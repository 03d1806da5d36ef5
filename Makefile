# `make demo` and `make test` set up everything they need in .venv, once.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test quick walk soak lint types docs bench browser clean

demo: $(READY)
	$(BIN)/manyhands compare diloco ssp easgd bsp --task digits --workers 2 --target accuracy=0.95

test: lint types
	$(BIN)/pytest -n 2

# The tests of one part in about 30 seconds: make quick PART=codecs; without PART it lists the parts.
quick: $(READY)
	@$(BIN)/python tests/quick.py $(PART)

# The files and functions that run in one step of a method: make walk METHOD='bsp:codec=half()' LINK=tcp
METHOD ?= ssp
LINK ?= shm
walk: $(READY)
	$(BIN)/python tests/walk.py '$(METHOD)' --link $(LINK)

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

# Chromium, for the tests of reports and for --png; where it cannot be installed, these tests are skipped with the reason.
browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name && exit 0; done; \
	echo "no Chromium: installing it from Debian's packages"; \
	{ apt-get update && apt-get install -y --no-install-recommends chromium; } || \
	{ echo "Chromium could not be installed: do it by hand, for example with apt-get install chromium" >&2; exit 1; }

# Removes what can be made again, but neither the records in runs/ nor .venv.
clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache
	find src tests docs benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt hatch_build.py
	$(PYTHON) -m venv .venv
	$(BIN)/pip install torch==2.13.0
	$(BIN)/pip install -e '.[dev]' -c constraints.txt
	touch $@
