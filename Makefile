# On a fresh machine `make demo` and `make test` do everything, set-up included.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test quick check lint format selftest rules-page bench-file bench-hf3fs bench-page-hashes \
	conformance-hf3fs clean

help: ## what there is to make
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

$(VENV)/.base: pyproject.toml constraints.txt
	@echo "setting up $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install 'pip>=25.1' && $(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.all: $(VENV)/.base
	@echo "installing every extra and the development tools"
	@$(PIP) install -c constraints.txt -e '.[all]' --group dev
	@touch $@

demo: $(VENV)/.base ## replay conversations over the file backend, every byte checked
	@scratch=$$(mktemp -d) && trap "rm -r $$scratch" EXIT && \
	$(BIN)/hicache replay --hicache-storage-backend file \
	  --hicache-storage-backend-extra-config "{\"path\": \"$$scratch\"}"

.servers/.done: tests/get_servers.sh
	@echo "fetching redis and valkey for the tests"
	@tests/get_servers.sh
	@touch $@

test: $(VENV)/.all .servers/.done ## run all tests
	@$(BIN)/python -m pytest

quick: $(VENV)/.all .servers/.done ## run the tests that take less than tens of seconds
	@$(BIN)/python -m pytest -q -m 'not slow'

lint: $(VENV)/.all ## ruff, mypy and pyright
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/pyright

check: lint test ## everything that a change must pass

format: $(VENV)/.all ## let ruff format the code
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

selftest: $(VENV)/.all ## the conformance kit on wrong and right stores: the kill matrix
	@$(BIN)/hicache-conformance selftest

conformance-hf3fs: $(VENV)/.all .servers/.done ## the whole kit on hf3fs, by both indexes; reports in artifacts/
	@$(BIN)/python -m pytest tests/backends/hf3fs_stores.py -q --hicache-report artifacts/hf3fs

rules-page: $(VENV)/.all ## write docs/rules.md from the rules, the checks and the controls
	@$(BIN)/hicache-conformance rules > docs/rules.md

$(VENV)-sglang/.done: benchmarks/requirements-sglang.txt pyproject.toml constraints.txt
	@echo "setting up $(VENV)-sglang"
	@test -x $(VENV)-sglang/bin/python || $(PYTHON) -m venv $(VENV)-sglang
	@$(VENV)-sglang/bin/python -m pip -q install -c constraints.txt -e '.[torch]'
	@$(VENV)-sglang/bin/python -m pip -q install --no-deps -r benchmarks/requirements-sglang.txt
	@touch $@

bench-file: $(VENV)-sglang/.done ## the file backend against the machine and SGLang's own
	@$(VENV)-sglang/bin/python benchmarks/file.py

bench-hf3fs: $(VENV)-sglang/.done ## the hf3fs backend against the disk and SGLang's own
	@$(VENV)-sglang/bin/python benchmarks/hf3fs.py

bench-page-hashes: $(VENV)/.base ## page hashing against bare hashlib
	@$(BIN)/python benchmarks/page_hashes.py

clean: ## remove what the targets above made
	rm -rf $(VENV) $(VENV)-sglang .servers .pytest_cache .mypy_cache .ruff_cache .hypothesis
