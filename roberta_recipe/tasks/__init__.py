"""Tasks (paper, section 5): GLUE, SQuAD, RACE, NER, own tables, BLiMP. `protocol` runs seeds, `summaries` reports."""
