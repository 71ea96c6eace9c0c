# Every target does its own set-up in .venv; state lives in .daybreak and nowhere else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
export DO_NOT_TRACK := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false

.PHONY: nightly up down test check bench clean-state setup
.DEFAULT_GOAL := nightly

# torch first and by itself: its pinned release has a CPU build, and a range would take gigabytes of CUDA.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Daybreak needs Python 3.11 or newer: make PYTHON=python3.11 ..."; exit 2; }
	@echo "Setting up $(VENV), once: torch (about half a minute), then the rest (a minute or two)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check "$$(sed -n 's/^  "\(torch==[^"]*\)",$$/\1/p' pyproject.toml)"
	$(BIN)/pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@

setup: $(INSTALLED)

nightly: $(INSTALLED)
	$(BIN)/daybreak nightly --config conf/world.toml --next 3 || test $$? -eq 3
	$(BIN)/daybreak status --config conf/world.toml

# For a browser, on this machine: make up [CONFIG=F] [PREFECT_PORT=N] [MLFLOW_PORT=N]
CONFIG ?= conf/world.toml

up: $(INSTALLED)
	@$(BIN)/daybreak up --config $(CONFIG) $(if $(PREFECT_PORT),--prefect-port $(PREFECT_PORT)) $(if $(MLFLOW_PORT),--mlflow-port $(MLFLOW_PORT))

down: $(INSTALLED)
	@$(BIN)/daybreak down --config $(CONFIG)

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# All of them take hours; BENCH=data BENCH_FLAGS=--quick shows that they run. Exit 1 if a figure misses its goal.
BENCH ?= data cases quality training gate faults
BENCH_FLAGS ?=

bench: $(INSTALLED)
	@missed=0; for part in $(BENCH); do $(BIN)/python -m benchmarks.$$part $(BENCH_FLAGS) || missed=1; done; exit $$missed

check: $(INSTALLED)
	$(BIN)/python -m kernels.check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean-state:
	@! ls .daybreak/*/servers/servers.json 2>/dev/null || { echo "servers are up on this state: make down (with its CONFIG) first"; exit 2; }
	rm -rf .daybreak
