"""Fine-tuning tasks (paper, section 5): GLUE, SQuAD, RACE, BLiMP; `protocol` runs seeds, `summaries` their medians."""
