# Every target sets up what it needs; `make setup` alone makes the virtual environment.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
PY      = $(BIN)/python
LAUNCH  = $(PY) tools/launch.py
SWEEPING = $(if $(filter-out 0 false no,$(SWEEP)),--sweep)

# Required variables of a target, with an example; make stops without them before it installs anything.
NEEDS_evaluate = MODEL=runs/roberta_base
NEEDS_blimp = MODEL=runs/roberta_base
NEEDS_push = MODEL=runs/roberta_base REPO=me/roberta_base
NEEDS_table = TABLE=masking
NEEDS_experiments = LIST=presets/experiments/rates.yaml
NEEDS_compare = A=runs/a B=runs/b
need = $(if $($(firstword $(subst =, ,$2))),,$(error $1 needs $(firstword $(subst =, ,$2)): make $1 $(NEEDS_$1)))
$(foreach target,$(MAKECMDGOALS),$(foreach example,$(NEEDS_$(target)),$(call need,$(target),$(example))))

.PHONY: help setup demo test test-slow lint tokenizer pack estimate pretrain evaluate glue glue-all glue-table glue-submission squad race ner blimp \
        table experiments compare contamination faults bench gpu report push clean

help:             ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 18

setup: $(VENV)/.installed  ## virtual environment with requirements.txt and this library: minutes, and on machines with a GPU several GB

$(VENV)/.installed: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	@echo "Installing requirements.txt: minutes, and several GB where PyPI's torch is the CUDA build"
	$(BIN)/pip install -r requirements.txt
	$(BIN)/pip install --no-build-isolation --no-deps -e .  # setuptools comes with torch
	touch $@

demo: setup       ## a small RoBERTa from raw text in minutes; resumes a stopped one; `make clean` removes it
	$(LAUNCH) train_mlm.py

test: setup       ## the whole suite, CPU, offline: eight to thirteen minutes on two cores
	HF_HUB_OFFLINE=1 $(PY) -m pytest -n auto --dist worksteal

test-slow: setup  ## the tests that `make test` skips: lists of experiments, a SLURM job, a restart by torchrun, the GPU script at tiny sizes, BLiMP under ZeRO 3
	HF_HUB_OFFLINE=1 $(PY) -m pytest -m slow

lint: setup       ## ruff: checks and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

tokenizer: setup  ## 50,265-entry tokenizer: make tokenizer CORPUS=presets/corpus/roberta_160gb.yaml
	$(PY) tokenizer/train_tokenizer.py --corpus "$(or $(CORPUS),presets/corpus/roberta_160gb.yaml)" --output_dir "$(or $(OUT),tokenizer/roberta)"

# CONFIG (preset of a pretraining run), ARGS (any flags)
PRESET = --config "$(or $(CONFIG),presets/mlm/roberta_base.yaml)"

pack: setup       ## the corpus tokenized and packed once: make pack ARGS="--token_cache DIR --num_proc 16"
	$(PY) tools/pack.py $(PRESET) $(ARGS)

estimate: setup   ## what pretraining costs: make estimate ARGS="--hardware 8xH200"
	$(PY) tools/estimate.py $(PRESET) $(ARGS)

pretrain: setup   ## pretraining: make pretrain CONFIG=presets/mlm/roberta_base.yaml ARGS="--max_steps 1000"
	$(LAUNCH) train_mlm.py $(PRESET) $(ARGS)

evaluate: setup   ## the loss of a checkpoint on its run's held-out text, or on text in ARGS: make evaluate MODEL=runs/mine
	$(PY) tools/evaluate.py $(if $(CONFIG),--config "$(CONFIG)") --model_name_or_path "$(MODEL)" $(ARGS)

# MODEL (checkpoint), DATA (folder of the official files), ARGS (any flags); TASK and SWEEP=1 (the paper's grid) for GLUE
CHOSEN = $(if $(MODEL),--model_name_or_path "$(MODEL)") $(if $(DATA),--data_dir "$(DATA)") $(ARGS)
GLUE = $(LAUNCH) finetune_glue.py $(SWEEPING) $(CHOSEN)
GLUE_TASKS = mnli qnli qqp rte sst2 mrpc cola stsb

glue: setup       ## five seeds of a GLUE task, and their median: make glue TASK=rte MODEL=runs/roberta_base
	$(GLUE) --config "presets/glue/$(or $(TASK),rte).yaml"

glue-all: setup   ## every task but WNLI (which needs WSC: make glue TASK=wnli), then the row of Table 5
	for task in $(GLUE_TASKS); do $(GLUE) --config presets/glue/$$task.yaml || exit $$?; done
	$(MAKE) glue-table

glue-table: setup  ## the finished GLUE tasks compared with the paper's Table 5
	$(PY) tools/glue_table.py --folder runs/glue $(SWEEPING)

glue-submission: setup  ## runs/glue/submission.zip for gluebenchmark.com, from tasks run with ARGS=--do_predict
	$(PY) tools/glue_table.py --folder runs/glue --submission $(SWEEPING)

squad: setup      ## five seeds of SQuAD: make squad VERSION=2.0 MODEL=runs/roberta_base
	$(LAUNCH) finetune_squad.py --config "presets/squad/v$(or $(VERSION),1.1).yaml" $(CHOSEN)

race: setup       ## five seeds of RACE: make race MODEL=runs/roberta_base (RECIPE=fairseq: the authors' commands)
	$(LAUNCH) finetune_race.py --config "presets/race/$(or $(RECIPE),paper).yaml" $(CHOSEN)

ner: setup        ## five seeds of token classification: make ner DATA=train.conll MODEL=runs/roberta_base
	$(LAUNCH) finetune_ner.py $(if $(MODEL),--model_name_or_path "$(MODEL)") $(if $(DATA),--train_file "$(DATA)") $(ARGS)

blimp: setup      ## BLiMP accuracy of a masked LM: make blimp MODEL=runs/roberta_base (DATA=folder of *.jsonl, or the Hub)
	$(PY) tools/blimp.py $(CHOSEN)

push: setup       ## a finished run to the Hub, with its card: make push MODEL=runs/roberta_base REPO=me/roberta_base
	$(PY) tools/push.py --model "$(MODEL)" --repo "$(REPO)" $(ARGS)

report: setup     ## tables, curves and page of the records in results/: make report ARGS="--add runs/roberta_base"
	$(PY) results/report.py $(ARGS)

# REPEATS, and in ARGS further flags of benchmarks/speed.py: --before DIR, --data_dir glue/RTE --model_name_or_path MODEL
bench: setup      ## every speed comparison with the stock path: make bench OUT=runs/bench.json
	$(PY) benchmarks/speed.py --output "$(or $(OUT),runs/bench.json)" --repeats $(or $(REPEATS),5) $(ARGS)

faults: setup     ## 1,000 random faults and their outcomes, one to two hours: make faults OUT=runs/faults.json ARGS="--seed 1"
	mkdir -p "$$(dirname "$(or $(OUT),runs/faults.json)")"
	$(PY) -m benchmarks.faults --output "$(or $(OUT),runs/faults.json)" $(ARGS)

# no setup, as it needs a network; ARGS=--finetune MINUTES=4 after it, ARGS=--dry_run lists the files to copy
gpu:              ## on one GPU without a network: base's profile, a small RoBERTa, fp16: make gpu MINUTES=8 OUT=runs/gpu
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu --minutes $(or $(MINUTES),8) --output_dir "$(or $(OUT),runs/gpu)" $(ARGS)

# masking, formats, batch, data (RoBERTa); spans, sbo (SpanBERT); embedding, sharing, sop (ALBERT). SCALE: demo, mini, paper
table: setup      ## a table of the papers, run and printed: make table TABLE=masking SCALE=mini ARGS="--set corpus=my_corpus.yaml"
	test "$(or $(SCALE),demo)" != demo || test -d tokenizer/docstrings || \
	    $(PY) tokenizer/train_tokenizer.py --corpus presets/corpus/docstrings.yaml --vocab_size 4096 --output_dir tokenizer/docstrings
	$(PY) experiments/run.py "presets/tables/$(TABLE).yaml" --scale "$(or $(SCALE),demo)" $(ARGS)

experiments: setup  ## a list of runs, and its table; stop and resume it at any time: make experiments LIST=my.yaml ARGS="--jobs 2"
	$(PY) experiments/run.py "$(LIST)" $(ARGS)

compare: setup    ## the first step where two runs differ, and its cause: make compare A=runs/a B=runs/b
	$(PY) tools/compare.py "$(A)" "$(B)"

# CORPUS (preset), and the evaluation sets in ARGS: --glue_dir glue --squad_file dev-v1.1.json --race_dir RACE
contamination: setup  ## n-grams of the evaluation sets in the pretraining corpus
	$(PY) tools/contamination.py --corpus "$(or $(CORPUS),presets/corpus/roberta_160gb.yaml)" $(ARGS)

clean:            ## caches and the demonstration's output
	rm -rf runs/demo tokenizer/docstrings .pytest_cache .hypothesis .ruff_cache
