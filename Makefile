# Every target works on a fresh machine: what it needs is installed into .venv once, and again when pyproject.toml changes.

BIN := .venv/bin
CORE := .venv/.core-complete
SETUP := .venv/.setup-complete
CORE_TESTS := tests/core tests/test_readme.py
DEMO_ARGS ?=
SOAK_STEPS ?= 100000
SOAK_OUT ?= benchmarks/results/random_steps.json
SOAK_MINUTES ?= 20
SERVER_SOAK_OUT ?= benchmarks/results/server_soak.json
CONFORMANCE_ARGS ?=
MATRIX_ARGS ?=

# $(call stage,NAME,COMMAND): name the stage, run it, print its time; its failure stops make.
stage = @printf '== %s\n' "$(1)"; start=$$(date +%s); $(2) || exit $$?; \
	printf '== %s: %s s\n' "$(1)" "$$(($$(date +%s) - start))"

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: setup demo test soak test-core lint disagg conformance matrix clean help

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
	$(call stage,slow tests and tests with vLLM,$(BIN)/python -m pytest -rs --durations=10 -m "(vllm or gpu or slow) and not disagg")

soak: $(SETUP) ## 100,000 random steps of vLLM's scheduler, then a real server under mixed load for 20 minutes
	$(call stage,random steps,$(BIN)/python -m tests.engine.random_soak --steps $(SOAK_STEPS) --json $(SOAK_OUT))
	$(call stage,server under mixed load,$(BIN)/python -m tests.soak.server --minutes $(SOAK_MINUTES) --json $(SERVER_SOAK_OUT))

test-core: $(CORE) ## Run the tests that need no vLLM
	$(call stage,core tests,$(BIN)/python -m pytest -m "not vllm and not slow" $(CORE_TESTS))

lint: $(CORE) ## Check style, formatting, types and the layers
	$(call stage,ruff check,$(BIN)/ruff check)
	$(call stage,ruff format,$(BIN)/ruff format --check)
	$(call stage,mypy,$(BIN)/mypy)
	$(call stage,lint-imports,$(BIN)/lint-imports)

disagg: export DISAGGREGATION_RESULTS := benchmarks/results/disaggregation.json
disagg: $(SETUP) ## Run real pairs of instances through every failure, and vLLM's router (10 minutes)
	$(BIN)/python -m pytest -rs --durations=10 -m disagg tests/disaggregation

conformance: $(SETUP) ## Run vLLM's own scheduler tests on our class (options: CONFORMANCE_ARGS='--quick')
	$(BIN)/python tests/conformance/run.py $(CONFORMANCE_ARGS)

matrix: $(SETUP) ## Run the scheduler tests on every supported version of vLLM
	$(BIN)/python tests/matrix/run.py $(MATRIX_ARGS)

clean: ## Delete what the other targets made, except .venv
	rm -rf build dist .hypothesis .mypy_cache .ruff_cache .import_linter_cache .benchmarks
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.* ## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12
