"""RoBERTa (arXiv 1907.11692) pretraining and fine-tuning.

data:        sources -> documents -> sentences -> token ids -> blocks -> order -> masks
model:       masked LM, objectives, heads, attention, initialization, weights
training:    batch arithmetic, optimizers, checkpoints, the two trainers
tasks:       the fine-tuning protocol; GLUE, SQuAD, RACE and their metrics
publishing:  the Hub, the model card, plots

Packages import only packages above them; the modules of this folder are used by all.
"""
