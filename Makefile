# Everything a fresh machine with Python 3.11, pip, git and make needs. All targets create and use ./.venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
export FLWR_TELEMETRY_ENABLED = 0
export FLWR_DISABLE_UPDATE_CHECK = 1
export RAY_USAGE_STATS_ENABLED = 0

.PHONY: demo test check slow clean

demo: .venv/installed
	$(BIN)/python -m apps.main.demo

test: .venv/installed-dev
	$(BIN)/python -m pytest -n auto --dist loadgroup

slow: .venv/installed-dev
	$(BIN)/python -m pytest -m slow

check: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=24"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv dist runs
