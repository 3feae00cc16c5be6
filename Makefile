# `make` lists the targets. The first one that needs Python makes .venv; later runs start at once.
.DEFAULT_GOAL := help
.PHONY: help test test-slow fuzz lint format train data bench docs lock clean FORCE

PYTHON := .venv/bin/python
STAMP := .venv/.installed
# Thousands of small programs are compiled once and run once: without LLVM's optimizations that takes half the time.
# Tests marked `codegen` are compiled as for users, and so are those of real models, which run long enough.
QUICK := --xla_backend_optimization_level=0
# That of the processes that tests of several processes launch and compare with their own.
LAUNCHED := --xla_backend_optimization_level=1

# Install again when the interpreter is gone or the tree was moved: an editable install knows its path.
ifneq ($(shell $(PYTHON) -c 'print(open("$(STAMP)").read())' 2>/dev/null),$(CURDIR))
$(STAMP): FORCE
endif
$(STAMP): requirements.lock pyproject.toml hatch_build.py $(wildcard src/octavo/kernels/cpu/*)
	@scripts/install

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' Makefile

test: $(STAMP) ## run the tests (ARGS="-k rounding" narrows them)
	XLA_FLAGS="$(QUICK) $$XLA_FLAGS" $(PYTHON) -m pytest $(ARGS)

test-slow: $(STAMP) ## run the tests that `make test` leaves out (needs `make data` and scripts/browser)
	XLA_FLAGS="$(QUICK) $$XLA_FLAGS" $(PYTHON) -m pytest --shapes=trust -m "(slow or browser) and not (codegen or data)" $(ARGS)
	$(PYTHON) -m pytest --shapes=trust --dist=load -m "codegen or data" \
	    $$(grep -rlE --include='test_*.py' 'mark\.(codegen|data)' tests) $(ARGS)
	XLA_FLAGS="$(LAUNCHED) $$XLA_FLAGS" $(PYTHON) -m pytest --shapes=trust -n0 -m multiprocess tests/checkpoint tests/train/multiprocess $(ARGS)

fuzz: $(STAMP) ## random cases against independent references (SECONDS=1800 for each kind, ARGS="products --seed 1")
	XLA_FLAGS="$(QUICK) $$XLA_FLAGS" $(PYTHON) -m tests.fuzz --seconds $(or $(SECONDS),60) $(ARGS)

lint: $(STAMP) ## check format, style, types, layers and dependencies
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m ruff check
	$(PYTHON) -m pyrefly check
	$(PYTHON) .venv/bin/lint-imports
	$(PYTHON) -m deptry src

format: $(STAMP) ## format the code and fix what ruff can
	$(PYTHON) -m ruff check --fix-only --exit-zero
	$(PYTHON) -m ruff format

train: $(STAMP) ## train a small language model in float and in int8 side by side (ARGS="steps=20 seeds=1" is shorter)
	$(PYTHON) -m octavo compare quantization=int8 use_qwix_quantization=true run_name=int8-and-float fresh=true \
	    $(or $(ARGS),steps=40 seeds=4 eval_points=4)

data: $(STAMP) ## fetch real data into .cache/data (ARGS="enwik8" for some of it)
	$(PYTHON) scripts/data $(ARGS)

bench: $(STAMP) ## run every benchmark and write docs/benchmarks.md (ARGS=--quick: in a few minutes)
	$(PYTHON) benchmarks $(ARGS)

docs: $(STAMP) ## build the documentation into site/, offline; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

# All extras but `tpu` and `cuda`, the compilers of accelerators: a gigabyte that only `octavo compile` needs.
LOCKED := flax equinox training models serve completion examples docs
lock: $(STAMP) ## pin again after a change of dependencies (ARGS=--upgrade: newest versions)
	$(PYTHON) -m uv pip compile pyproject.toml --universal --python-version 3.12 $(LOCKED:%=--extra %) --group dev \
	    --group oracles --generate-hashes --no-annotate --custom-compile-command "make lock" \
	    --quiet --output-file requirements.lock $(ARGS) >/dev/null

clean: ## remove caches and build products, keep .venv
	rm -rf .cache .hypothesis .import_linter_cache .pytest_cache .ruff_cache build dist site
	find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
