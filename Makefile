# Two commands: `make sweep` sets up and runs the quickstart sweep, `make test` sets up and runs the checks and the tests that
# a usual change can break. `make test-exhaustive` runs every further case (crash points, faults on five hosts, the whole
# matrix of knobs, the tutorial), `make test-all` both.
PYTHON ?= python3.11
VENV ?= .venv
TORCH ?= torch==2.13.0
# Test processes: the slow tests start gangs of up to eight ranks each, so more are no gain on few cores.
WORKERS ?= 2
# Most of the modules that come with the packages are never imported, so none is compiled in advance.
INSTALL = $(VENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-compile --constraint constraints.txt

# A test process that dies ends the run with an error; xdist would start another one and then wait for ever.
# Hundreds of short processes import the same modules.
unexport PYTHONDONTWRITEBYTECODE

PYTEST = $(VENV)/bin/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.PHONY: sweep test test-exhaustive test-all check bench docs dist clean

sweep: $(VENV)/.run
	$(VENV)/bin/tune-cluster submit configs/sweeps/quickstart.yaml

test: check
	$(PYTEST) -m "not exhaustive"

# Two files run apart, each in its own process. test_run: late in a long run its test process was killed, twice; most likely
# by Ray, whose head an earlier test had killed in the same process, as none does any more. test_tutorial: its sweep needs
# many times as long to confirm a winner while other tests use the cores, and test_run uses them for a minute or two only.
APART = tests/orchestrator/cli/test_run.py tests/end_to_end/test_tutorial.py
test-exhaustive: $(VENV)/.test
	$(PYTEST) -m exhaustive $(APART:%=--ignore %)
	$(PYTEST) -m exhaustive $(APART)

test-all: check
	$(PYTEST)

check: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache

# Next to other tools, in at most 25 minutes; rewrites the table in docs/benchmarks.md.
bench: $(VENV)/.bench
	$(VENV)/bin/python -m benchmarks.against --write

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet
	@echo "open build/site/index.html"

# Sdist and wheel of the current commit: the same bytes from every clone of it.
dist: $(VENV)/.dist
	$(VENV)/bin/python .ci/dist.py dist
	cd dist && sha256sum *

# torch comes first, so that nothing else decides which build of it is taken.
$(VENV)/.torch: constraints.txt
	@echo "setting up $(VENV): this takes some minutes once"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) "$(TORCH)"
	@touch $@

$(VENV)/.run: $(VENV)/.torch pyproject.toml
	$(INSTALL) --editable .
	@touch $@

# Python warns about torchao's docstrings when it compiles them, and the tests turn every warning into an error.
$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(INSTALL) --editable ".[test]"
	$(VENV)/bin/python -m compileall -q $(VENV)/lib/python3*/site-packages/torchao
	@touch $@ $(VENV)/.run

$(VENV)/.bench: $(VENV)/.test
	$(INSTALL) --editable ".[bench]"
	@touch $@

# The site needs no torch.
$(VENV)/.docs: constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) mkdocs-material
	@touch $@

$(VENV)/.dist: constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) setuptools
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
