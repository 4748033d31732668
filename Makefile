# `make run` starts the service, `make check` runs the quick tests and `make test` runs all tests.
# Each target first installs the packages that it needs.

VENV := .venv
# `make test PYTHON=python3.13` runs everything on another Python. If the virtual environment has
# another minor version, it is created again.
PYTHON ?= python3
BIN := $(VENV)/bin
RUN_READY := $(VENV)/.run-ready
READY := $(VENV)/.ready
BENCH_READY := $(VENV)/.bench-ready
VERSION_OF = -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
PYTEST := $(BIN)/pytest --numprocesses=4 --dist=worksteal
C_SOURCES := $(wildcard src/ratekeeper/decide/kernel/*.[ch] src/ratekeeper/service/grpc/*.[ch])

.DEFAULT_GOAL := help
.PHONY: help run check unit test lint bytecode bench docs fuzz mutants release clean

ifneq ($(shell $(PYTHON) $(VERSION_OF)),$(shell $(BIN)/python $(VERSION_OF)))
.PHONY: $(RUN_READY) $(READY) $(BENCH_READY)
NEW_VENV := $(PYTHON) -m venv --clear $(VENV)
endif

help:  ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The lines for people, also without a terminal: they have a one-time login link.
run: $(RUN_READY)  ## start the service with example rules and a console, on http://127.0.0.1:8080
	$(BIN)/ratekeeper serve --data build/run --seed examples/limits.yaml --sample 1 \
		--log-format text --console-link

check: $(READY)  ## lint, types, and the quick tests that need no server
	$(MAKE) --no-print-directory --jobs=2 lint unit

# Two workers: these tests compute and never wait. The ignored folders have nothing to run here.
unit: $(READY)
	$(BIN)/pytest --numprocesses=2 --dist=worksteal -m "not server and not long" \
		--hypothesis-profile=quick \
		$(addprefix --ignore=tests/,integration faults examples kernel parity promises)

test: $(READY)  ## run the linters and all tests, also those on real servers
	$(MAKE) --no-print-directory --jobs=2 lint bytecode
	$(PYTEST)

# Four workers would each compile all tests at first. One process does it, while mypy runs.
bytecode: $(READY)
	@$(BIN)/pytest --collect-only --quiet | tail -n 1

# stubtest makes the cache of mypy useless, so it runs in a folder where it has its own.
lint: $(READY)  ## run ruff, clang-format, mypy and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(C_SOURCES) \
		$(wildcard tests/kernel/*.[ch] tests/service/grpc/*.[ch])
	$(BIN)/mypy
	$(BIN)/mypy tests/typing_public_api.py
	$(BIN)/mypy $(wildcard examples/recipes/*.py)
	cd $(VENV) && MYPYPATH=../src bin/python -m mypy.stubtest \
		ratekeeper.decide.kernel._kernel ratekeeper.service.grpc._http2
	$(BIN)/lint-imports

bench: $(BENCH_READY)  ## compare the speed with other libraries
	$(BIN)/python -m bench
	$(BIN)/python -m bench.entries
	$(BIN)/python -m bench.overview

# The variable silences an advertisement of another site generator. With --quiet, warnings would
# not end the build, in spite of --strict.
docs: $(READY)  ## build the documentation site: open build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

fuzz: $(READY)  ## fuzz the C code, and simulate random fleets, each for SECONDS=60
	$(BIN)/python -m tests.simulator random --seconds $(or $(SECONDS),60)
	sh tools/fuzz.sh $(or $(SECONDS),60)

# ONLY='core web/no-retry-after' runs those of a folder, and one by its name.
mutants: $(READY)  ## plant defects in a copy, and report those that no test notices; RANDOM=200
	$(BIN)/python -m tests.mutants $(if $(RANDOM),--random $(RANDOM)) \
		$(if $(MINUTES),--minutes $(MINUTES)) $(ONLY)

release: $(READY)  ## build the packages into dist/ and try them; uploads nothing
	@$(BIN)/python tools/release.py

clean:  ## remove all files that the other targets created
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find src \( -name '*.so' -o -name '*.egg-info' \) -prune -exec rm -rf {} +

# Three installations: the service alone, the tests, and the libraries of the benchmarks.
# The service alone does without libnghttp2: then grpcio serves Envoy. The tests need both.
# An index without the source distribution of `limits` fails the one test that needs it, not all.
INSTALL = RATEKEEPER_KERNEL=required $(BIN)/python -m pip install --quiet \
	--disable-pip-version-check --editable
SOURCES := pyproject.toml tools/system_packages.sh $(wildcard setup.py) $(C_SOURCES)

$(RUN_READY): $(SOURCES)
	@PYTHON=$(PYTHON) sh tools/system_packages.sh run
	$(NEW_VENV)
	$(INSTALL) '.[server]'
	@touch $@

$(READY): $(SOURCES)
	@PYTHON=$(PYTHON) sh tools/system_packages.sh test
	$(NEW_VENV)
	RATEKEEPER_HTTP2=required $(INSTALL) '.[dev]'
	-$(BIN)/python tools/limits_sdist.py
	@touch $@ $(RUN_READY)

$(BENCH_READY): $(READY)
	@PYTHON=$(PYTHON) sh tools/system_packages.sh bench
	RATEKEEPER_HTTP2=required $(INSTALL) '.[dev,bench]'
	@touch $@
