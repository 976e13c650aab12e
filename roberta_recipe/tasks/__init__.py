"""Fine-tuning (paper, section 5): protocol (one run per seed, best epoch) and summaries (median, spread, test scores);
glue with glue_scores, glue_metric, qnli_ranking, wsc and wnli; squad with squad_files, squad_scores, squad_metric and
answerability; race; blimp with pseudo_likelihood."""
