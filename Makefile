# Every target works on a fresh machine: what it needs is installed into .venv once, and again when pyproject.toml changes.

BIN := .venv/bin
CORE := .venv/.core-complete
SETUP := .venv/.setup-complete
CORE_TESTS := tests/core tests/test_readme.py
DEMO_ARGS ?=

# $(call stage,NAME,COMMAND): name the stage, run it, print its time; its failure stops make.
stage = @printf '== %s\n' "$(1)"; start=$$(date +%s); $(2) || exit $$?; \
	printf '== %s: %s s\n' "$(1)" "$$(($$(date +%s) - start))"

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: setup demo test test-core lint clean help

$(CORE): pyproject.toml .ci/setup
	@bash .ci/setup core

$(SETUP): $(CORE)
	@bash .ci/setup vllm

setup: $(SETUP) ## Install the package, its tools and vLLM (CUDA or CPU build) into .venv

demo: $(SETUP) ## Run the demo into build/demo (options: DEMO_ARGS='...')
	$(BIN)/vllm-penalty demo --out build/demo $(DEMO_ARGS)

test: export VLLM_PENALTY_REQUIRE_VLLM := 1
test: $(SETUP) lint test-core ## Run every check: lint, core tests, wheel tests, tests with vLLM, README
	$(call stage,wheel tests,$(BIN)/python -m pytest tests/packaging)
	$(call stage,slow tests and tests with vLLM,$(BIN)/python -m pytest -rs --durations=10 -m "vllm or gpu or slow")

test-core: $(CORE) ## Run the tests that need no vLLM
	$(call stage,core tests,$(BIN)/python -m pytest -m "not vllm and not slow" $(CORE_TESTS))

lint: $(CORE) ## Check style, formatting, types and the layers
	$(call stage,ruff check,$(BIN)/ruff check)
	$(call stage,ruff format,$(BIN)/ruff format --check)
	$(call stage,mypy,$(BIN)/mypy)
	$(call stage,lint-imports,$(BIN)/lint-imports)

clean: ## Delete what the other targets made, except .venv
	rm -rf build dist .hypothesis .mypy_cache .ruff_cache .import_linter_cache .benchmarks
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.* ## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12
