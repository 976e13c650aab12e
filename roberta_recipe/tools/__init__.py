"""Commands beside the four scripts: `python -m roberta_recipe.tools.X --help`."""
