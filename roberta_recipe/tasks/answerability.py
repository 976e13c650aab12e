"""SQuAD 2.0's answerability classifier, in addition to the span head (paper, section 5.2).

The model is the stock question-answering class with one more module, `answerability`; the stock class ignores its
weights in a checkpoint.
"""

from collections import OrderedDict
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import QuestionAnsweringModelOutput
from transformers.models.auto import modeling_auto as auto

from roberta_recipe.errors import InputError


@dataclass
class JointOutput(QuestionAnsweringModelOutput):
    """Start and end logits, and the classifier's logit."""

    answerable: torch.Tensor | None = None  # (batch,)


class WithAnswerability:
    """Mixin that adds the classifier to a stock question-answering class (`joint_class`): RoBERTa's classification head
    with one output, the logit that the question is answerable."""

    def __init__(self, config: PreTrainedConfig, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        size, dropout = config.hidden_size, torch.nn.Dropout(getattr(config, "hidden_dropout_prob", 0.1))
        dense, out_proj = torch.nn.Linear(size, size), torch.nn.Linear(size, 1)
        layers = OrderedDict(before=dropout, dense=dense, tanh=torch.nn.Tanh(), dropout=dropout, out_proj=out_proj)
        self.answerability = torch.nn.Sequential(layers)
        self.post_init()

    def forward(self, *args, **kwargs) -> JointOutput:
        """The stock logits and `answerable` (batch,); no hidden states, which accelerate would copy to fp32."""
        output = super().forward(*args, **{**kwargs, "output_hidden_states": True})
        answerable = self.answerability(output.hidden_states[-1][:, 0])[:, 0]
        return JointOutput(start_logits=output.start_logits, end_logits=output.end_logits, answerable=answerable)


def joint_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The stock question-answering class of a config with the classifier, under the same name: config.json names it as
    the architecture. Raises `InputError` if there is none, and for a decoder: its first token does not attend to the
    others."""
    kind = type(config)
    if kind not in auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING:
        raise InputError(f"transformers has no question-answering head for a {config.model_type!r} model")
    is_decoder = kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING and kind not in auto.MODEL_FOR_MASKED_LM_MAPPING
    if config.is_encoder_decoder or (is_decoder and getattr(config, "attn_type", "uni") == "uni"):  # XLNet's is "bi"
        raise InputError(
            f"no_answer=classifier reads the first token, which attends to no other in a {config.model_type!r} model: "
            "use --no_answer null_score"
        )
    stock = auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING[kind]
    return type(stock.__name__, (WithAnswerability, stock), {})
