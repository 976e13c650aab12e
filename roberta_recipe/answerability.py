"""The binary classifier beside the span head for SQuAD 2.0 (paper, section 5.2): is the question answerable?

Its weights lie beside the checkpoint (`FILE`), so that the rest is what `AutoModelForQuestionAnswering` loads.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.modeling_outputs import QuestionAnsweringModelOutput
from transformers.utils import cached_file

from roberta_recipe.args import InputError, path_or_hub_id

logger = logging.getLogger("recipe")

FILE = "answerability.safetensors"
_NAME = "answerability"


@dataclass
class JointOutput(QuestionAnsweringModelOutput):
    """With the classifier's logit; a field of its own, as data parallelism takes outputs apart by their fields."""

    answerable: torch.Tensor | None = None  # (batch,)


class Answerability(torch.nn.Module):
    """(batch, seq_len, hidden) -> (batch,) logit that the question is answerable, from the first token: the shape of
    RoBERTa's classification head with one output."""

    def __init__(self, hidden_size: int, dropout: float, initializer_range: float):
        super().__init__()
        self.dense = torch.nn.Linear(hidden_size, hidden_size)
        self.dropout = torch.nn.Dropout(dropout)
        self.out_proj = torch.nn.Linear(hidden_size, 1)
        for layer in (self.dense, self.out_proj):
            torch.nn.init.normal_(layer.weight, std=initializer_range)
            torch.nn.init.zeros_(layer.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.dense(self.dropout(hidden[:, 0])))
        return self.out_proj(self.dropout(hidden)).squeeze(-1)


def attach(model: PreTrainedModel, dropout: float | None, stored: str | None = None) -> PreTrainedModel:
    """Give a question-answering model the classifier; called with `output_hidden_states=True`, its output then has
    `answerable` (batch,). Weights are those beside the checkpoint `stored` where it has them, else fresh."""
    config = model.config
    dropout = getattr(config, "hidden_dropout_prob", 0.1) if dropout is None else dropout
    model.add_module(_NAME, Answerability(config.hidden_size, dropout, getattr(config, "initializer_range", 0.02)))
    model.register_forward_hook(_judge)  # inside of forward, where data parallelism looks for parameters
    model._keys_to_ignore_on_save = {name for name in model.state_dict() if name.startswith(f"{_NAME}.")}
    optional = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    file = stored and cached_file(str(path_or_hub_id(stored)), FILE, **optional)
    if file:
        load(model, Path(file).parent)
    logger.info(f"Classifier  {'kept' if file else 'fresh'}")
    return model


def _judge(model, inputs, output):
    return JointOutput(**output, answerable=model.answerability(output.hidden_states[-1]))


def is_attached(model: torch.nn.Module) -> bool:
    return hasattr(model, _NAME)


def save(model: torch.nn.Module, folder: str | Path) -> None:
    """Write the classifier's weights beside a checkpoint."""
    weights = model.answerability.state_dict()
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, Path(folder, FILE))


def load(model: torch.nn.Module, folder: str | Path) -> None:
    """Read them back. Raises `InputError` where they are missing or of another size."""
    try:
        model.answerability.load_state_dict(load_file(Path(folder, FILE)))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise InputError(f"no classifier for this model in {Path(folder, FILE)}: {error}") from None
