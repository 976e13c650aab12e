"""Commands beside the four scripts: `python tools/X.py --help`. They import the library, never the other way."""
