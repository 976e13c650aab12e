"""Experiment lists: runner, table, checks (`python experiments/run.py --help`)."""
