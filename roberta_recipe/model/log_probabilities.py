"""Log-probabilities of tokens under a masked LM of any family, for tools that compare models."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase

from roberta_recipe.data import tokenization
from roberta_recipe.errors import InputError
from roberta_recipe.model import weights


def load_masked_lm(name: str, tokenizer_name: str | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A masked LM of any family, on the device, in evaluation mode, and its tokenizer. Raises `InputError` for a
    mismatch of the two."""
    tokenizer = tokenization.load_tokenizer(tokenizer_name or name, needed=("pad_token", "mask_token"))
    model, _ = weights.load(AutoModelForMaskedLM, name, config=weights.read_config(name))
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        raise InputError(
            f"the tokenizer {tokenizer.name_or_path!r} has {len(tokenizer):,} entries, more than the embedding of "
            f"{name!r}; name the model's own tokenizer"
        )
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


@torch.no_grad()
def at_positions(
    model: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    positions: torch.Tensor,
    ids: torch.Tensor,
    call: Callable[..., Any] | None = None,
) -> torch.Tensor:
    """(n,) fp32: log-probabilities in nats of the tokens `ids` (n,) at the n True `positions` (batch, seq_len) bool, in
    row-major order. The decoder runs at these alone. `call` replaces the model's forward."""
    decoder = model.get_output_embeddings()
    hook = decoder.register_forward_pre_hook(lambda _, inputs: (inputs[0][positions],))
    try:
        logits = (call or model)(**inputs).logits.float()  # (n, vocab_size)
    finally:
        hook.remove()
    logits = logits[positions] if logits.dim() == 3 else logits  # MobileBERT's head does not call its decoder
    return torch.gather(logits, 1, ids[:, None])[:, 0] - torch.logsumexp(logits, -1)
