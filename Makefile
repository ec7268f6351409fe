# `make demo` and `make test` do all the set-up on a bare Debian 12 or Ubuntu 24.04. The second time they are quick.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := env PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 $(BIN)/pip install -c constraints.txt
APT     = $$sudo env DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=a apt-get -qq -o DPkg::Lock::Timeout=300
NATIVE := $(shell find csrc -type f) CMakeLists.txt
BEGAN  := $(shell date +%s)
SHELL  := /bin/bash
.SHELLFLAGS := -o pipefail -c
# Show large downloads, errors and warnings from pip's output, without warnings of the machine's own configuration.
DOWNLOADS = 2> >(grep -vE '^WARNING: (Location|Running pip as|The directory)' >&2) | sed -un 's/^ *Downloading \(.* ([0-9.]* [MG]B)\)$$/  downloading \1/p'
# Let Python write .pyc files: otherwise every process that a test starts compiles infinity again, which takes a second.
unexport PYTHONDONTWRITEBYTECODE
# One process of tests for each core; torch has one thread in each process (tests/conftest.py).
PYTEST := $(BIN)/pytest -q -n logical --maxprocesses 8 --dist worksteal -m "not gpu"
SHARE  ?= all
SEED   ?= 0
WHOLE   = INFINITY_TESTS=$(SHARE) INFINITY_SEED=$(SEED) $(PYTEST) --hypothesis-seed=$(SEED) -rP --timeout 3600 -m "not gpu and not simulated"
# Files whose tests draw examples, beside those of the long forms that name them.
DRAWING = $(shell grep -rlE 'sampling|hypothesis' tests --include='test_*.py' | \
            grep -vE 'tests/(crash|stress|fuzz|hostile|docs|sim|unchanged|integrations)/|test_(corruption|overlap|faults|sampling)')
# Their long tests are part of the long forms below that name them.
APART   = tests/crash tests/stress tests/fuzz tests/hostile tests/docs tests/sim $(UNCHANGED) tests/runtime/test_corruption.py \
          tests/runtime/test_overlap.py tests/runtime/test_faults.py

UNCHANGED  = tests/unchanged tests/integrations tests/cli/test_trainer.py tests/checkpoint/test_save_adapters.py
NEWEST    := .venv-newest
NEWEST_PIP = PIP_DISABLE_PIP_VERSION_CHECK=1 $(NEWEST)/bin/pip install -q -c $(NEWEST)/constraints.txt

# Older sets of the same libraries, each named by its transformers. SEED draws one, SET=5.16 names one. The libraries of a set
# lie in a folder that comes before those of $(VENV), which has everything else.
SETS      := $(sort $(basename $(notdir $(wildcard constraints/*.txt))))
SET       ?= $(and $(SETS),$(word $(shell echo $$(( $(SEED) % $(words $(SETS)) + 1 ))),$(SETS)))
CONTRACTS := $(addprefix tests/integrations/,test_patch_table.py test_plug_points.py test_without_patches.py \
               test_from_pretrained.py::test_a_loaded_model_is_offloaded_by_its_first_forward \
               test_trl.py::test_dpo_takes_an_optimizer_that_is_made_first)

.PHONY: demo test test-all test-newest test-set crash-test stress-test fuzz-test hostile-test overlap-test faults-test matrix-test \
  long-test docs docs-test unchanged-test schedule-test device-test imitation-test mutation-test lint runtime bootstrap \
  sanitize neon wheel sdist wheel-test gpu-check gpu-bundle gpu-prove bench clean

# A demo that was stopped is resumed; after one that ended a new one begins.
demo: export TQDM_DISABLE = 1  # the bars of other libraries
demo: runtime
	@took=$$(( $$(date +%s) - $(BEGAN) )); set -e; \
	if [ ! -e demo/output ] && ls demo/swap/generation-*.infinity >/dev/null 2>&1; then \
	  echo "going on with the run in demo/swap (to begin anew: rm -r demo)"; made=$$SECONDS; \
	  $(BIN)/infinity finetune --resume demo/swap --verify-output --keep-store; \
	else \
	  echo "making a model, a tokenizer and text"; \
	  rm -rf demo; $(BIN)/python examples/make_demo_checkpoint.py demo/input; made=$$SECONDS; \
	  echo "fine-tuning the model, which reads the text first"; \
	  $(BIN)/infinity finetune --model demo/input/checkpoint --data demo/input/text --config examples/demo.yaml \
	    --output demo/output --steps 40 --sequence-length 128 --batch-size 2 --lr 1e-3 --warmup-steps 5 --verify-output \
	    --keep-store; \
	fi; trained=$$SECONDS; \
	echo "comparing the saved model with the store"; \
	$(BIN)/python examples/check_demo.py demo/output demo/swap; \
	echo; echo "Time: set-up $$took s, making the model $$made s, fine-tuning $$((trained - made)) s," \
	  "comparing $$((SECONDS - trained)) s."

# A sample of all tests, in minutes. For a debugger call pytest with -n 0: all tests run in one process.
test: bootstrap
	INFINITY_COSTS=build/costs.json $(PYTEST)

# Everything that `make test` has a sample of (tests/sampling.py), in hours. SHARE=0.1 takes the sample and a tenth of the
# rest. SEED=… determines what is drawn.
test-all: crash-test stress-test fuzz-test hostile-test overlap-test faults-test matrix-test long-test \
  docs-test unchanged-test schedule-test device-test imitation-test mutation-test sanitize

# Kills at 500 random instants and at every named point of every setup, 200 while states go from the device to the store,
# 1000 disk images that a power cut could leave, 200 sequences of pins, 200 of a Trainer that rotates its checkpoint folders,
# and 1000 corruptions.
crash-test: bootstrap
	$(WHOLE) tests/crash tests/runtime/test_corruption.py

# 1000 short runs with a device that answers late and in any order, exceptions, Ctrl-C at any line, failed transfers, and
# loops that differ from the iteration before.
stress-test: bootstrap
	$(WHOLE) tests/stress

# 2000 random models, loops and swap configs against plain torch, to the bit; and 2000 loops whose parts come in any order,
# killed anywhere and resumed.
fuzz-test: bootstrap
	$(WHOLE) tests/fuzz

# 1000 swap configs, data files, manifests, headers, indexes and profiles of every odd kind, and every option with absurd
# values: each gives a result or an error that says what is wrong, within seconds and 500 MB.
hostile-test: bootstrap
	$(WHOLE) tests/hostile

# Thirty steps for every combination of overlap, clipping, accumulation, commits and placement.
overlap-test: bootstrap
	$(WHOLE) tests/runtime/test_overlap.py

# Every kind of fault at every operation.
faults-test: bootstrap
	$(WHOLE) tests/runtime/test_faults.py

# The other combinations of parameters that a test with the mark `covering` has, and tests that draw for themselves.
matrix-test: bootstrap
	$(WHOLE) -m "covering and not gpu and not simulated and not long" $(APART:%=--ignore=%) tests
	$(WHOLE) -m "not covering and not gpu and not simulated and not long" $(DRAWING)

# The other tests of more than 2 s of processor time, of which `make test` has a few.
long-test: bootstrap
	$(WHOLE) -m "not gpu and not simulated and long" $(APART:%=--ignore=%) tests

# The scripts of examples/recipes and examples/unchanged in fp32 and bf16.
unchanged-test: bootstrap
	$(WHOLE) $(UNCHANGED)

# The documentation as a site, build/site; its reference pages are written from the code first. Links that lead nowhere are
# errors.
docs: bootstrap $(VENV)/.docs
	$(BIN)/python docs/tools/reference.py
	$(BIN)/python docs/tools/predicted.py
	$(BIN)/python docs/tools/chart.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

$(VENV)/.docs: constraints.txt | bootstrap
	@$(PIP) -qq mkdocs-material
	@touch $@

# Every command and every piece of Python code of the README and the pages, as it is written.
docs-test: bootstrap
	$(WHOLE) tests/docs

# The same with the newest releases of the libraries that the scripts use, in an environment of its own. Called by hand: a
# release can break it.
test-newest: $(VENV)/.system
	@[ -x $(NEWEST)/bin/pip ] || $(PYTHON) -m venv $(NEWEST)
	@grep '^torch==' constraints.txt > $(NEWEST)/constraints.txt
	@$(NEWEST_PIP) torch pybind11 scikit-build-core cmake ninja
	@$(NEWEST_PIP) --no-build-isolation --config-settings=build-dir=build/newest -e '.[dev]'
	@$(NEWEST_PIP) --upgrade transformers trl peft accelerate datasets lightning
	@$(NEWEST)/bin/pip list 2>/dev/null | grep -E '^(torch|transformers|trl|peft|accelerate|datasets|lightning) '
	INFINITY_TESTS=$(SHARE) INFINITY_SEED=$(SEED) $(NEWEST)/bin/pytest -q -n logical --maxprocesses 8 --dist worksteal -rP \
	  --timeout 3600 $(UNCHANGED)

# What infinity relies on in transformers, TRL, PEFT and Accelerate, with one of the older sets.
test-set: bootstrap build/sets/$(SET)
	@echo "the set of constraints/$(SET).txt"
	PYTHONPATH=$(CURDIR)/build/sets/$(SET) INFINITY_TESTS=$(SHARE) INFINITY_SEED=$(SEED) $(PYTEST) \
	  -m "not gpu and not simulated" --timeout 3600 $(CONTRACTS)

build/sets/%: constraints/%.txt | bootstrap
	@rm -rf $@; env PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 $(BIN)/pip install --no-deps --no-compile \
	  --target $@ -r $< $(DOWNLOADS) && touch $@

# 20,000 schedules of copies on a simulated device.
schedule-test: bootstrap
	$(WHOLE) tests/sim

# Every test of an offloaded model on the simulated device, under each of its policies (tests/devices.py).
device-test: bootstrap
	$(WHOLE) -m simulated tests

# The tests of the GPU on a machine without one, on a simulated device: this checks the code of the tests, and order.
imitation-test: bootstrap
	$(PYTEST) -m gpu tests/gpu

# Removes guards from copies of the sources, one at a time; a test must fail each time.
mutation-test: bootstrap
	$(BIN)/python tests/mutation/run.py --share $(SHARE) --seed $(SEED)

lint: bootstrap
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=bench $(BIN)/mypy -p simulation  # it is built of the package's own rooms
	$(BIN)/clang-format --dry-run -Werror $$(find csrc tests/csrc -name '*.[ch]pp' -o -name '*.inl')
	$(BIN)/lint-imports
	INFINITY_TESTS=all $(BIN)/pytest -q -n 0 tests/test_attributes.py tests/test_calls.py tests/test_vendors.py

# The source distribution, and from it the wheel for this Python and for systems whose glibc is not older than this one's,
# into dist/. For others see [tool.cibuildwheel] in pyproject.toml.
wheel: bootstrap
	$(BIN)/python -m release.build

sdist: bootstrap
	$(BIN)/python -m release.build --sdist

# Installs that wheel into an empty environment without a compiler, and fine-tunes and measures there.
wheel-test: wheel
	$(BIN)/python -m release.try_wheel

# Checks infinity on a machine with a GPU, which needs no network if the bundle is there: builds infinity, measures, runs the
# tests marked gpu and times a training step, with a JSON line for each stage. GPU_CHECK has more options
# (GPU_CHECK="--stages 0,5"); OUT is the folder for the results.
OUT       ?= build/gpu-check
GPU_CHECK ?=
gpu-check:
	$(PYTHON) bench/gpu_check.py --out $(OUT) $(GPU_CHECK)

# Puts everything that such a machine needs into the folder .bundle (64 MiB at most with the working tree), for one version
# of Python. `make gpu-prove` builds infinity from the folder in an environment that has only torch and no network. The torch
# is that of PROVE_PYTHON, which must have the bundle's version of Python.
BUNDLE_PYTHON ?= 3.12
gpu-bundle: bootstrap
	$(BIN)/python bench/gpu_bundle.py --python $(BUNDLE_PYTHON)

PROVE_PYTHON ?= $(BIN)/python
gpu-prove: bootstrap
	$(BIN)/python bench/gpu_bundle.py --prove --with $(PROVE_PYTHON)

# The C++ tests under ThreadSanitizer, then under AddressSanitizer with UndefinedBehaviorSanitizer.
sanitize: bootstrap
	@[ -e /usr/include/doctest/doctest.h ] || { sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; $(APT) update && $(APT) install -y doctest-dev; }
	for kind in thread address,undefined; do \
	  $(BIN)/cmake -S . -B build/sanitize-$$kind -DINFINITY_PYTHON=OFF -DINFINITY_TESTS=ON -DINFINITY_SANITIZE=$$kind \
	    -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null && $(BIN)/cmake --build build/sanitize-$$kind -j$$(nproc) && \
	  TSAN_OPTIONS=halt_on_error=1 ASAN_OPTIONS=detect_leaks=0 build/sanitize-$$kind/native_tests || exit 1; \
	done

# The C++ tests for 64-bit ARM, where the arithmetic must give the same bits. qemu runs them on other machines. The I/O engine
# is the one with threads, because liburing is not there for the other machine.
neon: bootstrap
	@missing=; [ -e /usr/include/doctest/doctest.h ] || missing="$$missing doctest-dev"; \
	command -v aarch64-linux-gnu-g++ >/dev/null || missing="$$missing g++-aarch64-linux-gnu"; \
	command -v qemu-aarch64 >/dev/null || missing="$$missing qemu-user"; \
	if [ -n "$$missing" ]; then sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; $(APT) update && $(APT) install -y $$missing; fi
	mkdir -p build/neon/include
	ln -sfn /usr/include/doctest build/neon/include/doctest
	ln -sfn /usr/include/xxhash.h build/neon/include/xxhash.h
	$(BIN)/cmake -S . -B build/neon -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DINFINITY_PYTHON=OFF -DINFINITY_TESTS=ON -DINFINITY_URING=OFF \
	  -DXXHASH_INCLUDE=$(CURDIR)/build/neon/include -DDOCTEST_INCLUDE=$(CURDIR)/build/neon/include \
	  -DCMAKE_BUILD_TYPE=Release >/dev/null
	$(BIN)/cmake --build build/neon -j$$(nproc)
	qemu-aarch64 -L /usr/aarch64-linux-gnu build/neon/native_tests

# Compares infinity with DeepSpeed and plain torch, which take turns.
bench: bootstrap
	bench/peers/setup.sh
	$(BIN)/python bench/step_vs_peers.py
	$(BIN)/python bench/io_vs_peers.py
	$(BIN)/python bench/adam_vs_peers.py

# Set-up: `runtime` is what infinity needs to run, `bootstrap` also what tests and developers' tools need. A part is done
# again only if its own files have changed. The native core is compiled while torch and the libraries are installed; both
# need .tools, so that two pips never install the same package at once. ninja would take MAKEFLAGS for a limit to its jobs.
runtime: $(VENV)/.tools
	@$(MAKE) -s -j2 $(VENV)/.native $(VENV)/.libraries

bootstrap: runtime
	@$(MAKE) -s $(VENV)/.developers

# The system packages that the build needs; only missing ones are installed.
$(VENV)/.system: Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "the versions in constraints.txt need Python 3.11 or later: set PYTHON=..."; exit 1; }; \
	sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; missing=; \
	command -v g++ >/dev/null || missing="$$missing g++"; \
	[ -e /usr/include/liburing.h ] || missing="$$missing liburing-dev"; \
	[ -e /usr/include/xxhash.h ] || missing="$$missing libxxhash-dev"; \
	$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || missing="$$missing python3-venv"; \
	[ -e "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] || missing="$$missing python3-dev"; \
	if [ -n "$$missing" ]; then \
	  echo "system packages: installing$$missing"; \
	  $(APT) update && $(APT) install -y $$missing && echo "system packages: $$SECONDS s"; \
	fi
	@mkdir -p $(VENV) && touch $@

$(VENV)/.environment: | $(VENV)/.system
	@echo "virtual environment: making $(VENV)"; [ -x $(BIN)/pip ] || $(PYTHON) -m venv $(VENV) || exit 1; \
	echo "virtual environment: $$SECONDS s"; touch $@

$(VENV)/.tools: constraints.txt | $(VENV)/.environment
	@$(PIP) -qq pybind11 scikit-build-core cmake ninja && echo "build tools: $$SECONDS s" && touch $@

$(VENV)/.native: $(NATIVE) pyproject.toml $(VENV)/.tools
	@echo "native core: compiling"; mkdir -p build; \
	env -u MAKEFLAGS -u MFLAGS $(PIP) -v --no-build-isolation --no-deps -e . 2>&1 | tee build/native.log | \
	  sed -un 's|^ *\[\([0-9]*0\)/\([0-9]*\)\].*|native core: \1 of \2 files|p' || { cat build/native.log; exit 1; }; \
	echo "native core: $$SECONDS s"; touch $@

$(VENV)/.torch: constraints.txt | $(VENV)/.tools
	@echo "torch: installing"; $(PIP) torch $(DOWNLOADS) && echo "torch: $$SECONDS s" && touch $@

$(VENV)/.libraries: pyproject.toml constraints.txt $(VENV)/.torch
	@echo "libraries: installing"; $(BIN)/python -c "$$DEPENDENCIES" | xargs -d '\n' $(PIP) $(DOWNLOADS) && \
	echo "libraries: $$SECONDS s" && touch $@

# pip would compile the native core to find the dependencies of a folder. `infinity finetune` needs those of TRL.
define DEPENDENCIES
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*project["dependencies"], *project["optional-dependencies"]["hf"], sep="\n")
endef
export DEPENDENCIES

$(VENV)/.developers: $(VENV)/.libraries
	@echo "test libraries: installing"; $(PIP) 'infinity-offload[dev]' $(DOWNLOADS) && \
	echo "test libraries: $$SECONDS s" && touch $@

clean:
	rm -rf build demo $(VENV)
