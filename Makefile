# A thin face of the command line in launch/cli.py. Each target sets up what it needs.

# Values are taken as they are typed and passed to the command line through the environment: neither make nor a shell
# expands them, so quotes, blanks and dollar signs arrive. NAME is never taken from the environment: some systems set it.
VALUES := NAME SCALE SET RUN A B CHECKPOINT LAUNCHER CLUSTER FORMAT TO TEXT ADDRESS STORAGE JOB DEVICE
NAME   :=
GIVEN  := $(strip $(foreach .each,$(VALUES),$(if $(filter command,$(origin $(.each))),$(.each))))
$(foreach value,$(VALUES),$(eval override $(value) := $$(value $(value))))
export $(VALUES)

TARGETS := help experiment resume checkpoints plan table bench sweep report runs score sync translate generate export check diff list settings submit gpu-check doctor test test-faults lint clean
KNOWN   := $(VALUES) BEST REMEASURE PYTHON
OTHERS  := $(sort $(filter-out $(KNOWN),$(foreach .each,$(.VARIABLES),$(if $(filter command,$(origin $(.each))),$(.each)))))
SPELLED  = $(strip $(foreach .each,$(KNOWN),$(if $(filter $(OTHERS),$(shell echo $(.each) | tr A-Z a-z)),$(.each))))
.comma  := ,
ifneq ($(OTHERS),)
$(error make knows no variable $(OTHERS); $(if $(SPELLED),write $(SPELLED),it knows $(KNOWN)$(.comma) SET takes several settings in quotes (SET="train.steps=50 pipeline.stages=4")$(.comma) and variables of the environment stand before make))
endif
ifneq ($(filter-out $(TARGETS),$(MAKECMDGOALS)),)
$(error make has no target $(filter-out $(TARGETS),$(MAKECMDGOALS)); values with blanks stand in quotes, such as SET="train.steps=50 pipeline.stages=4"; `make help` lists the targets)
endif

ifneq ($(GIVEN),)
.goals  := $(or $(MAKECMDGOALS),$(error name a target too, such as make experiment NAME=t128_6b))
.used   := $(shell awk -v goals=" $(.goals) " '/^[a-z]/ { own = index(goals, " " substr($$0, 1, index($$0, ":") - 1) " ") } \
	/^\t@[$$]/ && own { gsub(/[^A-Z]+/, " "); print }' $(firstword $(MAKEFILE_LIST)))
.unused := $(filter-out $(.used),$(GIVEN))
ifneq ($(.unused),)
$(error make $(.goals) takes no $(.unused); it takes $(or $(filter $(.used),$(VALUES)),no values))
endif
endif

PYTHON ?= python3

VENV  := .venv
READY := $(VENV)/installed
GPIPE := $(VENV)/bin/gpipe

.DEFAULT_GOAL := help
.PHONY: $(TARGETS)

help:
	@echo "GPipe suite: pipeline-parallel training of giant sequence models"
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' Makefile
	@echo 'variables: SCALE=auto|paper|laptop|slice LAUNCHER=ray|local|env REMEASURE=1'

experiment: $(READY) ## run one: NAME=t128_6b SCALE=laptop SET="train.steps=50"
	@$(GPIPE) experiment --scale "$${SCALE:-auto}" --set "$$SET" --launcher "$${LAUNCHER:-ray}" -- "$$NAME"

resume: $(READY) ## continue a run, with any K and R: RUN= CHECKPOINT= SET=
	@$(GPIPE) resume --set "$$SET" --checkpoint "$$CHECKPOINT" --launcher "$${LAUNCHER:-ray}" -- "$$RUN"

checkpoints: $(READY) ## those of a run, with every file verified: RUN=
	@$(GPIPE) checkpoints -- "$$RUN"

plan: $(READY) ## step time and memory of a run: NAME= CLUSTER=2x8xH100 BEST=1
	@$(GPIPE) plan --cluster "$$CLUSTER" --scale "$${SCALE:-auto}" --set "$$SET" --format "$${FORMAT:-text}" $(if $(filter-out 0,$(BEST)),--best) -- "$$NAME"

table: $(READY) ## a table of the paper: NAME=1 to 5, breakdown (RUN=)
	@$(GPIPE) table --run "$$RUN" -- "$$NAME"

bench: $(READY) ## the suite beside other pipelines: NAME=
	@$(VENV)/bin/python -m tests.bench "$$NAME"

sweep: $(READY) ## a family of runs and its report: NAME= SCALE=
	@$(GPIPE) sweep --scale "$${SCALE:-auto}" --launcher "$${LAUNCHER:-local}" -- "$$NAME"

report: $(READY) ## the page of a run: RUN=; the report of a sweep: NAME=
	@$(GPIPE) report --scale "$${SCALE:-auto}" --run "$$RUN" -- "$$NAME"

runs: $(READY) ## the runs here, newest first; one of them: RUN=
	@$(GPIPE) runs -- "$${RUN:-$$NAME}"

score: $(READY) ## BLEU and chrF of a trained run: RUN= SET="score.beam=1"
	@$(GPIPE) score --set "$$SET" --checkpoint "$$CHECKPOINT" -- "$$RUN"

sync: $(READY) ## upload what runs recorded for wandb offline: RUN=
	@$(GPIPE) sync -- "$$RUN"

translate: $(READY) ## translate by a trained run: RUN= TO=de TEXT="..."
	@$(GPIPE) translate --to "$$TO" --checkpoint "$$CHECKPOINT" -- "$$RUN" "$$TEXT"

generate: $(READY) ## continue a text by a trained language model: RUN= TEXT="..."
	@$(GPIPE) generate --checkpoint "$$CHECKPOINT" -- "$$RUN" "$$TEXT"

export: $(READY) ## a trained model as safetensors: RUN=
	@$(GPIPE) export --checkpoint "$$CHECKPOINT" -- "$$RUN"

check: $(READY) ## do pipelines train as plain PyTorch, to the bit? NAME=
	@$(GPIPE) check --scale "$${SCALE:-auto}" --set "$$SET" -- "$$NAME"

diff: $(READY) ## the first tensor that differs: RUN="a b", or NAME= A= B=
	@$(GPIPE) diff --scale "$${SCALE:-auto}" --set "$$SET" --a "$$A" --b "$$B" --run "$$RUN" -- "$$NAME"

list: $(READY) ## the experiments, with their sizes in the paper
	@$(GPIPE) list

settings: $(READY) ## every setting, with its value in an experiment: NAME=
	@$(GPIPE) settings --scale "$${SCALE:-auto}" --set "$$SET" --format "$${FORMAT:-text}" -- "$$NAME"

submit: $(READY) ## run as a job: NAME= or RUN=, ADDRESS=http://head:8265
	@$(GPIPE) submit --address "$$ADDRESS" --scale "$${SCALE:-auto}" --set "$$SET" --storage "$$STORAGE" --job "$$JOB" --run "$$RUN" -- "$$NAME"

gpu-check: $(READY) ## the first hour on a GPU: DEVICE=cuda (docs/gpu.md)
	@$(VENV)/bin/python -m tests.gpu --device "$${DEVICE:-cuda}"

doctor: $(READY) ## examine this machine, or a Ray cluster: ADDRESS= STORAGE=
	@$(GPIPE) doctor --address "$$ADDRESS" --storage "$$STORAGE"

test: $(READY) ## run the tests (also: test-faults, lint, clean)
	@$(VENV)/bin/python -m pytest

test-faults: $(READY)
	@$(VENV)/bin/python -m tests.slow

lint: $(READY)
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is needed, this is {v[0]}.{v[1]}; name another with PYTHON=")'
	@echo "setting up $(VENV): about two minutes and 2 GB, once"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)
