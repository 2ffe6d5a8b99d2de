# The commands of daily work. Each makes what it needs first, from a bare clone on.
#
#   make demo    train a small GPT on two processes, with curves         make lint      style and types
#   make test    every test there is                                      make format    put the style right
#   make bench   cost and memory beside torch's own FSDP2                 make sanitize  under ASan and UBSan
#   make parity  the whole grid beside torch's own FSDP2                make wheels   into dist/
#   make test-fast      what one wants after a change: the core, one process, the behaviour scenarios, some parity
#   make gpu     ten minutes on a GPU: is it right, and fast, there?
#   make accelerator    everything on the simulated accelerator, and its figures
#   make test-clients   accelerate, transformers, Lightning, ... unchanged, on torch's FSDP2 and on ours
#
# VENV=dir uses (and completes) an environment that exists; the default is .venv, made on first use.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

TORCH ?= torch==2.13.0
VENV ?= .venv
PYTHON ?= python3
# NVRTC libraries for cuda-check: pip has them for every CUDA release (nvidia-cuda-nvrtc-cu12, ...).
NVRTCS ?=
# Those of cuda-check: the one on the path, and toolkits of other releases.
NVCCS ?= $(shell command -v nvcc) $(wildcard /usr/local/cuda-12*/bin/nvcc /opt/cuda-12*/bin/nvcc)
DEMO_OUT ?= demo_out
DEMO_ARGS ?=
# BENCH_ARGS=--quick tries the machinery on tiny models.
BENCH_ARGS ?=
# Tests that share an expensive fixture are one group, for one worker.
PYTEST_ARGS ?= -n 3 --dist loadgroup
CLIENTS_VENV ?= .venv-clients
WHEELS ?=
WHEEL_PYTHONS ?= $(if $(WHEELS),,$(PY))
CLIENTS_ARGS ?=
GPU_ARGS ?=
# What runs under the sanitizers: fast, in this process, and through every C function.
SANITIZE_TESTS ?= tests/unit
# What measures: benchmarks in processes of their own, and memory that a pool keeps, as it does not here.
NOT_SANITIZED := test_bench forecast_is_what_is_measured what_buffers_are_kept
empty :=
space := $(empty) $(empty)
ASSERT_TESTS ?= tests/unit/test_private_api.py tests/unit/test_buckets.py tests/unit/test_reentry.py \
	tests/unit/test_uninitialized_objects.py tests/unit/test_replaced_shards.py tests/unit/test_process_groups.py \
	tests/distributed/test_behaviour_training.py tests/distributed/test_behaviour_backwards.py \
	tests/distributed/test_behaviour_groups.py tests/distributed/test_behaviour_replicate.py
# Of tests/unit: what starts interpreters of its own, and forecasts.
NOT_FAST := bench check install mutations plan typing
# What pyproject.toml has as pythonpath, without the root.
TESTS_PATH := tests/harness tests/distributed/workers tests/parity/workers tests/faults/workers tests/accelerator/workers

PY := $(VENV)/bin/python
ENV_STAMP := $(VENV)/.fsdp_c-env
# An editable install points at one checkout, so its stamp names the checkout.
INSTALL_STAMP := $(VENV)/.fsdp_c-installed$(subst /,-,$(CURDIR))
CLIENTS_PY := $(CLIENTS_VENV)/bin/python
CLIENTS_STAMP := $(CLIENTS_VENV)/.fsdp_c-clients
SANITIZE_LIB := build/sanitize-lib
ASSERT_LIB := build/assert-lib
# What torch's own FSDP2 did in the behaviour scenarios: `make test` runs them on two builds of ours.
STOCK_OUTCOMES := $(CURDIR)/build/stock-outcomes
C_FILES = $(shell find csrc tests/c tests/accelerator/device -name '*.[ch]' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

# This checkout's fsdp_c, whichever one the environment was installed for; child processes too.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export MAX_JOBS ?= 2

.PHONY: help env build demo test test-fast test-c test-assert test-clients accelerator parity lint lint-ruff lint-mypy \
	lint-c format wheels sanitize bench cuda-check gpu clean

help:
	@sed -n '3,10s/^# *//p' Makefile

# ---- environment and build --------------------------------------------------------------------------------

# torch is pinned, and first: the rest must not choose another one.
$(ENV_STAMP): Makefile pyproject.toml
	@[ -x $(PY) ] || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q '$(TORCH)' numpy 'setuptools>=77' wheel ninja
	@touch $@

$(INSTALL_STAMP): $(ENV_STAMP)
	$(PY) -m pip install -q --no-build-isolation '$(TORCH)' -e '.[test,demo,lint]'
	@touch $@

env: $(INSTALL_STAMP)

# setup.py knows what is old; without a change this takes a second. The log is shown where something is wrong.
build: env
	@mkdir -p build
	@$(PY) setup.py build_ext --inplace > build/log.txt 2>&1 || { cat build/log.txt; exit 1; }
	@echo "built $$(ls fsdp_c/_C.*.so)"

# ---- demo -------------------------------------------------------------------------------------------------

demo: build
	$(PY) -m torch.distributed.run --nproc-per-node 2 examples/train_gpt.py --out $(DEMO_OUT) $(DEMO_ARGS)
	@echo; echo "The loss curve and the time of each step:"; ls $(abspath $(DEMO_OUT))/*.png

# ---- tests ------------------------------------------------------------------------------------------------

test: export FSDP_C_STOCK_OUTCOMES := $(STOCK_OUTCOMES)
test: build
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target test-c test-assert
	$(PY) -m pytest $(PYTEST_ARGS) tests

# What goes through most transitions of the core, with the assertions of csrc/core on: see fc_group_check.
test-assert: build
	@rm -rf $(ASSERT_LIB) $(STOCK_OUTCOMES)
	@FSDP_C_ASSERT=1 $(PY) setup.py build --build-lib $(ASSERT_LIB) > build/log-assert.txt 2>&1 \
		|| { cat build/log-assert.txt; exit 1; }
	cd $(ASSERT_LIB) && export PYTHONPATH=$(CURDIR)/$(ASSERT_LIB) && \
	$(abspath $(PY)) -c "from fsdp_c import _C; assert _C._testing.assertions" && \
	$(abspath $(PY)) -m pytest $(PYTEST_ARGS) -p no:cacheprovider --rootdir $(CURDIR) -c $(CURDIR)/pyproject.toml \
		-o pythonpath="$(TESTS_PATH)" $(ASSERT_TESTS:%=$(CURDIR)/%)

# Without the sweeps over faults, four ranks, most of the grid, and what starts interpreters of its own: the example,
# the commands, the drop-in.
test-fast: build
	@$(MAKE) -C tests/c fast
	FSDP_C_PARITY_COUNT=20 FSDP_C_PARITY_LAUNCHES=gloo2 $(PY) -m pytest $(PYTEST_ARGS) \
		$(NOT_FAST:%=--ignore=tests/unit/test_%.py) tests/unit \
		tests/distributed/test_behaviour_*.py tests/parity/test_parity.py -k 'not smaller_mesh and not on_four and not cuda'

# The whole grid of parity, 600 settings in a quarter of an hour, and all scripts; `make test` runs 260 settings and the
# cheap scripts.
parity: build
	FSDP_C_PARITY_COUNT=600 FSDP_C_PARITY_WHOLE=1 $(PY) -m pytest $(PYTEST_ARGS) tests/parity

# Everything on the simulated accelerator; `make test` runs a fifth of the grid on four ranks. Then its figures.
accelerator: build
	FSDP_C_ACCELERATOR_WHOLE=1 $(PY) -m pytest $(PYTEST_ARGS) tests/accelerator
	PYTHONPATH=$(PYTHONPATH):tests/harness:tests/parity/workers $(PY) tests/accelerator/workers/figures.py

test-c:
	@$(MAKE) -C tests/c

# Real libraries, each case once on torch's FSDP2 and once with FSDP_C=1. They have an environment of their own,
# with the same torch as the extension was built against; nothing of fsdp_c is installed there, the tests lay out
# its entry point themselves. CLIENTS_ARGS="-k peft" picks.
test-clients: build $(CLIENTS_STAMP)
	FSDP_C_TEST_CLIENTS=1 $(CLIENTS_PY) -m pytest --durations=10 $(CLIENTS_ARGS) tests/clients

$(CLIENTS_STAMP): tests/clients/requirements.txt
	@[ -x $(CLIENTS_PY) ] || $(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_PY) -m pip install -q '$(TORCH)' numpy 'setuptools>=77'
	$(CLIENTS_PY) -m pip install -q '$(TORCH)' -r tests/clients/requirements.txt
	@touch $@

# The extension and the package under AddressSanitizer and UndefinedBehaviorSanitizer, beside the normal build
# and not in its place. Python itself is not instrumented: libasan comes first by LD_PRELOAD (with libstdc++,
# whose exceptions it must find at start), and leaks are not looked for, since CPython and torch keep much to
# the end on purpose. -P and a `pythonpath` without the root keep this directory's own fsdp_c out.
sanitize: env
	@mkdir -p build && rm -rf $(SANITIZE_LIB)
	@FSDP_C_SANITIZE=1 $(PY) setup.py build --build-lib $(SANITIZE_LIB) > build/log.txt 2>&1 \
		|| { cat build/log.txt; exit 1; }
	PYTHONPATH=$(CURDIR)/$(SANITIZE_LIB) PYTHONSAFEPATH=1 PYTHONMALLOC=malloc FSDP_C_SANITIZE=1 \
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0 UBSAN_OPTIONS=print_stacktrace=1 \
	$(PY) -m pytest -p no:cacheprovider -o pythonpath="$(TESTS_PATH)" $(SANITIZE_TESTS) \
		-k 'not $(subst $(space), and not ,$(NOT_SANITIZED))'

# With a CPU-only torch the CUDA kernels are not part of the build: there is no CUDA runtime to link with. They
# must compile all the same wherever nvcc is, or they would rot between the visits to a machine with a GPU. Every
# nvcc that is found compiles them for the architectures that a build would choose; NVRTC compiles the device side.
cuda-check:
	@if [ -z "$(NVCCS)" ]; then echo "cuda-check: skipped, nvcc is not found"; fi
	@mkdir -p build/cuda-check
	@for nvcc in $(NVCCS); do \
		$$nvcc -std=c++17 -O2 $$($(PYTHON) cuda_build.py $$nvcc) -Icsrc -Xcompiler -Wall,-Wextra \
			--Werror all-warnings -c csrc/kernels/kernels_cuda.cu -o build/cuda-check/kernels_cuda.o && \
		echo "cuda-check: kernels_cuda.cu compiles with $$nvcc" || exit 1; done
	@$(PYTHON) tests/harness/nvrtc_check.py $(NVRTCS)

# One visit to a GPU (GPU_ARGS="--device sim" for the simulated one): a line for each step in build/gpu/out/summary.txt.
gpu:
	PYTHON=$$(command -v $(PY) || command -v $(PYTHON)) tests/gpu/visit.sh $(GPU_ARGS)

# ---- style ------------------------------------------------------------------------------------------------

lint: lint-ruff lint-mypy lint-c

lint-ruff: env
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

lint-mypy: env
	$(PY) -m mypy

lint-c: env
	@$(VENV)/bin/clang-format --dry-run -Werror $(C_FILES)
	@echo "clang-format: $(words $(C_FILES)) files are in style"
	@$(PY) -m pytest -q -p no:cacheprovider tests/unit/test_line_length.py

format: env
	$(PY) -m ruff check --fix-only --quiet .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(C_FILES)

# ---- wheels -----------------------------------------------------------------------------------------------

# For the torch of $(VENV); or for that of each Python of another environment: make wheels WHEEL_PYTHONS="a/bin/python
# b/bin/python"; or for releases, each in an environment that is made for it: make wheels WHEELS="2.13.0 2.14.1", where
# pip may fetch gigabytes with a CUDA build of torch. Nothing is installed into environments that were there. With nvcc
# and a CUDA build of torch the wheels have the CUDA kernels.
wheels: $(if $(filter file,$(origin WHEEL_PYTHONS)),$(if $(WHEELS),,env))
	@for release in $(WHEELS); do \
		python=build/venv-torch-$$release/bin/python; \
		[ -x $$python ] || $(PYTHON) -m venv build/venv-torch-$$release; \
		echo "installing torch $$release, which may be large"; \
		$$python -m pip install -q torch==$$release numpy; \
	done
	@for python in $(WHEEL_PYTHONS) $(WHEELS:%=build/venv-torch-%/bin/python); do \
		echo "building for torch $$($$python -c 'import torch; print(torch.__version__)'), some minutes"; \
		$$python -m pip wheel -q --no-deps -w dist .; \
	done
	@ls dist/*.whl

# ---- the rest ---------------------------------------------------------------------------------------------

bench: build
	$(PY) benchmarks/bench.py $(BENCH_ARGS)

# The environment stays; it is slow to make and `rm -rf .venv` is easy to say.
clean:
	rm -rf build dist $(DEMO_OUT) fsdp_c/_C.*.so *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +
