"""SQuAD 2.0's answerability classifier beside the span head (paper, section 5.2).

The model is the stock question-answering class with one more module. Its checkpoint is the stock one plus the file
`FILE` with the classifier's weights.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import QuestionAnsweringModelOutput
from transformers.utils import cached_file

from roberta_recipe.errors import InputError
from roberta_recipe.log import logger

FILE = "answerability.safetensors"
_PREFIX = "answerability."  # in the model's state dict


@dataclass
class JointOutput(QuestionAnsweringModelOutput):
    """The stock output and the classifier's logit."""

    answerable: torch.Tensor | None = None  # (batch,)


class Answerability(torch.nn.Module):
    """(batch, seq_len, hidden) -> (batch,) logit that the question is answerable: RoBERTa's classification head with
    one output, on the first token."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.dense = torch.nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = torch.nn.Dropout(getattr(config, "hidden_dropout_prob", 0.1))
        self.out_proj = torch.nn.Linear(config.hidden_size, 1)
        for layer in (self.dense, self.out_proj):
            torch.nn.init.normal_(layer.weight, std=getattr(config, "initializer_range", 0.02))
            torch.nn.init.zeros_(layer.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.dense(self.dropout(hidden[:, 0])))
        return self.out_proj(self.dropout(hidden)).squeeze(-1)


class WithAnswerability:
    """Mixin that adds the classifier to a stock question-answering class (`joint_class`)."""

    _keys_to_ignore_on_load_missing: ClassVar = [rf"^{_PREFIX}"]  # stored in `FILE`

    def __init__(self, config: PreTrainedConfig, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.answerability = Answerability(config)

    def _init_weights(self, module: torch.nn.Module) -> None:
        """The stock initialisation; the classifier initialises its weights in its constructor, after the rest."""
        own = self.answerability.modules() if hasattr(self, "answerability") else ()
        if module not in own:
            super()._init_weights(module)

    def forward(self, *args, **kwargs) -> JointOutput:
        """The stock output and `answerable` (batch,)."""
        output = super().forward(*args, **{**kwargs, "output_hidden_states": True})
        return JointOutput(**output, answerable=self.answerability(output.hidden_states[-1]))

    def save_pretrained(self, save_directory, is_main_process=True, state_dict=None, **kwargs) -> None:
        """Save the stock checkpoint, and `FILE` beside it."""
        state = self.state_dict() if state_dict is None else state_dict
        stock = {name: tensor for name, tensor in state.items() if not name.startswith(_PREFIX)}
        if is_main_process:
            own = {name.removeprefix(_PREFIX): state[name].detach().cpu() for name in state.keys() - stock.keys()}
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            save_file(own, Path(save_directory, FILE))
        super().save_pretrained(save_directory, is_main_process=is_main_process, state_dict=stock, **kwargs)

    @classmethod
    def from_pretrained(cls, name: str | Path, *args, fresh_classifier: bool = False, **kwargs) -> Any:
        """Load the stock checkpoint, and the classifier from `FILE` unless `fresh_classifier`. Raises `InputError` if
        `FILE` is missing, damaged or of another size."""
        loaded = super().from_pretrained(name, *args, **kwargs)
        model = loaded[0] if kwargs.get("output_loading_info") else loaded
        # the loader leaves the classifier's weights uninitialised
        model.answerability = Answerability(model.config).to(model.device, model.dtype).eval()
        if not fresh_classifier:
            file = cached_classifier(name, **kwargs)
            try:
                model.answerability.load_state_dict(load_file(file or Path(name, FILE)))
            except (OSError, RuntimeError, SafetensorError) as error:
                raise InputError(
                    f"no classifier for this model in {Path(name, FILE)}: {error}; copy the checkpoint again"
                ) from None
        return loaded


def cached_classifier(name: str | Path, **kwargs) -> str | None:
    """Local path of a checkpoint's `FILE`, None without it; `name` and `kwargs` as in `from_pretrained`."""
    source = {key: kwargs[key] for key in ("cache_dir", "revision", "token") if key in kwargs}
    optional = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    return cached_file(str(name), FILE, **source, **optional)


@functools.cache
def joint_class(stock: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """`stock` with the classifier, under the same name: config.json names it as the architecture."""
    return type(stock.__name__, (WithAnswerability, stock), {})


class AutoModelWithAnswerability:
    """`AutoModelForQuestionAnswering` with the classifier."""

    @staticmethod
    def from_config(config: PreTrainedConfig, **kwargs) -> PreTrainedModel:
        logger.info("Classifier  fresh")
        return joint_class(_stock_class(config))._from_config(config, **kwargs)

    @staticmethod
    def from_pretrained(name: str | Path, *, config: PreTrainedConfig, **kwargs) -> Any:
        """Load a checkpoint, with its classifier or, without one, a fresh classifier."""
        fresh = cached_classifier(name, **kwargs) is None
        logger.info(f"Classifier  {'fresh' if fresh else 'from the checkpoint'}")
        cls = joint_class(_stock_class(config))
        return cls.from_pretrained(name, config=config, fresh_classifier=fresh, **kwargs)


def _stock_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The question-answering class of a config. Raises `ValueError` if transformers has none, and `InputError` for a
    decoder: its first token does not attend to the others."""
    if type(config) not in MODEL_FOR_QUESTION_ANSWERING_MAPPING:
        raise ValueError(f"transformers has no question-answering head for a {config.model_type!r} model")
    is_decoder = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) not in MODEL_FOR_MASKED_LM_MAPPING
    if config.is_encoder_decoder or is_decoder:
        raise InputError(
            f"no_answer=classifier reads the first token, which attends to no other in a {config.model_type!r} model: "
            "--no_answer null_score"
        )
    return MODEL_FOR_QUESTION_ANSWERING_MAPPING[type(config)]
