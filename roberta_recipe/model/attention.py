"""Choice and set-up of the attention implementation: resolved once, the same for all processes and restarts.

"varlen" (`torch.nn.attention.varlen`, CUDA, bf16 or fp16, no dropout of attention weights) has unpadded batches: all
sequences concatenated in one row, with variable-length FlashAttention (cu_seqlens). No padding is computed, and
sequences that share a block need no mask (seq_len, seq_len).
"""

from typing import NamedTuple

import torch
from torch import nn
from transformers import MODEL_MAPPING, AttentionInterface, PreTrainedConfig, PreTrainedModel, TrainingArguments
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from roberta_recipe.errors import InputError, first_line
from roberta_recipe.log import logger
from roberta_recipe.model.architectures import MULTI_SEQUENCE_MODELS
from roberta_recipe.model.cpu_kernels import BLOCKWISE, blockwise_attention, use_fast_dropout

VARLEN = "varlen"  # as `attn_implementation`
TAKES_4D_MASK = ("sdpa", "eager", BLOCKWISE)  # these accept a (seq_len, seq_len) mask


def choose(config: PreTrainedConfig, args: TrainingArguments, can_unpad: bool = False) -> str:
    """`args.attn_implementation`, by default the fastest for device, precision and dropout. Raises `InputError` if
    device or model do not support it. `can_unpad`: the model class supports unpadded batches."""
    # False: the architecture has its own attention code
    is_pluggable = getattr(MODEL_MAPPING.get(type(config), None), "_supports_attention_backend", False)
    named, half = args.attn_implementation, args.bf16 or args.fp16
    dropout = getattr(config, "attention_probs_dropout_prob", getattr(config, "attention_dropout", 0.0))
    if not named:
        if not is_pluggable:
            return "eager"
        # the fastest in benchmarks/attention.py at 64 to 512 tokens; sdpa or eager if at most 1/7 slower than that
        if args.device.type != "cpu" or args.torch_compile:
            return "sdpa"
        if dropout:
            return BLOCKWISE
        return "eager" if half else "sdpa"
    reason = ""
    if named == BLOCKWISE and not is_pluggable:
        reason = f"{config.model_type!r} models have their own attention"
    elif named == BLOCKWISE and args.device.type != "cpu":
        reason = f"it is for CPUs; this run is on {args.device.type}"
    elif named == VARLEN and not can_unpad:
        reason = "it is for pretraining only"
    elif named == VARLEN and (args.device.type != "cuda" or not half):
        reason = f"it needs CUDA and bf16 or fp16; this run is {precision(args)} on {args.device.type}"
    elif named == VARLEN and args.torch_compile:
        reason = "torch_compile needs fixed shapes, and would recompile for every batch"
    elif named == VARLEN and config.model_type not in MULTI_SEQUENCE_MODELS:
        reason = f"a {config.model_type!r} model has no position ids for several sequences in one row"
    elif named in ("flex_attention", VARLEN) and dropout:
        reason = f"it has no dropout, and the model's attention has a dropout of {dropout} (0 in the config)"
    if reason:
        raise InputError(f"attn_implementation={named}: {reason}; use sdpa or eager, or leave it out")
    return named


def check_shared_rows(config: PreTrainedConfig, attn_implementation: str, input_format: str) -> None:
    """Raise `InputError` if a model or its attention cannot separate several sequences in one row."""
    if config.model_type not in MULTI_SEQUENCE_MODELS or attn_implementation not in (*TAKES_4D_MASK, VARLEN):
        raise InputError(
            f"input_format={input_format} has several sequences per row, which a {config.model_type!r} model with "
            f"attn_implementation={attn_implementation} cannot separate; use full_sentences, segment_pair or "
            f"contiguous, or sdpa or eager and one of {', '.join(MULTI_SEQUENCE_MODELS)}"
        )


def register() -> None:
    """Register our attention functions under their names in transformers."""
    for name, function in ((BLOCKWISE, blockwise_attention), (VARLEN, varlen_attention)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, _mask)


def _mask(*args, **kwargs) -> torch.Tensor | None:
    """`sdpa_mask` with the mask of a decoder, which SDPA leaves out in favour of its argument `is_causal`."""
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


def set_up(model: PreTrainedModel, args: TrainingArguments) -> None:
    """Apply `args.attn_implementation` to a model, with fast dropout on a CPU (uncompiled), without cuDNN attention on
    Hopper GPUs. Raises `InputError` if the model does not support it."""
    register()
    name, reason = args.attn_implementation, f"{type(model).__name__} does not have it"
    try:
        model.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        reason = first_line(error)
    if model.config._attn_implementation != name:  # a silent fallback
        raise InputError(f"attn_implementation={name}: {reason}; use sdpa or eager (your class: set _supports_sdpa)")
    if args.device.type == "cpu" and not args.torch_compile:
        use_fast_dropout(model)
    disabled = ""
    # cuDNN's backward pass gives NaN on Hopper GPUs with a mask, a length of 64 modulo 128 and a low logsumexp (pytorch
    # #196678, torch 2.11 to 2.13)
    if args.device.type == "cuda" and torch.cuda.get_device_capability(args.device)[0] == 9:
        torch.backends.cuda.enable_cudnn_sdp(False)
        disabled = "; cuDNN attention disabled (NaN gradients on Hopper, pytorch #196678)"
    logger.info(f"Attention   {name}, in {precision(args)}{disabled}")


def precision(args: TrainingArguments) -> str:
    """bf16, fp16 or fp32."""
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"


class Unpadded(NamedTuple):
    """The tokens of a batch (batch, seq_len) without padding, in order."""

    flat: torch.Tensor  # (tokens,): indices into the flattened batch
    position_ids: torch.Tensor  # (1, tokens)
    arguments: dict[str, torch.Tensor | int]  # of the attention function, with transformers' names

    def row(self, column: torch.Tensor) -> torch.Tensor:
        """(1, tokens) of a column (batch, seq_len)."""
        return column.flatten()[self.flat][None]


def unpad(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, sequence: torch.Tensor | None, first_position: int
) -> Unpadded:
    """Unpad a batch with `attention_mask` (batch, seq_len). A sequence is a row or, with `sequence` (batch, seq_len),
    the tokens of a row with the same index. Synchronizes for the number of sequences and, with a mask, of tokens."""
    sequence = torch.zeros_like(input_ids) if sequence is None else sequence
    begins = nn.functional.pad(sequence.diff() != 0, (1, 0), value=True)
    flat = torch.arange(input_ids.numel(), device=input_ids.device)
    if attention_mask is not None:
        flat = attention_mask.flatten().nonzero()[:, 0]
    begins = begins.flatten()[flat]
    starts = nn.functional.pad(begins.nonzero()[:, 0], (0, 1), value=len(flat)).to(torch.int32)
    widest = input_ids.shape[1]  # an upper bound, without a synchronization
    arguments = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": widest, "max_length_k": widest}
    return Unpadded(flat, positions_within(begins, first_position)[None], arguments)


def positions_within(begins: torch.Tensor, first_position: int) -> torch.Tensor:
    """Position ids (..., tokens) that restart at `first_position` where `begins` (..., tokens) is True."""
    columns = torch.arange(begins.shape[-1], device=begins.device)
    return columns - torch.where(begins, columns, 0).cummax(dim=-1).values + first_position


def varlen_attention(
    module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, max_length_q=None, **kwargs
) -> tuple[torch.Tensor, None]:
    """An attention function for transformers: (1, heads, tokens, head_size) to (1, tokens, heads, head_size). Without
    sequence lengths, as in a forward pass without labels: SDPA over padded rows."""
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    from torch.nn.attention.varlen import varlen_attn  # the import takes a third of a second

    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    lengths = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    return varlen_attn(q, k, v, *lengths, scale=scaling)[None], None
