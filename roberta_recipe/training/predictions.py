"""Log-probabilities of a masked LM of any family at chosen positions, for tools that compare models."""

import torch
from transformers import AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase

from roberta_recipe.data import tokenization
from roberta_recipe.errors import InputError
from roberta_recipe.model import weights


def load(name: str, tokenizer_name: str | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A masked LM of any family, `ready`, and its tokenizer. Raises `InputError` where they do not fit each other."""
    tokenizer = tokenization.load_tokenizer(tokenizer_name or name, needed=("pad_token",))
    check_tokenizer(tokenizer)
    model, _ = weights.load(AutoModelForMaskedLM, name, config=weights.read_config(name))
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        raise InputError(
            f"the tokenizer {tokenizer.name_or_path!r} has {len(tokenizer):,} entries, more than the embedding of "
            f"{name!r}; name the model's own tokenizer"
        )
    return ready(model), tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `InputError` for a tokenizer without a mask token."""
    if tokenizer.mask_token_id is None:
        raise InputError(f"the tokenizer {tokenizer.name_or_path!r} has no mask token: name the model's own tokenizer")


def ready(model: PreTrainedModel) -> PreTrainedModel:
    """`model` on the device, in evaluation mode."""
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


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
