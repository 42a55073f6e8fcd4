# Each target creates what it needs, so `make demo` or `make test` can be the first command in a fresh clone.
# Needed beforehand: Python >= 3.10 with venv, make and a C++17 compiler.
#
#   PYTHON=python3.12                 the interpreter that .venv is made from
#   TORCH=torch==2.12.0               the torch that goes into .venv
#   JOBS=8                            test processes
#   SLOW_MINUTES=60                   how long after its start a run of the tests may still begin slow ones
#   CASES=10000 SEED=1                how many random programs `make fuzz` runs, and the seed of the first
#   WARM=14                           how many processes compile ahead for `make growth`
#   TE_COMPILE_PYTHON=/path/python3   use this interpreter and its packages as they are, for a GPU machine that has its
#                                     own torch. Nothing is installed; `make install` builds csrc/ into the checkout.

PYTHON ?= python3
TORCH ?= torch==2.13.0
JOBS ?= 2
SLOW_MINUTES ?= 12
CASES ?= 2000
EXTRAS ?= hf,rich,plot,test,bench,dev
BENCH_OUT ?= runs/bench
WARM ?= $(shell nproc 2>/dev/null || echo 1)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

unexport TE_COMPILE_PYTHON  # the package reads TE_COMPILE_* as its options, and this is none
ifdef TE_COMPILE_PYTHON
RUN := $(TE_COMPILE_PYTHON)
READY :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
RUN := .venv/bin/python
READY := .venv/package.stamp
endif

# Test processes share the cores: one thread each, and no compile workers beside them.
TEST_ENV := OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 TOKENIZERS_PARALLELISM=false
PYTEST := $(TEST_ENV) $(RUN) -m pytest -q -n $(JOBS) --dist worksteal --timeout 900

.PHONY: help demo test lint zoo fuzz bench growth sanitize install clean
.DEFAULT_GOAL := help

help:  ## Show this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | awk -F'\t' '{ printf "make %-9s %s\n", $$1, $$2 }'

# A busy machine stalls spinning threads: passive waiting makes the CPU run up to ten times faster there.
demo: $(READY)  ## Train a small GPT-2 and a small Llama in high precision and in FP8, side by side (under 5 minutes)
	OMP_WAIT_POLICY=passive $(RUN) -m benchmarks.demo $(ARGS)

test: $(READY)  ## Run the tests; a machine too busy for the slow ones leaves some out (SLOW_MINUTES)
	$(PYTEST) tests --slow-minutes $(SLOW_MINUTES) $(ARGS)

zoo: $(READY)  ## Examine small models of 91 architectures in six settings each and write docs/zoo.md
	$(TEST_ENV) $(RUN) -m tests.zoo --jobs $(JOBS) --out docs/zoo.md $(ARGS)

fuzz: $(READY)  ## Run random programs (CASES=2000, SEED=...) in FP8 and hold them against eager; for nights
	$(TEST_ENV) $(RUN) -m tests.fuzz --cases $(CASES) $(if $(SEED),--seed $(SEED)) $(ARGS)

lint: $(READY)  ## Run ruff and mypy
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

bench: $(READY)  ## Measure a layer, whole models, the kernels and compile time; rows and tables go to runs/bench
	mkdir -p $(BENCH_OUT)
	@failed=; \
	$(RUN) -m benchmarks.layer --out $(BENCH_OUT)/layer.jsonl || failed="$$failed layer"; \
	$(RUN) -m benchmarks.models --out $(BENCH_OUT)/models.jsonl || failed="$$failed models"; \
	$(RUN) -m benchmarks.kernels --out $(BENCH_OUT)/kernels.jsonl || failed="$$failed kernels"; \
	$(RUN) -m benchmarks.compile_time --out $(BENCH_OUT)/compile_time.jsonl || failed="$$failed compile_time"; \
	$(RUN) -m benchmarks.report $(BENCH_OUT); \
	test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

growth: $(READY)  ## Measure the gain over width and tokens (a GPU machine); a table and a plot go to runs/bench
	mkdir -p $(BENCH_OUT)
	$(RUN) -m benchmarks.growth --warm $(WARM) --out $(BENCH_OUT)/growth.jsonl $(ARGS)

sanitize: $(READY)  ## Run the kernels' tests under compute-sanitizer: memcheck and racecheck (a GPU machine)
	$(RUN) -m benchmarks.sanitize $(ARGS)

install: $(READY)  ## Make .venv with the package in it, or build csrc/ for TE_COMPILE_PYTHON
ifdef TE_COMPILE_PYTHON
	PYTHON="$(TE_COMPILE_PYTHON)" csrc/build.sh
endif

clean:  ## Remove the environment and everything that was built
	rm -rf .venv build dist runs .pytest_cache .ruff_cache .mypy_cache

# torch comes first and alone, so that what needs "a torch" later finds this one and pip fetches no other.
.venv/torch.stamp:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "te_compile needs Python 3.10 or newer")'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -q "pip>=22"
	.venv/bin/python -m pip install -q "$(TORCH)"
	@touch $@

# The build runs in .venv itself: no second environment to download, and the same tools each time.
.venv/package.stamp: .venv/torch.stamp pyproject.toml $(wildcard CMakeLists.txt) $(shell find csrc -type f)
	.venv/bin/python -m pip install -q scikit-build-core pybind11 cmake ninja
	.venv/bin/python -m pip install -q --no-build-isolation -e ".[$(EXTRAS)]" "$(TORCH)"
	@touch $@
