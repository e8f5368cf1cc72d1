# Every target is one line to remember; `make help` lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help run fleet test check lint format docs matrix bench paper testbed drill lock sbom clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z]+:.*## / {printf "  \033[1mmake %-8s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

run: $(READY) ## Install, then train a simulated fleet on the embedded data (two minutes)
	$(BIN)/anycostfl run demo

fleet: $(READY) ## A real fleet on this machine: one server, four devices, TLS and keys (two minutes)
	$(BIN)/anycostfl fleet

test: lint ## Install, then run every quick check: lint, types, layers, tests
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

check: lint ## The same with the slow tests and coverage
	$(BIN)/python -m pytest -n 2 --cov --cov-report=term

lint: $(READY) ## Ruff, mypy strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY) ## Let ruff put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY) ## The documentation as a site in site/; fails on a broken link
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/mkdocs build --strict --quiet

matrix: ## Install the wheel on every Python that is here and run it; says what ran where
	$(PYTHON) .ci/matrix

bench: $(READY) ## Measure; takes minutes, wants a quiet machine
	$(BIN)/python benchmarks/shrink.py
	$(BIN)/python benchmarks/codec.py
	$(BIN)/python benchmarks/planner.py
	$(BIN)/python benchmarks/simulator.py
	$(BIN)/python benchmarks/winograd.py
	$(BIN)/python benchmarks/export_latency.py
	$(BIN)/python benchmarks/device_profile.py

ALL   := --rounds 320 --set run.evaluate_every=3 --set run.checkpoint_every=12
TUNED := $(ALL) --learning-rates 0.01,0.03,0.05,0.1,0.2,0.4
PAPER := --methods anycostfl,anycostfl+,fedavg,fedhq,heterofl,qsgd,stc,uveqfed
CIFAR := cifar10-iid --rounds 60 --set run.evaluate_every=5 --set run.checkpoint_every=5

paper: $(READY) ## The paper's whole evaluation (days on two cores; resumes where it stopped)
	$(BIN)/anycostfl compare fmnist-iid $(TUNED) --trial 12 $(PAPER)
	$(BIN)/anycostfl compare fmnist-noniid $(TUNED) --trial 24 $(PAPER)
	$(BIN)/anycostfl compare fmnist-iid $(TUNED) --trial 12 --methods anycostfl,stc,fedhq --seeds 3
	$(BIN)/anycostfl compare $(CIFAR) --methods anycostfl,anycostfl+,stc,heterofl,fedavg
	for data in fmnist-iid fmnist-noniid; do \
	  $(BIN)/anycostfl compare $$data $(ALL) $(PAPER) --set training.momentum=0.9 --out runs/momentum-$$data && \
	  $(BIN)/anycostfl compare $$data $(ALL) $(PAPER) || exit; done
	for kind in ablation compute radio; do \
	  $(BIN)/anycostfl sweep $$kind fmnist-iid $(TUNED) --trial 12 || exit; done
	$(BIN)/anycostfl sweep widths fmnist-iid $(TUNED) --trial 12 --show
	$(BIN)/anycostfl sweep widths $(CIFAR) --show

testbed: $(READY) ## Eight devices with links, quotas and memory of their own: are budgets kept? (root)
	$(BIN)/python -m testbed

drill: $(READY) ## Kill, fill, damage, jump, stall, soak: what is lost? (a quarter of an hour)
	$(BIN)/python -m drills

lock: $(READY) ## Write the hashes of everything that is installed (supply/requirements.lock)
	$(BIN)/python supply/lock.py

sbom: $(READY) ## Write a bill of materials of the environment (sbom.json, CycloneDX)
	$(BIN)/python supply/sbom.py > sbom.json

clean: ## Remove the environment and all caches
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
