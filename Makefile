# Two commands on a fresh machine (Python 3.11 or newer): `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Only what a line needs, without the tools of the tests.
LINE := $(VENV)/.line-installed

.PHONY: install gpu gpu-wheels demo demo-plant test test-all test-fast check house rooms promises promises-list system-tools bench soak faults sbom screenshots bundle test-bundle test-cameras test-moe field clean help

# .venv with what a line needs.
install: $(LINE)

# A line with trained experts, judged images and its pages.
demo: $(LINE)
	$(BIN)/coserve demo --dir demo

# A file's tests stay together. They wait half of the time: four workers for two cores, of up to 2.5 GB each.
# WORKERS=0 runs one after the other in one process.
# Compiled modules are kept whatever the environment says: the tests start hundreds of processes.
WORKERS ?= 4
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Three lines, their hub with PostgreSQL (make system-tools) and its pages, until Ctrl-C.
demo-plant: $(INSTALLED)
	$(BIN)/coserve plant demo --dir demo-plant

# Every promise, page, mode and command once: about 9 minutes on two cores. build/durations.jsonl has each test's time.
test: $(INSTALLED)
	$(PYTEST) -m "not test_all"

# All tests, including trainings and killed hubs: up to an hour.
test-all: $(INSTALLED)
	$(PYTEST) --hypothesis-profile search

# The tests that need no torch, no process and no sleep: a minute.
test-fast: $(INSTALLED)
	$(PYTEST) --fast -m "not test_all"

# Lint, format, types, import rules.
check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

# The code base in figures, beside the goals; `$(BIN)/python -m tests.house --verbose` lists what was counted.
house: $(INSTALLED)
	@$(BIN)/python -m tests.house

# docs/img/rooms.svg: the rooms and their arrows, from the imports; docs/img/one-image.svg: the way of an image, traced.
rooms: $(INSTALLED)
	$(BIN)/python -m tests.house --picture docs/img/rooms.svg
	$(BIN)/python -m tests.house --image docs/img/one-image.svg

# What tests need beside Python (a C compiler, systemd's tools, …): installed where that is possible, otherwise named.
system-tools:
	.ci/system-tools

# With build/gpu-wheels, `make gpu` uses the torch of PYTHON, which must be 3.12, and needs no network.
GPU_ENV := $(if $(wildcard build/gpu-wheels),build/gpu-venv/.installed,$(INSTALLED))

# What this machine's GPU does, into docs/benchmarks.md:
# `make gpu STAGES="load compute"`, `make gpu DRY_RUN=build/dry-run.md`.
gpu: $(GPU_ENV)
	$(dir $(GPU_ENV))bin/python -m tests.gpu $(STAGES) $(if $(DRY_RUN),--dry-run --page $(DRY_RUN) --folder build/gpu-dry-run)

build/gpu-venv/.installed: tests/gpu/own_torch.py $(wildcard build/gpu-wheels/*)
	$(PYTHON) tests/gpu/own_torch.py install build/gpu-wheels build/gpu-venv
	@touch $@

# What a machine without a network needs beside its own torch, as one file in build/gpu-wheels; NO_OPENCV=1 where it has OpenCV.
gpu-wheels: $(INSTALLED)
	$(BIN)/python tests/gpu/own_torch.py collect build/gpu-wheels $(if $(NO_OPENCV),--no-opencv)

# Images a second of the demo's line, with CoServe's policy and without.
bench: $(INSTALLED)
	$(BIN)/coserve bench line --dir demo

# Hundreds of kills, power cuts and refused writes: `make faults SEED=2 JOBS=1`.
faults: $(INSTALLED)
	$(BIN)/python -m tests.faults.faults_long_run build/faults --seed $(or $(SEED),1) --jobs $(or $(JOBS),2)

# What people in the field brought, each case before and now. Other cases: `make field CASES=FOLDER`.
field: $(INSTALLED)
	test -d demo || $(BIN)/coserve demo --dir demo
	$(BIN)/python -m tests.field $(if $(CASES),--cases $(CASES))

# Cameras and daemons killed while they publish; about two minutes.
test-cameras: $(INSTALLED)
	$(BIN)/python -m pytest -s tests/tools/client/camera_restarts.py

# Breaks the code of over fifty promises, one by one, and lists what no test noticed; about an hour.
promises: $(INSTALLED)
	$(BIN)/python -m tests.promises

# Every promise with its test, from the tests' marks: build/promises.md.
promises-list: $(INSTALLED)
	$(BIN)/python -m tests.promises --list

# An hour with hostile peers: memory, handles, threads, nothing lost.
soak: $(INSTALLED)
	$(BIN)/coserve soak --minutes 60

# docs/img/dashboard-*.png, of a copy of the demo's line. Needs chromium (make system-tools).
screenshots: $(INSTALLED)
	$(BIN)/python -m tests.screenshots --dir demo --out docs/img

# What the line is made of: build/sbom.json (CycloneDX) and build/licences.txt; ends with 1 where a licence is missing.
sbom: $(INSTALLED)
	@mkdir -p build
	$(BIN)/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml --gather-license-texts \
		--output-reproducible --of JSON -o build/sbom.json
	$(BIN)/python -m tools.release.licences build/licences.txt

# Everything that a PC without a network needs, in one archive under build/; its test installs it and serves images.
bundle: $(INSTALLED)
	$(BIN)/python -m tools.release.bundle

test-bundle: bundle
	$(BIN)/python -m pytest tests/tools/release/whole_bundle.py

# What the modes of language models promise, on the trained fixture: 10 to 20 minutes, and as many again the first time,
# when it is trained and prepared under build/moe. Every test prints its figures.
test-moe: $(INSTALLED)
	$(BIN)/coserve moe fixture
	$(BIN)/coserve moe trace build/moe/fixture
	$(BIN)/coserve moe fit build/moe/fixture
	$(BIN)/coserve moe unite build/moe/fixture
	$(BIN)/coserve moe plan build/moe/fixture --budget 50%
	$(BIN)/coserve moe plan build/moe/fixture --budget 25%
	$(BIN)/python -m pytest -s --timeout 1500 tests/moe/fixture_modes.py

# Installed once per change of the requirements; exact versions are in constraints.txt.
$(LINE): pyproject.toml constraints.txt
	@$(PYTHON) tools/release/install.py $(VENV)
	@touch $@

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) tools/release/install.py $(VENV) --extras dev
	@touch $@ $(LINE)

# Remove what was installed, made and measured.
clean:
	rm -rf $(VENV) demo demo-plant build

# What there is to make.
help:
	@awk '/^$$/{ said = "" } /^# /{ said = said ? said : substr($$0, 3); next } /^[a-z-]+:/{ sub(":.*", ""); if (said) printf "%-15s %s\n", $$0, said } { said = "" }' Makefile
