"""Former package of the commands, which are scripts in tools/ and experiments/ now."""

import sys

if sys.argv[:1] == ["-m"]:  # while Python looks for the module that `python -m` names
    print("this command has moved: python tools/X.py, or python experiments/run.py, in a clone", file=sys.stderr)
    sys.exit(2)
