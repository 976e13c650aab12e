"""Publishing: uploads to the Hub, model cards, plots, Markdown tables."""
