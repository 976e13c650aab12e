"""Which attention a model is trained with: a table, so that every process and every restart takes the same."""

from typing import NamedTuple

from transformers import MODEL_MAPPING, PreTrainedConfig, PreTrainedModel, TrainingArguments

from roberta_recipe.errors import InputError, first_line
from roberta_recipe.log import logger
from roberta_recipe.training import cpu_kernels
from roberta_recipe.training.cpu_kernels import BLOCKWISE


class Choice(NamedTuple):
    """A row of the table: the attention that is fastest on a device, in a precision, with or without dropout of the
    attention weights."""

    device: str
    half: bool  # bf16 or fp16
    dropout: bool
    name: str


_MASKED_BY_PAIRS = ("sdpa", "eager")

# The fastest of `benchmarks/attention.py`, at 64 to 512 tokens (benchmarks/README.md has the figures). Where two are
# within a seventh of each other at all lengths, PyTorch's own.
FASTEST = (
    Choice("cpu", half=False, dropout=False, name="sdpa"),
    Choice("cpu", half=False, dropout=True, name=BLOCKWISE),
    Choice("cpu", half=True, dropout=False, name="eager"),
    Choice("cpu", half=True, dropout=True, name=BLOCKWISE),
)


def choose(config: PreTrainedConfig, args: TrainingArguments) -> str:
    """The `attn_implementation` that `args` name, or the fastest for device, precision and dropout of the model. Raises
    `InputError` for one that is not for this device or model."""
    # else it has an attention of its own
    takes_any = getattr(MODEL_MAPPING.get(type(config), None), "_supports_attention_backend", False)
    named = args.attn_implementation
    if named == BLOCKWISE and (args.device.type != "cpu" or not takes_any):
        where = f"{config.model_type!r} models have an attention of their own" if not takes_any else "it is for CPUs"
        raise InputError(f"attn_implementation={named}: {where}; take sdpa or eager, or leave it out")
    dropout = getattr(config, "attention_probs_dropout_prob", 0.0)
    if named == "flex_attention" and dropout:
        raise InputError(
            f"attn_implementation={named} has no dropout of attention, and the model has "
            f"attention_probs_dropout_prob={dropout}; take sdpa or eager, or leave it out"
        )
    if named or not takes_any:
        return named or "eager"
    half, dropout = args.bf16 or args.fp16, dropout > 0
    for row in FASTEST:
        if (row.device, row.half, row.dropout) == (args.device.type, half, dropout) and not args.torch_compile:
            return row.name
    return "sdpa"


def check_shared_rows(attn_implementation: str, input_format: str) -> None:
    """Raise `InputError` for an attention that does not keep sequences of a row apart by a mask of every two tokens."""
    if attn_implementation not in (*_MASKED_BY_PAIRS, BLOCKWISE):
        raise InputError(
            f"attn_implementation={attn_implementation} does not keep apart the sequences that share a block of "
            f"input_format={input_format}; take {' or '.join(_MASKED_BY_PAIRS)}, or leave it out"
        )


def set_up(model: PreTrainedModel, args: TrainingArguments) -> None:
    """Have `model` trained with `args.attn_implementation` and, on a CPU, with dropout that is drawn fast. Raises
    `InputError` where the model has no such attention."""
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
    logger.info(f"Attention   {args.attn_implementation}, in {precision(args)}")


def precision(args: TrainingArguments) -> str:
    """bf16, fp16 or fp32."""
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
