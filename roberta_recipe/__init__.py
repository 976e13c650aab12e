"""The mechanisms of the RoBERTa paper (arXiv 1907.11692), in packages that name the architecture.

data:        sources -> documents -> sentences -> token ids -> blocks -> order -> masks
model:       masked LM, objectives, heads, attention, initialization, weights
training:    batch arithmetic, optimizers, checkpoints, the two trainers
tasks:       the fine-tuning protocol; GLUE, SQuAD, RACE and their metrics
publishing:  the Hub, the model card, plots

Imports go one way, in this order; the modules beside the packages are used by all of them.
"""
