"""The two trainers, their arguments, optimizers and checkpoints.

arguments (TrainingArguments), pretraining (flags of train_mlm.py and what is built from them), optimizers (a
declaration each) and schedules, batch (accumulation), environment (launcher, output folder), checkpoint
(which checkpoint to resume from), durable_trainer (what both trainers share), mlm_trainer, finetune_trainer, stopping
(endings), data_workers and data_loading.
"""
