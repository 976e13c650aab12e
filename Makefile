# Every target sets up what it needs; `make setup` alone makes the virtual environment.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
ACCELERATE = $(BIN)/accelerate launch

.PHONY: help setup demo test lint tokenizer pretrain glue glue-all glue-submission squad race push report bench contamination clean

help:             ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 18

setup: $(VENV)/.installed  ## virtual environment with requirements.txt

$(VENV)/.installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -r requirements.txt
	touch $@

demo: setup       ## a small RoBERTa from raw text: tokenizer, pretraining, predictions (made anew in runs/demo)
	rm -rf runs/demo tokenizer/docstrings
	$(ACCELERATE) train_mlm.py

test: setup       ## the whole suite, CPU, offline
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n auto --dist worksteal

lint: setup       ## ruff, checks and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

tokenizer: setup  ## 50,265-entry tokenizer: make tokenizer CORPUS=presets/corpus/roberta_160gb.yaml
	$(BIN)/python tokenizer/train_tokenizer.py --corpus $(or $(CORPUS),presets/corpus/roberta_160gb.yaml) --output_dir $(or $(OUT),tokenizer/roberta)

pretrain: setup   ## pretraining: make pretrain CONFIG=presets/mlm/roberta_base.yaml ARGS="--max_steps 1000"
	$(ACCELERATE) train_mlm.py --config $(or $(CONFIG),presets/mlm/roberta_base.yaml) $(ARGS)

# MODEL (checkpoint), DATA (folder of the official files), ARGS (any flags); TASK and SWEEP=1 (the paper's grid) for GLUE
CHOSEN = $(if $(MODEL),--model_name_or_path $(MODEL)) $(if $(DATA),--data_dir $(DATA)) $(ARGS)
GLUE = $(ACCELERATE) finetune_glue.py $(if $(SWEEP),--sweep) $(CHOSEN)
GLUE_TASKS = mnli qnli qqp rte sst2 mrpc cola stsb

glue: setup       ## five seeds of a GLUE task, and their median: make glue TASK=rte MODEL=runs/roberta_base
	$(GLUE) --config presets/glue/$(or $(TASK),rte).yaml

glue-all: setup   ## every task but WNLI (which needs WSC: make glue TASK=wnli), then the row of Table 5
	for task in $(GLUE_TASKS); do $(GLUE) --config presets/glue/$$task.yaml || exit $$?; done
	$(BIN)/python finetune_glue.py --collect runs/glue $(if $(SWEEP),--sweep)

glue-submission: setup  ## runs/glue/submission.zip for gluebenchmark.com, from tasks run with ARGS=--do_predict
	$(BIN)/python finetune_glue.py --collect runs/glue --do_predict $(if $(SWEEP),--sweep)

squad: setup      ## five seeds of SQuAD: make squad VERSION=2.0 MODEL=runs/roberta_base
	$(ACCELERATE) finetune_squad.py --config presets/squad/v$(or $(VERSION),1.1).yaml $(CHOSEN)

race: setup       ## five seeds of RACE: make race MODEL=runs/roberta_base (RECIPE=fairseq: the authors' commands)
	$(ACCELERATE) finetune_race.py --config presets/race/$(or $(RECIPE),paper).yaml $(CHOSEN)

push: setup       ## a finished run to the Hub, with its card: make push MODEL=runs/roberta_base REPO=me/roberta_base
	$(BIN)/python -m roberta_recipe.hub --model $(MODEL) --repo $(REPO) $(ARGS)

report: setup     ## tables, curves and page of the records in results/: make report ARGS="--add runs/roberta_base"
	$(BIN)/python results/report.py $(ARGS)

bench: setup      ## speed of the parts beside the stock Hugging Face path
	$(BIN)/python benchmarks/data_pipeline.py
	$(BIN)/python benchmarks/mlm_step.py

# CORPUS (preset), and what to look for in ARGS: --glue_dir glue --squad_file dev-v1.1.json --race_dir RACE
contamination: setup  ## n-grams of the evaluation sets in the pretraining corpus
	$(BIN)/python benchmarks/contamination.py --corpus $(or $(CORPUS),presets/corpus/roberta_160gb.yaml) $(ARGS)

clean:            ## caches and the demonstration's output
	rm -rf runs/demo tokenizer/docstrings .pytest_cache .hypothesis .ruff_cache
