# Everything a fresh Linux machine with Python 3.11 or newer needs: `make demo` and `make test`.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
TRITON38 := .triton38/.ready
REQUIREMENTS := requirements/test.txt requirements/triton.txt
VLLM := .vllm/.ready
PYTEST := $(BIN)/python -m pytest -q
ARGS ?=

.PHONY: help demo test test-full lint docs transcripts clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

demo: $(STAMP)  ## write a tiny checkpoint and push real text through the operators and the model, on this machine
	@$(BIN)/deepinfer-sm80 demo $(ARGS)

test: lint $(VLLM) $(TRITON38)  ## lint, types and every test that is not slow
	@$(PYTEST) -m "not slow" $(ARGS)

test-full: lint $(VLLM) $(TRITON38)  ## the same and the slow tests
	@$(PYTEST) $(ARGS)

lint: $(STAMP)  ## ruff and mypy (strict)
	@$(BIN)/ruff check .
	@$(BIN)/mypy

docs: $(STAMP) $(TRITON38)  ## write the generated tables of docs/
	@$(BIN)/deepinfer-sm80 ops --markdown > docs/.operators.new && mv docs/.operators.new docs/operators.md
	@$(BIN)/deepinfer-sm80 env --markdown > docs/.environment.new && mv docs/.environment.new docs/environment.md
	@{ printf '%s\n' '# What every kernel needs' '' 'Written by `make docs` with `deepinfer-sm80 ops --resources`; do not edit. Compiled offline, with the Triton of the' 'proofs and with that of vLLM 0.33.0. Sizes in bytes, registers per thread; `docs/operators.md` says what each operator does.' ''; \
	  $(BIN)/deepinfer-sm80 ops --resources; PYTHONPATH=.triton38 $(BIN)/deepinfer-sm80 ops --resources | tail -n +3; } > docs/.resources.new && mv docs/.resources.new docs/resources.md
	@$(BIN)/python benchmarks/generate_charts.py --refresh >/dev/null
	@$(BIN)/python docs/medians.py
	@$(BIN)/deepinfer-sm80 plan --page > docs/.05.new && mv docs/.05.new docs/05_TOPOLOGY_1M_CONTEXT_ANALYSIS_SM80.md
	@$(BIN)/deepinfer-sm80 sensitivity --page benchmarks/results/nvidia-h200/sensitivity-tiny.json benchmarks/results/nvidia-h200/sensitivity-layer.json > docs/.sensitivity.new && mv docs/.sensitivity.new docs/sensitivity.md
	@$(BIN)/python benchmarks/serving/step.py --report > docs/.step.new && mv docs/.step.new docs/step-times.md
	@$(BIN)/python benchmarks/serving/prove_multi_gpu.py --report --out benchmarks/results/nvidia-h200-x2/prove_multi_gpu > docs/.multi.new && mv docs/.multi.new docs/multi-gpu.md
	@$(BIN)/python docs/readme_blocks.py

transcripts: $(STAMP)  ## record make demo and make test in a clean clone: docs/transcripts
	@$(BIN)/python docs/record_transcripts.py
	@$(BIN)/python docs/readme_blocks.py

clean:  ## remove the virtual environment, caches and build outputs
	@rm -rf $(VENV) .vllm .triton38 build dist .pytest_cache .mypy_cache .ruff_cache src/*.egg-info
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last: an interrupted set-up starts again where pip left off.
$(STAMP): $(REQUIREMENTS) pyproject.toml
	@python=; for name in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	  if command -v "$$name" >/dev/null && "$$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; \
	  then python=$$name; break; fi; done; \
	if [ -z "$$python" ]; then \
	  echo "DeepInfer-SM80 needs Python 3.11 to 3.14, found $$(python3 --version 2>/dev/null || echo 'no python3'): install one and run make again, or name it with make PYTHON=/path/to/python." >&2; exit 1; fi; \
	if ! "$$python" -c 'import venv, ensurepip' 2>/dev/null; then \
	  echo "$$python has no venv module: install it (Debian and Ubuntu: the package python3-venv) and run make again." >&2; exit 1; fi; \
	if ! $(BIN)/python -c '' 2>/dev/null; then echo "Making $(VENV) with $$("$$python" --version)"; "$$python" -m venv --clear $(VENV); fi
	@echo "Installing the pinned packages into $(VENV) (the first time: some minutes; torch is large)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements/test.txt
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -r requirements/triton.txt
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# vLLM's own source, read by the tests of what the plugin overrides; never installed or imported.
$(VLLM): requirements/vllm.txt | $(STAMP)
	@release=$$(sed -n 's/^vllm==//p' $<); \
	if ! ls .vllm/vllm-$$release-*.whl >/dev/null 2>&1; then \
	  echo "Downloading the wheel of vLLM $$release into .vllm, to read its source"; \
	  $(BIN)/python -m pip download -q --disable-pip-version-check --no-deps -d .vllm -r $<; fi
	@touch $@

# The Triton that comes with vLLM 0.33.0's torch: every kernel is compiled with it too, never run.
$(TRITON38): requirements/triton-of-vllm.txt | $(STAMP)
	@echo "Installing Triton 3.8 into .triton38, to compile the kernels with it"
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --upgrade --target .triton38 -r $<
	@touch $@
