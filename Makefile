# Two commands do everything: `make demo` shows it, `make test` proves it. Both build .venv first.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Many tests mostly wait for processes: pytest-xdist deals their files out to two.
SIDE_BY_SIDE := -n 2 --dist loadfile

.PHONY: setup demo test test-slow test-interop test-soak bench check format clean

setup: $(STAMP)

# An environment that is there is kept, with whatever its user has installed into it; `make clean` removes it.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test,check]'
	touch $@

demo: setup
	$(BIN)/python -m scripts.demo

test: setup
	$(BIN)/python -m pytest -m "not slow" $(SIDE_BY_SIDE)

# Every topology against every other, and what else takes minutes of many processes.
test-slow: setup
	$(BIN)/python -m pytest -m "slow and not soak" $(SIDE_BY_SIDE)

# Checkpoints of other programs, made by these programs themselves; one more of them is installed for it. The tests
# compile its extension into $(VENV)/build, before any of their deadlines starts.
test-interop: setup
	PIP_DISABLE_PIP_VERSION_CHECK=1 DS_ACCELERATOR=cpu $(BIN)/pip install --quiet --constraint constraints.txt --editable '.[interop]'
	$(BIN)/python -m pytest tests/interop

# What takes minutes each.
test-soak: setup
	$(BIN)/python -m pytest -m soak

# Some minutes, 8 GB of memory and 10 GB of disk: best with nothing beside it.
bench: setup
	$(BIN)/python -m scripts.bench.checkpoint

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info
