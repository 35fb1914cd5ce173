# On a fresh machine `make demo` and `make test` do everything, set-up included.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test test-s3fs conformance-fsspec conformance-mooncake quick check lint format selftest rules-page bench-file bench-page-hashes clean

help: ## what there is to make
	@sed -nE 's/^([a-z0-9-]+):.*## (.*)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

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
	@echo "fetching the servers for the tests"
	@tests/get_servers.sh
	@touch $@

test: $(VENV)/.all .servers/.done ## run all tests
	@$(BIN)/python -m pytest --hicache-quick --hicache-report artifacts/conformance

quick: $(VENV)/.all .servers/.done ## run the tests that take less than tens of seconds
	@$(BIN)/python -m pytest -q -m "not slow" --hicache-quick

$(VENV)-s3fs/.done: tests/requirements-s3fs.txt pyproject.toml
	@echo "setting up $(VENV)-s3fs"
	@test -x $(VENV)-s3fs/bin/python || $(PYTHON) -m venv $(VENV)-s3fs
	@$(VENV)-s3fs/bin/python -m pip -q install -e . -r tests/requirements-s3fs.txt
	@touch $@

test-s3fs: $(VENV)-s3fs/.done ## fsspec over s3fs, whose botocore is older than ours: the kit, quick
	@$(VENV)-s3fs/bin/python -m pytest -q --hicache-quick tests/backends/test_fsspec_s3.py

conformance-fsspec: $(VENV)/.all $(VENV)-s3fs/.done ## the whole kit on fsspec, reports in artifacts/
	@$(BIN)/python -m pytest -q tests/backends/test_fsspec_conformance.py \
	  --hicache-report artifacts/fsspec
	@$(VENV)-s3fs/bin/python -m pytest -q tests/backends/test_fsspec_s3.py -k TestS3 \
	  --hicache-report artifacts/fsspec-s3

conformance-mooncake: $(VENV)/.all .servers/.done ## the whole kit on mooncake, reports in artifacts/
	@$(BIN)/python -m pytest -q tests/backends/mooncake_conformance.py \
	  --hicache-report artifacts/mooncake

lint: $(VENV)/.all ## ruff, mypy and pyright
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/pyright

check: lint test ## everything that a change must pass

format: $(VENV)/.all ## let ruff format the code
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

selftest: $(VENV)/.all ## the conformance kit on wrong and right stores: the kill matrix
	@$(BIN)/hicache-conformance selftest

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

bench-page-hashes: $(VENV)/.base ## page hashing against bare hashlib
	@$(BIN)/python benchmarks/page_hashes.py

clean: ## remove what the targets above made
	rm -rf $(VENV) $(VENV)-sglang $(VENV)-s3fs .servers .pytest_cache .mypy_cache .ruff_cache .hypothesis
