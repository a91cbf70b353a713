# Everything a developer runs. Each target is quick when nothing has changed.
#
#   make setup PYTHON=python3.12     choose the interpreter of .venv
#   make test ALL=1                  every test, also slow ones, with new random examples; a skip fails, except for lack of a GPU
#   make test PYTEST="-k logs -x"    arguments for pytest, in one process
#   make test JOBS=8                 processes of pytest; 0: one that runs them all itself
#   make bench BENCH="--only launch --quick"

SHELL := /bin/sh
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
SETUP := $(VENV)/setup.stamp
BUILT := $(VENV)/build.stamp
FRAMEWORKS := $(VENV)/frameworks.stamp
EXTENSION := python/elasticrs/_core.abi3.so

# Ignore an activated environment or a conda shell, because they would change where packages are installed. Allow bytecode, because
# otherwise each process of pytest rewrites all assertions again.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV CONDA_PREFIX PYTHONDONTWRITEBYTECODE
export PYTHON

RUST_SOURCES := Cargo.toml Cargo.lock $(shell find crates -type f \( -name '*.rs' -o -name '*.html' -o -name Cargo.toml \))
PYTHON_SOURCES := $(shell find python -name '*.py')
PYTHON_TREES := python tests benchmarks examples tools docs
GPU_KIT_SOURCES := $(addprefix tests/gpu_kit/,job.py checks.py health.py __main__.py)

# Without nextest, run one test at a time, because tests that share a process also share its descriptors and children.
HAS_NEXTEST := cargo nextest --version >/dev/null 2>&1

BENCH ?=
PYTEST ?=
# Python tests that `make check` runs.
CHECKED := tests/unit tests/errors tests/rendezvous/test_rounds.py tests/e2e/test_launcher.py tests/e2e/test_signals.py
# Most tests wait rather than compute, so run two of them for each processor and one more. Limit that to 8, because with more, the
# longest tests do not finish sooner. Run selected tests in one process, because a developer may want -s or --pdb.
PROCESSES := $(shell n=$$(nproc); echo $$((n < 4 ? 2 * n + 1 : 8)))
JOBS ?= $(if $(strip $(PYTEST)),0,$(PROCESSES))
ifdef ALL
PYTEST_SELECT :=
PYTEST_NEEDS := $(FRAMEWORKS)
CARGO_IGNORED := --include-ignored
NEXTEST_IGNORED := --run-ignored all
export ELASTICRS_REQUIRE_ALL := 1
export ELASTICRS_HYPOTHESIS_PROFILE ?= thorough
else
PYTEST_SELECT := -m "not slow"
# Use the same random examples in every run of the Rust tests.
export PROPTEST_RNG_SEED ?= 1
endif

# Rebuild if the extension is missing, whatever the stamp says, because it is not under version control.
ifeq ($(wildcard $(EXTENSION)),)
REBUILD := force
endif

.PHONY: help setup build demo demo-keep demo-train demo-hang demo-etcd demo-multinode demo-operate check nightly test programs test-rust test-python test-gpu attack soak soak-store soak-train soak-keep interop lint lint-rust lint-python collect docs pictures bench wheel release bump try-release rebuild clean force

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(SETUP) ## make .venv with the tools, torch and etcd (once; needs Python >= 3.10, Rust, a C linker)

$(SETUP): pyproject.toml tools/setup.sh tools/install.py
	@tools/setup.sh

# Check the packages again when torch in the environment is newer, so do not use an order-only prerequisite.
$(FRAMEWORKS): $(SETUP)
	@$(PY) tools/install.py frameworks

build: $(BUILT) ## compile the extension into python/ and install the project into .venv, editable
	@$(PY) -m compileall -q python

# The stamp has the time at which the build began, so a source that is edited during the build is built again.
$(BUILT): $(RUST_SOURCES) pyproject.toml $(REBUILD) | $(SETUP)
	@touch $@.begun
	@PIP_QUIET=1 MATURIN_NO_MISSING_BUILD_BACKEND_WARNING=1 VIRTUAL_ENV=$(CURDIR)/$(VENV) $(PY) -m maturin develop --release --locked --quiet
	@mv $@.begun $@

demo: build ## train a real model with 4 workers; one is killed, another one hangs, and no step is lost (python -m elasticrs.demo)
	@$(PY) -m elasticrs.demo

demo-keep: build ## kept state; a worker is killed, raises, hangs, a node leaves, is lost: steps lost, beside torchrun
	@$(PY) examples/keep/demo.py

demo-train: build ## train as steps over a state; one worker is killed, the other three keep their processes, one step is repeated
	@$(PY) examples/train_state/demo.py

demo-hang: build ## train a real model; one worker waits for a batch that never comes, is found, its stack is kept, and the job recovers
	@$(PY) examples/hang/demo.py

demo-etcd: build ## three agents meet in an etcd of three members; the one with rank 0 is killed, then a member of etcd
	@$(PY) examples/ddp_multinode/demo_etcd.py

demo-operate: build ## three nodes train; elasticctl looks at them, saves, restarts, stops, drains a node; no step is lost (a browser if there is one)
	@$(PY) examples/operate/demo.py

demo-multinode: build ## three hosts train; one is cut off, comes back; their store is killed, comes back (namespaces if root)
	@$(PY) examples/ddp_multinode/demo.py

test: test-rust test-python ## all tests except those marked slow, then a list of the slowest; ALL=1: every test

# Linters and the tests of pure modules, in less than two minutes once everything is built.
check: build ## a meaningful part of lint and tests, to run after each change (see docs/development.md)
	@cargo fmt --all --check
	@$(PY) -m ruff check --no-cache --quiet $(PYTHON_TREES)
	@$(VENV)/bin/lint-imports --no-logo --no-cache >$(VENV)/imports.log || { cat $(VENV)/imports.log; exit 1; }
	@cargo build --locked --quiet -p elasticrs-fake-nvml
	@if $(HAS_NEXTEST); then \
	    cargo nextest run --locked --workspace --lib --no-fail-fast -j $(PROCESSES) --status-level fail --final-status-level fail; \
	else \
	    cargo test --locked --quiet --workspace --lib --no-fail-fast -- --test-threads=1; \
	fi
	@$(PY) -m pytest -q -n $(JOBS) --dist worksteal -m "not slow" $(CHECKED)

# The rest of the tests, for hours. A random test that fails prints how to repeat its example.
nightly: ## every test with thorough random examples, then soaks, other releases of torch, and the comparison with torchrun
	@$(MAKE) test ALL=1
	@$(MAKE) soak SOAK="--seconds 1800 --seed $$(date +%s)"
	@$(MAKE) soak-store soak-train
	@$(MAKE) interop TORCH='2.6.*'
	@$(MAKE) release
	@$(MAKE) rebuild
	@$(PY) -m pytest -n $(JOBS) --dist worksteal tests/e2e --launcher torchrun \
	    --junitxml=benchmarks/results/torchrun-$$($(PY) -c 'import torch; print(torch.__version__)').xml

# These suites run a second time with workers that are forks of a warm nursery, without the slow tests that wait for a nursery that
# does not wake up.
WARM_TESTS := not (binary(supervisor) & test(a_nursery_that))
# Tests run programs of other packages, in Rust and in Python, and cargo does not build these for them.
programs:
	@cargo build --locked --quiet --bins
	@cargo build --locked --quiet -p elasticrs-fake-nvml

test-rust: programs ## the Rust part of `make test`
	@if $(HAS_NEXTEST); then \
	    cargo nextest run --locked -j $(PROCESSES) $(NEXTEST_IGNORED) && \
	    ELASTICRS_TEST_WARM=1 cargo nextest run --locked -j $(PROCESSES) -p elasticrs-core \
	        --test supervisor --test fence --test replacing -E '$(WARM_TESTS)'; \
	else \
	    cargo test --locked --no-fail-fast --lib --bins --tests -- $(CARGO_IGNORED) --test-threads=1; \
	fi
	@MAKEFLAGS= cargo test --locked --doc --quiet

test-python: build $(PYTEST_NEEDS) ## the Python part of `make test`; PYTEST="-k signals -x" selects tests
	@$(PY) -m pytest -n $(JOBS) --dist worksteal --durations 15 --durations-min 2 $(PYTEST_SELECT) $(PYTEST)

interop: build ## the workers' store with the clients of another torch: TORCH='2.6.*'
	@tools/interop.sh '$(TORCH)'

GPU_KIT ?=
test-gpu: ## checks for a machine with a GPU and torch: needs a wheel in dist/ (`make wheel`), no Rust, no .venv, no network
	@wheel=$$(ls -t dist/elasticrs-*.whl 2>/dev/null | head -n 1); \
	[ -n "$$wheel" ] || { echo "no wheel in dist/: make one with 'make wheel' on a machine with Rust, and copy it there" >&2; exit 1; }; \
	$(or $(PYTHON),python3) -m tests.gpu_kit --wheel "$$wheel" $(GPU_KIT)

attack: build ## hangs of every kind, programs that misbehave, hostile clients, each with its right answer; takes minutes
	@$(PY) -m pytest -n $(JOBS) --dist worksteal tests/attack $(PYTEST)

SOAK ?= --seconds 600

soak: build ## random schedules of the rendezvous for ten minutes; SOAK="--seconds N --seed S"
	@PYTHONPATH=tests $(PY) -m tests.rendezvous.soak $(SOAK)

soak-store: build ## a store that keeps its state is killed and started again under a running job; KILLS=200
	@ELASTICRS_STORE_KILLS=$(or $(KILLS),200) $(PY) -m pytest -q -n0 tests/store_away -k no_worker_ends

soak-train: build ## workers of elasticrs.train are killed at random moments: started by hand, by an agent, by two; KILLS=200
	@for agents in 0 1 2; do \
	    PYTHONPATH=tests $(PY) -m tests.train.soak --kills $(or $(KILLS),200) --agents $$agents || exit 1; \
	done

soak-keep: build ## ranks with kept state, agents and nodes are killed at random moments; KILLS=11 for each of 84 jobs, SEED=0
	@ELASTICRS_KEEP_KILLS=$(or $(KILLS),11) ELASTICRS_KEEP_SEED=$(or $(SEED),0) $(PY) -m pytest -n $(JOBS) --dist worksteal \
	    tests/attack/test_keep_matrix.py -k random_kills $(PYTEST)

lint: build ## formatters, linters, links of rustdoc, types, the stub of the extension, layers and import cycles, rules of the tree
	@$(MAKE) --no-print-directory --jobs 2 --output-sync lint-rust lint-python

lint-rust:
	@cargo fmt --all --check
	@cargo clippy --locked --workspace --all-targets --quiet -- -D warnings
	@RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps --document-private-items --quiet

# Ruff's cache does not notice new modules, which decide how imports are sorted.
lint-python:
	@$(PY) -m ruff check --no-cache --quiet $(PYTHON_TREES)
	@$(PY) -m ruff format --no-cache --quiet --check $(PYTHON_TREES)
	@$(PY) -m mypy python tools docs tests/helpers tests/conftest.py benchmarks $(GPU_KIT_SOURCES)
	@$(PY) -m mypy.stubtest --concise --allowlist tools/stubtest-allowlist.txt elasticrs._core
	@$(VENV)/bin/lint-imports --no-logo --no-cache >$(VENV)/imports.log || { cat $(VENV)/imports.log; exit 1; }
	@$(PY) tools/picture.py --check
	@$(PY) tools/reference.py --check
	@$(PY) tools/circles.py
	@$(PY) tools/check_tree.py

# pytest rewrites the assertions of each file once, and keeps the result. Without this, all of its processes would do so at once.
collect: build
	@$(PY) -m pytest -n0 --collect-only -q >$(VENV)/collected.log || { tail -n 40 $(VENV)/collected.log; exit 1; }

docs: build ## the documentation site in site/; a warning, a broken link or an outside resource is an error
	@$(PY) tools/docs.py

pictures: build ## record jobs in a terminal, time restarts, and draw the pictures in docs/pictures anew
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m tools.pictures --record

bench: build ## measure side by side with torchrun; results go to benchmarks/results
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m benchmarks $(BENCH)

wheel: ## sdist, wheel and `pip install .` of a clone, each launched in an empty environment (needs no `make setup`)
	@$(or $(PYTHON),python3) tools/wheel.py

release: ## sdist and wheels for x86-64 and arm64 with glibc 2.17, checked, with their checksums (needs no `make setup`)
	@$(or $(PYTHON),python3) -m tools.release $(if $(TAG),--tag '$(TAG)')

bump: ## set the version of the next release, and give the changelog its section: VERSION=1.2.3 [REPOSITORY=https://…]
	@$(or $(PYTHON),python3) tools/bump.py '$(VERSION)' $(if $(REPOSITORY),--repository '$(REPOSITORY)')

try-release: ## check the files of a release in dist/, and launch jobs from the wheels for this architecture; ALL=1: from all
	@$(or $(PYTHON),python3) -m tools.release --only check $(if $(ALL),--all)

rebuild: ## build the release of this commit again in another folder, and compare the checksums (after `make release`)
	@$(or $(PYTHON),python3) -m tools.rebuild

clean: ## remove what was built (not .venv: `rm -r .venv` for that)
	@cargo clean --quiet
	@rm -rf dist site $(BUILT) $(EXTENSION) .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find python tests benchmarks examples tools -name __pycache__ -prune -exec rm -rf {} +
