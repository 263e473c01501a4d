# A thin face of the command line in launch/cli.py. Each target sets up what it needs.

# Values are taken as they are typed and passed to the command line through the environment: neither make nor a shell
# expands them, so quotes, blanks and dollar signs arrive. NAME is never taken from the environment: some systems set it.
VALUES := NAME SCALE SET RUN A B CHECKPOINT LAUNCHER CLUSTER FORMAT TO TEXT ADDRESS STORAGE JOB DEVICE
NAME   :=
$(foreach value,$(VALUES),$(eval override $(value) := $$(value $(value))))
export $(VALUES)

TARGETS := help experiment resume checkpoints plan table bench sweep report runs watch score sync translate generate export check diff list settings submit jobs logs stop fetch gpu-check doctor test test-faults lint clean
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

PYTHON ?= python3

VENV  := .venv
READY := $(VENV)/installed
GPIPE := $(VENV)/bin/gpipe

.DEFAULT_GOAL := help
.PHONY: $(TARGETS)

help: ## show this
	@echo "GPipe suite: pipeline-parallel training of giant sequence models"
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' Makefile
	@echo 'variables: NAME=t128_6b SCALE=auto|paper|laptop|slice SET="train.steps=50" RUN=folder-or-id LAUNCHER=ray|local|env REMEASURE=1'

experiment: $(READY) ## run an experiment: NAME=, SCALE=, SET=; without NAME, list them
	@$(GPIPE) experiment --scale "$${SCALE:-auto}" --set "$$SET" --launcher "$${LAUNCHER:-ray}" -- "$$NAME"

resume: $(READY) ## resume a run: RUN=, SET= (another pipeline.stages or pipeline.replicas, say), CHECKPOINT=best|latest|<step>
	@$(GPIPE) resume --set "$$SET" --checkpoint "$$CHECKPOINT" --launcher "$${LAUNCHER:-ray}" -- "$$RUN"

checkpoints: $(READY) ## list the checkpoints of a run; verifies every file: RUN=
	@$(GPIPE) checkpoints -- "$$RUN"

plan: $(READY) ## estimate a run: NAME= (or transformer_<L>, amoebanet_<L>x<D>), CLUSTER=2x8xH100, BEST=1, FORMAT=json, SCALE=, SET=; without NAME: a list
	@$(GPIPE) plan --cluster "$$CLUSTER" --scale "$${SCALE:-auto}" --set "$$SET" --format "$${FORMAT:-text}" $(if $(filter-out 0,$(BEST)),--best) -- "$$NAME"

table: $(READY) ## one of the paper's tables: NAME=1, 2, 3, 4, 5, breakdown (RUN=); without NAME, list them
	@$(GPIPE) table --run "$$RUN" -- "$$NAME"

bench: $(READY) ## the suite beside other pipelines: NAME=sleeping, layers, translation, replicas, overhead, prediction; without NAME, list them
	@$(VENV)/bin/python -m tests.bench "$$NAME"

sweep: $(READY) ## a family of runs and its report: NAME=depth_width, capacity, batch_size, temperature, bilingual, low_resource, romance, trainability, transfer; SCALE=laptop, laptop_long, tiny, paper; without NAME, list them and their scales
	@$(GPIPE) sweep --scale "$${SCALE:-auto}" --launcher "$${LAUNCHER:-local}" -- "$$NAME"

report: $(READY) ## the report of a sweep: NAME=, SCALE=; without NAME, of all; or the page of a run: RUN=; of several compared: RUN="a b"
	@$(GPIPE) report --scale "$${SCALE:-auto}" --run "$$RUN" -- "$$NAME"

runs: $(READY) ## the runs here, newest first: NAME= (part of a name), or RUN= for one
	@$(GPIPE) runs -- "$${RUN:-$$NAME}"

watch: $(READY) ## follow a run that trains, from another terminal: RUN=
	@$(GPIPE) watch -- "$$RUN"

score: $(READY) ## BLEU and chrF of a trained run, a language and direction: RUN=, CHECKPOINT=, SET="score.beam=1 score.max_pairs=100"
	@$(GPIPE) score --set "$$SET" --checkpoint "$$CHECKPOINT" -- "$$RUN"

sync: $(READY) ## upload what runs recorded for wandb offline: RUN=; all of them without
	@$(GPIPE) sync -- "$$RUN"

translate: $(READY) ## translate a text by a trained run's model: RUN=, CHECKPOINT=best|latest|<step>, TO=de, TEXT="..."
	@$(GPIPE) translate --to "$$TO" --checkpoint "$$CHECKPOINT" -- "$$RUN" "$$TEXT"

generate: $(READY) ## continue a text by a trained language model: RUN=, CHECKPOINT=, TEXT="..."; options: gpipe generate --help
	@$(GPIPE) generate --checkpoint "$$CHECKPOINT" -- "$$RUN" "$$TEXT"

export: $(READY) ## a trained run's model as model.safetensors, tokenizer and config.json: RUN=, CHECKPOINT=
	@$(GPIPE) export --checkpoint "$$CHECKPOINT" -- "$$RUN"

check: $(READY) ## does an experiment or a model of your own train in pipelines as in plain PyTorch, to the bit or up to rounding? NAME=, SET=
	@$(GPIPE) check --scale "$${SCALE:-auto}" --set "$$SET" -- "$$NAME"

diff: $(READY) ## the first tensor by which two runs differ: RUN="a b"; or one run, trained again: RUN=; or one experiment with two settings: NAME=, A=plain (PyTorch without a pipeline), B="pipeline.stages=2", SET= for both
	@$(GPIPE) diff --scale "$${SCALE:-auto}" --set "$$SET" --a "$$A" --b "$$B" --run "$$RUN" -- "$$NAME"

list: $(READY) ## list the experiments
	@$(GPIPE) list

settings: $(READY) ## print every setting, with its value in an experiment: NAME=, SCALE=, SET=, FORMAT=markdown (docs/settings.md)
	@$(GPIPE) settings --scale "$${SCALE:-auto}" --set "$$SET" --format "$${FORMAT:-text}" -- "$$NAME"

submit: $(READY) ## run it as a job on a Ray cluster: NAME= (or RUN=, there), ADDRESS=http://head:8265, STORAGE=, SCALE=, SET=, JOB= (docs/cluster.md)
	@$(GPIPE) submit --address "$$ADDRESS" --scale "$${SCALE:-auto}" --set "$$SET" --storage "$$STORAGE" --job "$$JOB" --run "$$RUN" -- "$$NAME"

jobs: $(READY) ## the jobs on a cluster: ADDRESS=
	@$(GPIPE) jobs --address "$$ADDRESS"

logs: $(READY) ## follow a job to its end: JOB=, ADDRESS=
	@$(GPIPE) logs --address "$$ADDRESS" -- "$$JOB"

stop: $(READY) ## end a job: JOB=, ADDRESS=; make submit RUN= resumes its run
	@$(GPIPE) stop --address "$$ADDRESS" -- "$$JOB"

fetch: $(READY) ## copy the files of a job, without checkpoints, to runs/: JOB=, ADDRESS=
	@$(GPIPE) fetch --address "$$ADDRESS" -- "$$JOB"

gpu-check: $(READY) ## the first hour on a GPU: gradients, an update on all GPUs, a step's time and memory, K = 2; DEVICE=cuda|cpu (docs/gpu.md)
	@$(VENV)/bin/python -m tests.gpu --device "$${DEVICE:-cuda}"

doctor: $(READY) ## examine this machine, or a Ray cluster and its links: ADDRESS=http://head:8265 or host:port, STORAGE=folder-or-URL
	@$(GPIPE) doctor --address "$$ADDRESS" --storage "$$STORAGE"

test: $(READY) ## run the tests
	@$(VENV)/bin/python -m pytest

test-faults: $(READY) ## run the slow tests: kills, torn files, full disks, clusters; over two hours; they write docs/results/test-faults.md
	@$(VENV)/bin/python -m tests.slow

lint: $(READY) ## ruff and mypy
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy

clean: ## remove the virtual environment and the caches, not the runs
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is needed, this is {v[0]}.{v[1]}; name another with PYTHON=")'
	@echo "setting up $(VENV): about two minutes and 2 GB, once"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)
