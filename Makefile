# energynn: `make help` lists what there is.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: coverage picture size wheelhouse help reproduce paper kick-the-tires test test-all test-nightly lab docs check bench gpu-study gpu-minutes gpu-carry lock clean env train-env site-writer training python needs room again
SHELL := /bin/sh

# The first Python that is new enough; `make PYTHON=/path/to/python` chooses another.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
# Where there is no network: a folder from `make wheelhouse`. Else the mirror that pip is told of, if it is of one, and
# the certificates that this machine trusts.
MIRROR = $(or $(PIP_INDEX_URL),$(shell $(PYTHON) -m pip config get global.index-url 2>/dev/null))
FROM = $(if $(WHEELHOUSE),--no-index --find-links $(WHEELHOUSE),$(addprefix --index-url ,$(MIRROR)))
export UV_SYSTEM_CERTS = 1
# uv takes the versions and checksums of the lock.
UV := $(BIN)/uv
INSTALL = $(UV) pip install --python $(BIN)/python -c requirements.lock $(FROM)
# `make SITE=1 ...` uses the torch and the MPI that this machine already has. uv does not see a site's packages, so there
# pip takes what fits them, once.
SITE_INSTALL = $(BIN)/python -m pip install --no-compile $(FROM) -e .$(SITE_EXTRAS)
SITE_EXTRAS := [train-site,lab,dev]

# Runs and tests start hundreds of processes: compile the package and the tests once, whatever the shell says.
export PYTHONDONTWRITEBYTECODE =

PYTEST := $(BIN)/python -m pytest
# Fast tests keep two processes busy, and the tests of a file share what they prepare: a training, executed notebooks.
# Slow ones mostly wait, so there is a third process. They go to whichever process is free, but for those that share a
# cluster or a wheel (TOGETHER in tests/conftest.py).
FAST := -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not nightly"
SLOW := -n 3 --dist loadgroup --no-loadscope-reorder -m "slow and not nightly" $$(grep -rl mark.slow tests --include='test_*.py')
# Tests with real processes have deadlines that a busy machine can miss. What failed runs a second time, alone on the
# machine, and must pass then: -v names each of these tests at the end of the output.
ONCE_MORE = { echo "energynn: once more, only what has failed"; \
  $(PYTEST) -v --last-failed --last-failed-no-failures none; }

help: ## this list
	@echo "energynn: what does it cost, in energy, time and accuracy, to train on more GPUs?"
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | awk -F'\t' '{printf "  make %-15s %s\n", $$1, $$2}'

reproduce: needs training ## everything: install, verify the data, run the default study, rebuild the paper, compare (10 min)
	@echo "=== 1 of 7: verify the data that ship (seconds)"
	@$(BIN)/energynn data verify
	@echo "=== 2 of 7: train ResNet50 and FourCastNet on one and two devices, ten runs (5 min)"
	@$(BIN)/energynn study run smoke
	@echo "=== 3 of 7: one run more on one device, which the forecast is fitted to (1 min)"
	@$(BIN)/energynn study run one-device
	@echo "=== 4 of 7: derive every number of every record again (seconds)"
	@$(BIN)/energynn check runs
	@echo "=== 5 of 7: execute the notebooks, compile the paper and the report (2 min)"
	@$(MAKE) --no-print-directory paper
	@echo "=== 6 of 7: forecast two devices from one (seconds)"
	-@$(BIN)/energynn forecast predict --held-out --system local
	@echo "=== 7 of 7: compare with the committed reference (seconds)"
	@$(BIN)/energynn check --reference

kick-the-tires: needs training ## two short runs and the paper, to see whether all is well (5 min)
	$(BIN)/energynn data verify
	$(BIN)/energynn study run kick-the-tires
	$(BIN)/energynn check runs
	$(MAKE) --no-print-directory paper

paper: env ## figures, numbers, claims, build/paper.pdf and build/report.html from the records that are there (no torch needed)
	@$(MAKE) --no-print-directory -j2 build/paper.pdf
	@echo "open build/paper.pdf, or build/report.html in a browser; figures are in build/figures/, numbers in build/numbers.json"

# Not with every paper: other fonts make other bytes of the same picture, and git would see a change.
picture: build/paper.pdf ## the README's picture, as the notebook draws it here
	cp build/figures/beyond.png paper/example.png

# Two processes have a core each: threads of a third one would only wait.
test: export OMP_NUM_THREADS = 1
test: train-env ## the fast tests (5 min)
	@echo "=== the fast tests (5 min on two cores)"
	$(PYTEST) $(FAST)

test-all: train-env ## these and the slow ones: real runs, killed processes, a private Slurm (22 min)
	$(MAKE) --no-print-directory test || $(ONCE_MORE)
	@echo "=== the slow tests (16 min on two cores)"
	$(PYTEST) $(SLOW) || $(ONCE_MORE)

test-nightly: train-env ## many kills at random instants, and the full matrices of launchers and signals
	$(PYTEST) -m nightly

lab: train-env ## JupyterLab on notebooks/00_start_here.ipynb
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) --ServerApp.root_dir=. \
	  --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb

docs: site-writer ## README, guides, executed notebooks, commands and Python interface as a site: build/site/index.html
	@$(BIN)/sphinx-build -q -W --keep-going docs build/site
	@echo "open build/site/index.html"

check: env ## derive every number of every record again and compare
	$(BIN)/energynn check runs

size: ## code tokens by folder, tokens a line, rooms, arrows, floors
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) tests/size.py

bench: train-env ## what measuring costs and how fast the trainers are, as ratios within one run
	$(BIN)/python -m tests.bench

coverage: env ## how many intervals hold the truth of invented clusters: the table of docs/forecast.md (15 min)
	@$(BIN)/python -m tests.forecast.clusters 20

# That of .venv if it trains, else the machine's own; nothing is installed, nothing is fetched.
# 9 minutes: the study gpu; any other number: examples/gpu_grid.py. GPU_CALL_MINUTES ends one call of it sooner, and the next one goes on.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/torchrun),$(BIN)/python,python3)
# What gpu-carry brought is of another Python than our own environment.
CARRIED := $(if $(filter $(BIN)/% $(abspath $(BIN))/%,$(GPU_PYTHON)),,build/packages)
GPU_MINUTES ?= 9
GPU_CALL_MINUTES ?= $(GPU_MINUTES)
GPU_STUDY := $(if $(filter 9,$(GPU_MINUTES)),gpu,examples/gpu_grid.py)
gpu-study: ## one NVIDIA GPU, nine minutes (or GPU_MINUTES=32), no network: records, in build/gpu-study.tar.gz, or in $OUT
	PYTHONPATH=.:$(CARRIED) timeout -s INT $$((60 * $(GPU_CALL_MINUTES) + 45)) $(GPU_PYTHON) -m energynn.cli study run $(GPU_STUDY) \
	  --minutes $(GPU_CALL_MINUTES) --warm-up --runs-dir build/gpu-runs; status=$$?; mkdir -p $(or $(OUT),build); \
	tar -czf $(or $(OUT),build)/gpu-study.tar.gz --exclude=checkpoint -C build/gpu-runs . ; exit $$status

# MINUTES_WITH: parameters added to each of these runs.
MINUTE_S ?= 60
WORK_SIZES ?= 32,128,256
# As gpu-study does: H100 and H200 never share a folder. A power limit gets a system of its own.
GPU_SYSTEM ?= $$($(GPU_PYTHON) -c "from energynn.experiment import studies; print(studies.gpu_system())")
MINUTE = $(GPU_PYTHON) -m energynn.cli run workload=gpu_minutes device=gpu system="$(GPU_SYSTEM)" seconds=$(MINUTE_S) $(MINUTES_WITH)
gpu-minutes: export PYTHONPATH := .:examples:$(CARRIED):$(PYTHONPATH)
gpu-minutes: ## what a GPU draws idle, starved, in a simulated collective and at work: a minute each (8 min; MINUTE_S=20: 4), records in runs/
	$(MINUTE) kind=idle,simulated_collective local_batch_size=1
	$(MINUTE) kind=starved
	$(MINUTE) kind=work local_batch_size=$(WORK_SIZES)
	if $(GPU_PYTHON) -c "import sys, torch; sys.exit(torch.cuda.device_count() < 2)"; then \
	  $(MINUTE) kind=collective devices=2 local_batch_size=1; fi

GPU_PYTHON_VERSION ?= 3.12
gpu-carry: training ## what a machine with a GPU needs of this one and git does not bring: build/data, build/commit, build/packages
	$(BIN)/energynn data verify photographs photographs_large
	rm -rf build/packages
	$(UV) pip install -q --target build/packages -c requirements.lock --only-binary :all: \
	  --python-version $(GPU_PYTHON_VERSION) --python-platform x86_64-manylinux_2_28 msgspec typer
	$(BIN)/python -c "import json; from energynn.measure import machine; machine.COMMIT.write_text(json.dumps(machine.git_state()))"

lock: $(UV) ## choose new versions: writes requirements.lock, for Python 3.11 and newer, with a checksum of every file
	$(UV) pip compile -q --upgrade --universal --python-version 3.11 --generate-hashes --no-annotate \
	  --custom-compile-command "make lock" --extra train --extra lab --extra dev pyproject.toml -o requirements.lock

wheelhouse: python ## every package as a file in build/wheelhouse, for machines without network: make WHEELHOUSE=... there
	$(PYTHON) -m venv build/fetch
	build/fetch/bin/pip download -q -d build/wheelhouse --no-deps --require-hashes -r requirements.lock
	build/fetch/bin/pip download -q -d build/wheelhouse uv
	@echo "build/wheelhouse: $$(ls build/wheelhouse | wc -l) files; copy it, then: make WHEELHOUSE=build/wheelhouse train-env"

clean: ## delete what was generated; runs/ and the environment stay
	rm -rf build

# ---------------------------------------------------------------------------------------------------- the environment

python:
	@test -n "$(PYTHON)" || { echo "energynn: no Python 3.11 or newer found; install one or give make PYTHON=..."; exit 2; }

# Whether this machine trains already.
TORCH = $(SITE)$(wildcard $(VENV)/lib/python*/site-packages/torch)

needs: python
	@test -n "$(TORCH)" || echo "Needs about 8 GB of disk (environment 7 GB), 4 GB of memory and, on two cores, 10 minutes after the download of 3 GB."
	@test -n "$(SITE)" || $(PYTHON) -c 'import importlib.metadata as m; \
	  print("note: this Python has torch", m.version("torch"), "- `make SITE=1` uses it and your MPI instead of wheels")' 2>/dev/null || true

# An installer finds out late that the disk is full, and leaves half an environment.
room: python
	@test -n "$(TORCH)" || $(PYTHON) -c 'import shutil, sys; free = shutil.disk_usage(".").free / 1e9; \
	  sys.exit(f"energynn: only {free:.1f} GB are free here; make room for 8 GB" if free < 8 else 0)'
	@test -n "$(TORCH)" || echo "=== install what trains and measures (3 GB once); what is said is in $(VENV)/install.log"

$(UV): | python
	@test -x $(BIN)/python || $(PYTHON) -m venv $(if $(SITE),--system-site-packages) $(VENV)
	@$(BIN)/python -m pip install -q $(FROM) uv

# What the installer says goes to a log, which is named, and shown where something fails. Nothing is compiled:
# Python does that when it imports, and most of 14,000 files are imported by nobody.
logged = $(1) > $(VENV)/install.log 2>&1 \
  || { tail -n 15 $(VENV)/install.log; echo "energynn: not installed; all that was said is in $(VENV)/install.log"; exit 1; }

# The installer writes this command anew each time.
$(BIN)/energynn: pyproject.toml | $(UV)
	@echo "=== install energynn into $(VENV)"
	@$(call logged,$(if $(SITE),$(SITE_INSTALL),$(INSTALL) --no-deps -e .))

# uv sees in a moment what is there, and then asks no network.
packages = $(if $(SITE),true,$(call logged,$(INSTALL) -r pyproject.toml $(addprefix --extra ,$(1))))

env: $(BIN)/energynn ## only the environment of the analysis
	@$(call packages)

site-writer: $(BIN)/energynn
	@$(call packages,docs)

training: room $(BIN)/energynn
	@$(call packages,train)

train-env: room $(BIN)/energynn ## the whole environment
	@$(call packages,train lab dev)

# ---------------------------------------------------------------------------------------------------- the paper

# The analysis is made again if a record was added, changed or removed (its folder has a new date then) since the
# notebook $(1) was executed, or if that never was. A name of a record may hold what make does not read, so find looks.
newer_records = $(if $(shell find runs \( -type d -o -name record.json -o -name '*.csv' -o -name '*.toml' \) \
	-newer $(1) -print -quit 2>&1),again)
# Where HEAD moves, git writes.
COMMIT := $(wildcard $(shell git rev-parse --git-path logs/HEAD 2>/dev/null))
NOTEBOOKS := $(patsubst notebooks/%,build/notebooks/%,$(sort $(wildcard notebooks/[1-9]*.ipynb)))
ANALYSIS := $(filter-out energynn/train/%,$(shell find energynn -name "*.py" -o -name "*.toml")) paper/claims.toml \
  $(wildcard data_manifests/others/*)

.SECONDEXPANSION:
build/notebooks/%.ipynb: notebooks/%.ipynb $(ANALYSIS) $$(call newer_records,$$@)
	@mkdir -p build/notebooks
	@echo "analysis: $<"
	@$(BIN)/papermill --no-progress-bar --log-level WARNING --cwd . $(if $(findstring notebooks/9,$<),-p live False) $< $@ \
	  2> $@.log || { cat $@.log; exit 1; }

build/paper.pdf: $(NOTEBOOKS) $(COMMIT) $(wildcard paper/*)
	$(BIN)/python -m energynn.analysis
