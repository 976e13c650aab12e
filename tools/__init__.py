"""Further commands (`python tools/X.py --help`). They import the library; the library never imports them."""
