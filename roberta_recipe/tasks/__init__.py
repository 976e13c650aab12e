"""Fine-tuning (paper, section 5): what the three scripts share, and what is particular about each benchmark.

protocol (arguments, runs over seeds, the best epoch, median and spread); glue (tasks, TSV files), with qnli_ranking and
wsc (tasks in a form of their own) and glue_metric; squad (windows, spans), squad_files, squad_scores, squad_metric,
answerability; race.
"""
