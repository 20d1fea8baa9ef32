# make grpo    set up, then train a tiny model by asynchronous GRPO         make smollm2  the same with SmolLM2-135M
# make test    set up, then run the whole test suite                        make check    lint, format, types
# make fuzz    10,000 fuzzed schedules of the buffer                       make site     docs/ as a site
#
# make grpo ARGS="trainer.optimizer.lr=1e-4 seed=1"      overrides
# make setup EXTRA=cuda                                  the CUDA packages instead of the CPU ones

VENV ?= .venv
EXTRA ?= cpu
PYTHON ?=
CONFIG ?= configs/grpo_tiny.yaml
ARGS ?=
TESTS ?=

BIN := $(VENV)/bin
export PYTHON
unexport PYTHONDONTWRITEBYTECODE # a second start would compile the engines' modules again

.DEFAULT_GOAL := help
.PHONY: help setup grpo smollm2 test fuzz check format site reference lock clean

help: ## show the targets
	@sed -n 's/^\([a-z0-9]*\):.*## \(.*\)/  make \1\t\2/p' Makefile

setup: ## make .venv with the pinned packages (nothing is redone when it is up to date)
	@tools/setup.sh $(VENV) $(EXTRA)

grpo: setup ## train: CONFIG=configs/grpo_tiny.yaml, overrides in ARGS
	@$(BIN)/python apps/grpo_main.py --config $(CONFIG) $(ARGS)

smollm2: setup ## train SmolLM2-135M on chain_sum
	@$(BIN)/python apps/grpo_main.py --config configs/grpo_smollm2.yaml $(ARGS)

test: setup ## run the whole test suite; TESTS="tests/buffer -k ledger" for a part
	@$(BIN)/python -m pytest $(if $(TESTS),$(TESTS),-n 2 --dist loadfile --no-loadscope-reorder)

fuzz: setup ## run 10,000 fuzzed schedules of buffer and ledger, 2,000 of the loop (minutes)
	@$(BIN)/python -m pytest tests/buffer/test_fuzz.py tests/test_loop_fuzz.py --hypothesis-profile=fuzz --timeout=1800

check: setup ## ruff check, ruff format --check, mypy
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

format: setup ## ruff: fix what can be fixed, then format
	@$(BIN)/ruff check --fix-only . && $(BIN)/ruff format .

site: setup ## build the documentation as a site: out/site/index.html
	@$(BIN)/python -m sphinx -W --keep-going -q -d out/doctrees docs out/site
	@echo "the documentation is in out/site/index.html"

reference: setup ## rewrite the pages of docs/ that list all settings and all commands
	@$(BIN)/python tools/config_reference.py
	@$(BIN)/python tools/cli_reference.py

lock: ## rewrite requirements/cpu.txt (or EXTRA=cuda) from pyproject.toml and the overrides
	@test -x $(BIN)/uv || { echo "make lock needs an environment: run make setup first" >&2; exit 1; }
	@tools/lock.sh $(BIN) $(EXTRA)

clean: ## remove .venv, the site and the caches
	@rm -rf $(VENV) out/site out/doctrees .pytest_cache .ruff_cache .mypy_cache *.egg-info
