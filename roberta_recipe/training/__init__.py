"""Models, losses and the two trainers.

arguments (TrainingArguments), pretraining (flags of train_mlm.py and what is built from them), modeling (masked-LM head
and loss), heads (a checkpoint to fine-tune), batch (accumulation), environment (launcher, output folder), checkpoint
(which checkpoint to resume from), durable_trainer (what both trainers share), mlm_trainer, finetune_trainer, and
trainer_internals (what all of it takes for granted of Hugging Face's `Trainer`).
"""
