"""Fine-tuning (paper, section 5): the protocol of the three scripts, and a module or more for each benchmark.

protocol (a run for each seed, the best epoch, the summary), seeds (median and spread), stored_scores (of test sets);
glue (tasks, TSV files), with qnli_ranking and wsc (tasks in a form of their own), glue_scores and glue_metric; squad
(windows, spans), squad_files, squad_scores, squad_metric, answerability; race.
"""
