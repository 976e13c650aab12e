"""The mechanisms of the RoBERTa paper (arXiv 1907.11692), one module each."""
