"""What a command says while it runs: our log lines and progress bars on stderr, the libraries' warnings only."""

import logging
import os
import sys
import warnings

import datasets
import transformers

from roberta_recipe.credentials import Redact

logger = logging.getLogger("recipe")


def is_first_process() -> bool:
    """Whether this is the process, of those that a launcher started, that writes files and log lines."""
    return os.environ.get("RANK", "0") == "0"


def set_up_logging() -> None:
    """Our log lines and progress bars on stderr; the libraries' only where something is wrong."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr, force=True)
    for name in (None, "transformers", "datasets", "huggingface_hub"):  # these libraries have handlers of their own
        for handler in logging.getLogger(name).handlers:
            if not any(isinstance(known, Redact) for known in handler.filters):
                handler.addFilter(Redact())
    logger.setLevel(logging.INFO if is_first_process() else logging.WARNING)
    transformers.utils.logging.set_verbosity_warning()
    datasets.utils.logging.set_verbosity_warning()
    transformers.utils.logging.disable_progress_bar()  # of loading and writing weights, not of training
    # DeepSpeed's own calls raise this warning at every use
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true but no accelerator")
