"""Models, losses and the two trainers.

arguments (TrainingArguments), pretraining (flags of train_mlm.py and what is built from them), modeling (masked LM,
FLOPs), objectives and optimizers (a declaration each), heads (a checkpoint to fine-tune), batch (accumulation),
environment (launcher, output folder), checkpoint (which checkpoint to resume from), durable_trainer (what both trainers
share), mlm_trainer, finetune_trainer, stopping (endings), data_workers and data_loading.
"""
