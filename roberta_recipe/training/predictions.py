"""What any masked LM says of chosen positions: the decoder, the large product with the vocabulary, runs on these alone.

For `tools/words.py` and other figures that compare models of any family; training has `modeling.RobertaForMaskedLM`.
"""

import torch
from transformers import AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase

from roberta_recipe.data import tokenization
from roberta_recipe.errors import InputError
from roberta_recipe.training import weights


def load(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A masked LM of any family, in evaluation mode, and its own tokenizer. Raises `InputError`."""
    tokenizer = tokenization.load_tokenizer(name, needed=("mask_token", "pad_token"))
    if not tokenizer.is_fast:
        raise InputError(f"model_name_or_path={name!r} has a slow tokenizer, which does not say where its pieces are")
    model, _ = weights.load(AutoModelForMaskedLM, name, config=weights.read_config(name))
    if len(tokenizer) > model.config.vocab_size:
        raise InputError(
            f"vocabularies disagree: {name!r} has vocab_size={model.config.vocab_size}, its tokenizer {len(tokenizer)}"
        )
    return model.eval(), tokenizer


def log_probabilities(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], positions: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """(n,) fp32: the log-probabilities, in nats, of `ids` (n,) at the n `positions`, a bool mask (batch, seq_len) that
    is read row by row."""

    def chosen(decoder: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (given[0][positions],)

    hook = model.get_output_embeddings().register_forward_pre_hook(chosen)
    try:
        with torch.inference_mode():
            logits = model(**inputs).logits.float()  # (n, vocab_size)
    finally:
        hook.remove()
    return torch.gather(torch.log_softmax(logits, -1), 1, ids[:, None])[:, 0]
