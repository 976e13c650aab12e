"""Trainers, their arguments, optimizers and checkpoints.

arguments (all flags), batch (gradient accumulation), launching (checks, processes), pretraining (the steps of
train_mlm.py), optimizers (and schedules), durable_trainer (base class of both trainers), mlm_trainer, finetune_trainer,
checkpoint (output folder, resuming), stopping (signals, time limit, loss spikes), data_loading, data_workers, monitor.
"""
