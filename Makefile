# `make` tells what there is. `make train` and `make test` set up all they need on a fresh Debian or Ubuntu machine.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# What you may set: the Python that makes .venv; options of `make train` and `make bench-peers` (ARGS="--steps 100"); compile jobs; processes of pytest (their
# stores share one disk); seconds for each fuzzer; the folder whose disk `make bench` measures; the folder of the peers' environment; the traces of `make bench-curm`; the commit
# since which `make tidy` looks (default: everything).
PYTHON ?= python3
ARGS ?=
JOBS ?= $(shell nproc)
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 4 ? n : 4)))
FUZZ_SECONDS ?= 60
BENCH_DIR ?= out/bench
PEERS_VENV ?= out/peers
TRACES ?=
SINCE ?=
# What .venv gets is stripped; STRIP= keeps line tables there too, for gdb and perf.
STRIP ?= --strip
SANITIZERS ?= asan-ubsan tsan
# Every C++ test of the product runs under the address and undefined sanitizers. (Those that run bugs on purpose are not built
# there.) The thread sanitizer leaves out tests without threads, and those that take it more than three minutes. `make soak` runs
# what they leave out, the lab among it; but for tests without threads, which the thread sanitizer need not see.
WITHOUT_asan-ubsan := curm_test|curm_kill_test|shards_test
THREADLESS := classes_test|codec_test|optim_test
WITHOUT_tsan := $(THREADLESS)|coded_test|coded_checker_test|replay_test|remote_test|testing_test|volumes_test|$(WITHOUT_asan-ubsan)

# ccache then serves every checkout of this repository from one cache.
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1

# A stamp's name holds the list it was made from and that list's hash: only what changed is set up again.
STAMPS := .venv/stamps
hash = $(firstword $(shell cat $(1) | sha256sum))
system = $(STAMPS)/system-$(1)-$(call hash,tools/packages/$(1).txt)
# tools/packages: run.txt to build and train; test.txt to test; check.txt for tidy and fuzz; bench.txt.
RUN := $(STAMPS)/python-run-$(call hash,requirements-torch.txt requirements.txt)
TEST := $(STAMPS)/python-test-$(call hash,requirements-test.txt requirements-model.txt)
CHECK := $(call system,check)
BENCH := $(call system,bench)
S3_PEERS := out/s3_peers/$(call hash,bench/s3.txt)
LOADER_PEERS := out/loaders_peers/$(call hash,bench/loaders.txt)
PEERS_STAMP := $(PEERS_VENV)/stamps/peers-$(call hash,requirements-torch.txt bench/peers/requirements.txt bench/peers/packages.txt)
RELEASE := build/release

.NOTPARALLEL:  # compilers and tests take the cores themselves (JOBS)
.PHONY: help setup build build-tests train test soak bench bench-peers bench-s3 bench-gpu bench-loaders bench-coded bench-curm bench-checkpoint sanitize $(SANITIZERS:%=sanitize-%) format tidy fuzz clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(RUN) $(TEST)  ## all that `make train` and `make test` need: packages, .venv with torch

build: $(RELEASE)/build.ninja  ## the stoker command and the Python extension, into .venv and python/stoker
	@cmake --build --preset release -j $(JOBS) --target stoker_cli _core
	@cmake --install $(RELEASE) --prefix .venv --component stoker $(STRIP) >/dev/null

build-tests: $(RELEASE)/with-tests build
	@cmake --build --preset release -j $(JOBS)

train: build  ## train a language model that does not fit its memory budget, out to out/train
	.venv/bin/stoker train $(ARGS)

test: build-tests  ## the C++ tests, then the Python tests
	ctest --preset release -j $(JOBS) --timeout 600
	.venv/bin/python -m pytest -q -n $(WORKERS) --dist worksteal tests

soak: build-tests  ## the long forms: replayed crashes, kill -9 at random moments, all under the sanitizers
	$(RELEASE)/tests/crash/stoker_replay_test --soak
	$(RELEASE)/tests/crash/stoker_coded_checker_test --soak
	$(RELEASE)/tests/crash/stoker_curm_kill_test --soak
	.venv/bin/python -m pytest -q -m soak tests
	tools/sanitize.sh asan-ubsan $(JOBS) none 3600
	tools/sanitize.sh tsan $(JOBS) "$(THREADLESS)" 3600

bench: build-tests $(BENCH)  ## stoker bench io (beside busy cores too), plain files, codec, offload and plan, kernels; JSON to bench/results
	mkdir -p $(BENCH_DIR) bench/results
	.venv/bin/stoker bench io --json $(BENCH_DIR) > bench/results/io.json
	.venv/bin/python bench/beside.py --dir $(BENCH_DIR)
	.venv/bin/python bench/dir.py --dir $(BENCH_DIR) --json bench/results/dir.json
	.venv/bin/stoker bench codec --json > bench/results/codec.json
	.venv/bin/stoker bench offload --dir $(BENCH_DIR) --json > bench/results/offload.json
	.venv/bin/stoker bench plan --dir $(BENCH_DIR) --json > bench/results/plan.json
	$(RELEASE)/bench/micro/stoker_optim_bench --benchmark_out=bench/results/optim.json --benchmark_out_format=json

bench-peers: build $(PEERS_STAMP)  ## Stoker beside DeepSpeed, DeepNVMe and fio; JSON to bench/results (ARGS="--quick", ARGS="--help")
	.venv/bin/python bench/peers/compare.py --peers $(PEERS_VENV)/bin/python --dir $(BENCH_DIR)/peers --json bench/results/peers.json $(ARGS)

bench-s3: build $(S3_PEERS) $(TEST)  ## an s3: store beside boto3, obstore, s3torchconnector and curl on a Ceph RGW and nginx; JSON to bench/results (ARGS="--large 256")
	.venv/bin/python bench/s3.py --peers out/s3_peers/bin/python $(ARGS)

# Some of the peers need torch: the one in .venv.
$(S3_PEERS) $(LOADER_PEERS):
	.venv/bin/python -m venv $(@D)
	paths='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	  .venv/bin/python -c "$$paths" > $$($(@D)/bin/python -c "$$paths")/torch.pth
	$(@D)/bin/pip install -q -r bench/$(patsubst %_peers,%,$(notdir $(@D))).txt
	touch $@
$(S3_PEERS) $(LOADER_PEERS): | $(RUN)

bench-checkpoint: build $(BENCH)  ## checkpoints beside torch.save, safetensors and DCP; JSON to bench/results (ARGS="--rounds 3")
	.venv/bin/python bench/checkpoint.py --where $(BENCH_DIR)/checkpoint $(ARGS)

bench-coded: build-tests  ## a coded store beside plain files, and traces on both; JSON to bench/results (ARGS="--rounds 5")
	.venv/bin/python bench/coded.py --dir $(BENCH_DIR) --json bench/results/coded.json $(ARGS)

bench-gpu: build  ## a model on a GPU: copies, steps, batches, checkpoints; JSON to bench/results (ARGS="--parts copies,steps")
	.venv/bin/python bench/gpu.py --dir $(BENCH_DIR)/gpu --json bench/results/gpu.json $(ARGS)

bench-loaders: build $(LOADER_PEERS) $(BENCH) $(TEST)  ## stoker.data beside DataLoader, WebDataset, MDS, LitData, SPDL; JSON to bench/results (ARGS="--gib 1")
	.venv/bin/python bench/loaders.py --peers out/loaders_peers/bin/python --dir $(BENCH_DIR)/loaders $(ARGS)

bench-curm: $(RELEASE)/with-tests build  ## update schemes on the traces of TRACES="A.csv ..."; JSON, plot and the tables of docs/numbers.md
	.venv/bin/python bench/curm.py $(TRACES)

sanitize: $(SANITIZERS:%=sanitize-%)  ## the C++ tests under address, undefined and thread sanitizers

$(SANITIZERS:%=sanitize-%): sanitize-%: $(TEST)
	tools/sanitize.sh $* $(JOBS) "$(WITHOUT_$*)"

format: $(TEST)  ## lay out every source: clang-format, ruff format
	tools/format.sh

tidy: $(RELEASE)/with-tests build $(CHECK)  ## layout, clang-tidy over the C++ sources (SINCE=main: what changed since), hygiene tests
	tools/tidy.sh $(RELEASE) $(JOBS) $(SINCE)
	.venv/bin/python -m pytest -q tests/tidy_test.py

fuzz: $(RUN) $(CHECK)  ## every fuzzer for FUZZ_SECONDS=60
	tools/fuzz.sh $(FUZZ_SECONDS) $(JOBS)

clean:  ## forget what was built (.venv stays; remove it yourself)
	rm -rf build python/stoker/_core*.so

$(STAMPS)/system-%:
	tools/setup_system.sh tools/packages/$(firstword $(subst -, ,$*)).txt
	mkdir -p $(@D)
	touch $@

$(RUN): | $(call system,run)
$(TEST): | $(call system,test) $(RUN)
$(STAMPS)/python-%:
	tools/setup_python.sh $(firstword $(subst -, ,$*)) $(PYTHON)
	mkdir -p $(@D)
	touch $@

$(PEERS_STAMP): | $(RUN)
	tools/setup_peers.sh $(PEERS_VENV)
	mkdir -p $(@D)
	touch $@

# What trains is configured first; the tests and the lab join it where they are asked for.
$(RELEASE)/build.ninja: | $(RUN)
	cmake --preset release -DSTOKER_TESTS=OFF

$(RELEASE)/with-tests: | $(TEST) $(RELEASE)/build.ninja
	cmake --preset release -DSTOKER_TESTS=ON
	touch $@
