# make setup       the environment, in .venv (quick when nothing changed)
# make quickstart  setup, then a tiny vision-language-action policy learns four manipulation tasks
# make test        setup, then everything that a change must pass
# make test-core   setup, then the tests of the core alone, without the slow ones
# make test-all    test, then the tests of each simulator, taskset and engine in a Python of its own, which it makes
# make docs        setup, then the documentation, in site/index.html; make docs-serve shows it while pages change
# make coverage    setup, then all tests once more, and which lines none of them reaches

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/setup.stamp

# On shared cores more threads per process are slower; say OMP_NUM_THREADS=8 to use more.
export OMP_NUM_THREADS ?= 1
# Processes that tests start read what earlier ones have compiled.
unexport PYTHONDONTWRITEBYTECODE

# Tests that mostly wait, for processes that they start; those that mostly compute run beside them. A folder that is
# named to pytest, or is among its testpaths, is not ignored.
WAITING := tests/process tests/runtime tests/plugins/workflow tests/plugins/cluster tests/plugins/ranks \
	tests/plugins/sharing tests/plugins/lerobot tests/plugins/language tests/plugins/trackers tests/cli \
	bench/tests/test_gpu.py bench/tests/test_chaos.py \
	$(filter-out tests/plugins/cluster/process,$(wildcard tests/plugins/*/process))
# Of the core alone, so that both sessions take as long.
CORE_WAITING := tests/process tests/runtime tests/cli

.PHONY: setup quickstart test test-core test-all lint types contracts check check-waiting check-computing core-waiting core-computing coverage docs docs-serve clean
.DEFAULT_GOAL := setup

setup: $(STAMP)

# Torch first and alone: its version decides which builds of the others fit.
$(STAMP): pyproject.toml bench/pyproject.toml constraints.txt tools/render_libs.sh
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear .venv || { echo "Please run: apt-get install -y python3-venv" >&2; exit 1; }
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[metaworld,vla,dev]' -e bench
	tools/render_libs.sh $(BIN)/python
	@touch $@

quickstart: setup
	$(BIN)/polyrhythm train quickstart

lint: setup
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

contracts: setup
	$(BIN)/lint-imports --no-logo

check: setup
	@echo "pytest: two sessions side by side, each prints what it did when it ends (some minutes)"
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target check-waiting check-computing

check-waiting: setup
	$(BIN)/pytest $(WAITING)

test-core: setup
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target core-waiting core-computing

core-waiting: setup
	$(BIN)/pytest -m "not slow" $(CORE_WAITING)

core-computing: setup
	$(BIN)/pytest -m "not slow" tests $(addprefix --ignore=,$(CORE_WAITING) tests/plugins tests/held)

check-computing: setup
	$(BIN)/pytest tests bench/tests $(addprefix --ignore=,$(WAITING))

# By itself: measuring makes the conductor's tests four times as slow.
coverage: setup
	$(BIN)/pytest --cov --cov-report=term

# In this order, even under make -j: the quick ones first.
test: setup
	$(MAKE) --no-print-directory lint
	$(MAKE) --no-print-directory types
	$(MAKE) --no-print-directory contracts
	$(MAKE) --no-print-directory check

test-all: test
	tools/test_all.sh

# Without it the theme prints its maintainers' announcement.
docs docs-serve: export NO_MKDOCS_2_WARNING := 1

docs: setup
	$(BIN)/mkdocs build --strict --quiet

docs-serve: setup
	$(BIN)/mkdocs serve --strict

clean:
	rm -rf .venv .envs .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache .coverage dist build site
