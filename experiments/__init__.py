"""Lists of experiments: a runner, its tables, its statistics (`python experiments/run.py --help`)."""
