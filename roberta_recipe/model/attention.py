"""Which attention a model is trained with: a table, so that every process and every restart takes the same."""

from typing import NamedTuple

import torch
from transformers import (
    MODEL_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
    TrainingArguments,
)
from transformers.masking_utils import sdpa_mask

from roberta_recipe.errors import InputError, first_line
from roberta_recipe.log import logger
from roberta_recipe.model import architectures, cpu_kernels
from roberta_recipe.model.cpu_kernels import BLOCKWISE, blockwise_attention
from roberta_recipe.model.varlen import VARLEN, varlen_attention


class Choice(NamedTuple):
    """A row of the table: the attention that is fastest on a device, in a precision, with or without dropout of the
    attention weights."""

    device: str
    half: bool  # bf16 or fp16
    dropout: bool
    name: str


CUDNN_DISABLED = "cuDNN attention disabled (NaN gradients on Hopper, pytorch #196678)"
MASKED_BY_PAIRS = ("sdpa", "eager", BLOCKWISE)  # those that take a mask of every two tokens

# The fastest of `benchmarks/attention.py`, at 64 to 512 tokens (benchmarks/README.md has the figures). Where two are
# within a seventh of each other at all lengths, PyTorch's own.
FASTEST = (
    Choice("cpu", half=False, dropout=False, name="sdpa"),
    Choice("cpu", half=False, dropout=True, name=BLOCKWISE),
    Choice("cpu", half=True, dropout=False, name="eager"),
    Choice("cpu", half=True, dropout=True, name=BLOCKWISE),
)


def choose(config: PreTrainedConfig, args: TrainingArguments, unpads: bool = False) -> str:
    """The `attn_implementation` that `args` name, or the fastest for device, precision and dropout of the model. Raises
    `InputError` for one that is not for this device or model. `unpads`: the model's class can unpad its rows."""
    # else it has an attention of its own
    takes_any = getattr(MODEL_MAPPING.get(type(config), None), "_supports_attention_backend", False)
    named, where = args.attn_implementation, ""
    if named in (BLOCKWISE, VARLEN) and not takes_any:
        where = f"{config.model_type!r} models have an attention of their own"
    elif named == BLOCKWISE and args.device.type != "cpu":
        where = "it is for CPUs"
    elif named == VARLEN:
        where = _unfit_for_varlen(config, args) if unpads else "it is for pretraining only"
    if where:
        raise InputError(f"attn_implementation={named}: {where}; take sdpa or eager, or leave it out")
    dropout = getattr(config, "attention_probs_dropout_prob", 0.0)
    if named in ("flex_attention", VARLEN) and dropout:
        raise InputError(
            f"attn_implementation={named} has no dropout of attention, and the model has "
            f"attention_probs_dropout_prob={dropout}; set it to 0 in the config, take sdpa or eager, or leave it out"
        )
    if named or not takes_any:
        return named or "eager"
    half, dropout = args.bf16 or args.fp16, dropout > 0
    for row in FASTEST:
        if (row.device, row.half, row.dropout) == (args.device.type, half, dropout) and not args.torch_compile:
            return row.name
    return "sdpa"


def _unfit_for_varlen(config: PreTrainedConfig, args: TrainingArguments) -> str:
    """Why unpadded rows are not for this device, precision or model; empty where they are."""
    family = architectures.TABLE.get(config.model_type)
    if args.device.type != "cuda" or not (args.bf16 or args.fp16):
        return f"FlashAttention needs CUDA and bf16 or fp16; this run is {precision(args)} on {args.device.type}"
    if torch.cuda.get_device_capability(args.device) < (8, 0):
        return "FlashAttention needs a GPU from Ampere on"
    if args.torch_compile:
        return "unpadded batches differ in shape, and each would be compiled again; leave out torch_compile"
    if not (family and family.first_position):
        return f"a {config.model_type!r} model has no position ids for several sequences in one row"
    return ""


def check_shared_rows(attn_implementation: str, input_format: str) -> None:
    """Raise `InputError` for an attention that does not keep the sequences of a row apart."""
    if attn_implementation not in (*MASKED_BY_PAIRS, VARLEN):
        raise InputError(
            f"attn_implementation={attn_implementation} does not keep apart the sequences that share a block of "
            f"input_format={input_format}; take {' or '.join(MASKED_BY_PAIRS[:2])}, or leave it out"
        )


def leaves_cudnn_out(device: torch.device) -> bool:
    """Whether SDPA on this device must not take cuDNN's kernel: with a mask, a length of 64 modulo 128 and a low
    logsumexp, its backward pass gives NaN on Hopper cards (pytorch #196678, torch 2.11 to 2.13)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def register() -> None:
    """Register our attention functions under their names in transformers."""
    for name, function in ((BLOCKWISE, blockwise_attention), (VARLEN, varlen_attention)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, sdpa_mask)


def set_up(model: PreTrainedModel, args: TrainingArguments) -> None:
    """Have `model` trained with `args.attn_implementation` and, on a CPU, with dropout that is drawn fast. Raises
    `InputError` where the model has no such attention."""
    register()
    try:
        model.set_attn_implementation(args.attn_implementation)
    except (ValueError, ImportError) as error:
        raise InputError(f"attn_implementation={args.attn_implementation}: {first_line(error)}") from None
    if model.config._attn_implementation != args.attn_implementation:  # as it falls back in silence
        raise InputError(
            f"attn_implementation={args.attn_implementation} is not one that {type(model).__name__} has; take sdpa or "
            "eager, or leave it out"
        )
    if args.device.type == "cpu" and not args.torch_compile:
        cpu_kernels.use_fast_dropout(model)
    disabled = ""
    if leaves_cudnn_out(args.device):
        torch.backends.cuda.enable_cudnn_sdp(False)
        disabled = f"; {CUDNN_DISABLED}"
    logger.info(f"Attention   {args.attn_implementation}, in {precision(args)}{disabled}")


def precision(args: TrainingArguments) -> str:
    """bf16, fp16 or fp32."""
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
