"""Cost estimate of a pretraining recipe: parameters, epochs, FLOPs, memory per GPU, days, dollars, by arithmetic alone.

    python tools/estimate.py --config presets/mlm/roberta_base.yaml --hardware 8xH200

Nothing is trained and no text is read; local files without a size in the corpus preset count by their size. The paper
(section 5) pretrains large for 100K steps "using 1024 V100 GPUs for approximately one day": 7.6% of their peak by the
FLOPs counted here (`PAPER_UTILISATION`).
"""

import functools
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

if not __package__:  # run as a script: modules come from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from transformers import PreTrainedConfig

from roberta_recipe.arithmetic import round_up
from roberta_recipe.data import token_cache
from roberta_recipe.data.corpus import BYTES_PER_TOKEN, Corpus, resolve, text_bytes
from roberta_recipe.errors import InputError, exit_on_error
from roberta_recipe.log import counted, duration, set_up_logging
from roberta_recipe.model import architectures, cross_entropy, masked_lm, objectives, weights
from roberta_recipe.settings import did_you_mean, setting
from roberta_recipe.training import batch, launching, optimizers, pretraining
from tools.devices import DEVICES, Device

SHAPES = ("roberta", "xlm-roberta", "camembert", "bert", "albert")  # families with layers of one shape

# Share of the peak that training reaches. This recipe's base at 512 in bf16 on one H200 (results/gpu_h200.json): 21%
# with dropout, 28% compiled without it (21% and 29% counting padding). NVIDIA's own BERT-large at 512
# (DeepLearningExamples, README of TensorFlow2/LanguageModeling/BERT; 80 predictions a sequence: 1.02 TFLOP by our
# formula) does 96.5, 749.7 and 22,506 sequences/s on 1, 8 and 256 A100: 32%, 31% and 29%.
DEFAULT_UTILISATION = 0.2
PAPER_UTILISATION = 0.076  # 100K x 8192 x 512 tokens x 2.010 GFLOP / (1024 x 125 TFLOP/s x 86,400 s)

FITS = 0.95  # usable share of the card's memory (ours); CUDA's context, cuBLAS, NCCL, fragmentation take the rest
GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """`count` GPUs of one kind, a name in `DEVICES`."""

    count: int
    name: str


def parse_hardware(text: str) -> Hardware:
    """`8xH200`, or `H200` for one; upper or lower case. Raises `InputError`."""
    count, name = re.fullmatch(r"(?:([1-9]\d*)\s*[xX]\s*)?(.*)", text.strip()).groups()
    known = {key.upper(): key for key in DEVICES}
    if name.upper() not in known:
        longer = [key for key in known if key.startswith(name.upper())]  # A100: of 40 or 80 GB
        hint = did_you_mean(name.upper(), longer or known)
        raise InputError(
            f"hardware={text!r}: unknown GPU {name!r}{hint}; write 8xH200, with one of {', '.join(DEVICES)}"
        )
    return Hardware(int(count or 1), known[name.upper()])


def parameter_count(config: PreTrainedConfig, trained_for: Sequence[str] = ("mlm",)) -> int:
    """Parameters of the model of these objectives; the decoder shares the embedding's weights."""
    return _counts(type(config), config.to_json_string(use_diff=False), tuple(trained_for))[0]


@functools.lru_cache(maxsize=16)  # a table asks twenty times, for a second each
def _counts(config_class: type[PreTrainedConfig], as_json: str, trained_for: tuple[str, ...]) -> tuple[int, int]:
    """Parameters: all, and those of `optimizers.matrices_of_layers`."""
    config = config_class.from_dict(json.loads(as_json))
    with torch.device("meta"):  # no memory, no numbers
        cls = masked_lm.masked_lm_class(config, config.model_type, objectives.named(trained_for))
        model = weights.fresh(cls, config)
        return model.num_parameters(), sum(weight.numel() for weight in optimizers.matrices_of_layers(model))


# What autograd keeps (`activation_bytes`): bytes of an element that matrices read or write; copies of the layer's
# input; bytes of an element of the residual stream, which LayerNorm reads; bytes a channel of the head, a predicted
# position. In fp32 and in pure half precision the three projections share the layer's input. Under autocast the
# residual stream is fp32, and each projection casts it for itself: only weights are cast once.
_KEPT = {"fp32": (4, 1, 4, 16), "autocast": (2, 3, 4, 10), "half": (2, 1, 2, 8)}


def activation_bytes(config: PreTrainedConfig, tokens: int, kind: str, mask_bytes: int = 1) -> tuple[int, int]:
    """Bytes that autograd keeps for one layer, and for the embeddings, of a micro-batch of `tokens`, without the head.

    `kind` is fp32, autocast (`Trainer`'s bf16 and fp16) or half (DeepSpeed's). A layer in half precision comes to
    34 bytes a token and channel, as in Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1) without their attention
    matrix: fused attention keeps query, key, value, output, one fp32 a head and row, and on CUDA a random state for
    its dropout. CUDA keeps a dropout mask in 1 byte an element, the CPU (`mask_bytes`) in the activation's own type.
    """
    element, inputs, stream, _ = _KEPT[kind]
    hidden, mask = config.hidden_size, mask_bytes if config.hidden_dropout_prob else 0
    channel = (inputs + 5) * element + 2 * stream + 2 * mask  # 5: q, k, v, output, what the FFN reads
    inner = 2 * element * config.intermediate_size  # before and after GELU
    rows = 4 * config.num_attention_heads + 16  # log-sum-exp; mean and deviation of two LayerNorms
    indices = 33  # three of int64, one LayerNorm, the positions of labels
    embeddings = (stream + mask) * masked_lm.embedding_width(config) + indices
    return tokens * (channel * hidden + inner + rows), tokens * embeddings


def _states(config: PreTrainedConfig, trained_for: Sequence[str], optim: str) -> int:
    """Numbers in the optimizer's state."""
    count, matrices = _counts(type(config), config.to_json_string(use_diff=False), tuple(trained_for))
    of = optimizers.TABLE[optim]
    return of.states * count + ((of.matrix_states or of.states) - of.states) * matrices


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU at the peak, by use, and on the host for each process (what is offloaded)."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    host: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.logits


@dataclass(frozen=True)
class Zero:
    """The keys of a DeepSpeed configuration that change memory; stage 0 is `Trainer` without DeepSpeed."""

    stage: int = 0
    offload_optimizer: bool = False
    offload_parameters: bool = False
    fp32_accumulation: bool = False  # data_types.grad_accum_dtype: fp32; without it gradients add up in half precision
    reduce_bucket_size: int = 500_000_000  # elements of the buffer that gradients are reduced through: its default

    @classmethod
    def from_deepspeed(cls, settings: dict, hidden_size: int) -> "Zero":
        """From the JSON of a DeepSpeed configuration, "auto" as transformers resolves it."""
        zero = settings.get("zero_optimization", {})
        bucket = zero.get("reduce_bucket_size", cls.reduce_bucket_size)
        return cls(
            stage=zero.get("stage", 0),
            offload_optimizer=zero.get("offload_optimizer", {}).get("device", "none") != "none",
            offload_parameters=zero.get("offload_param", {}).get("device", "none") != "none",
            fp32_accumulation=settings.get("data_types", {}).get("grad_accum_dtype") in ("fp32", "float32"),
            reduce_bucket_size=hidden_size**2 if bucket == "auto" else int(bucket),
        )


def memory_per_gpu(
    config: PreTrainedConfig,
    *,
    micro_batch: int,
    seq_len: int,
    mlm_probability: float,
    precision: str,
    processes: int = 1,
    zero: Zero = Zero(),
    activation_checkpointing: bool = False,
    objective: Sequence[str] = ("mlm",),
    optim: str = "adamw_torch",
) -> Memory:
    """Peak memory of a backward pass that adds to gradients already there; `precision` is fp32, bf16 or fp16.

    ZeRO after Rajbhandari et al. 2020 (arXiv 1910.02054, section 3: with Adam 2 + 2 + 12 bytes a parameter), with what
    DeepSpeed 0.19 does: gradients are reduced through a buffer, and stage 3 keeps parameters gathered that it needs
    again soon.
    """
    half, count = precision != "fp32", parameter_count(config, objective)
    width = masked_lm.embedding_width(config)
    states = 4 * _states(config, objective, optim)
    own = math.ceil(count / processes)  # parameters of a process's partition
    host = casts = 0
    if zero.stage == 0:
        if half:  # autocast's copies of the weights of matrices, which autograd holds on to; all else is fp32
            layers = getattr(config, "num_hidden_groups", config.num_hidden_layers)  # ALBERT's share weights
            layers = 1 if activation_checkpointing else layers
            head = width * (config.hidden_size + config.vocab_size)
            casts = 2 * (layers * masked_lm.layer_weights(config) + head)
        parameters = 4 * count + casts
        gradients = 4 * count * (2 if processes > 1 else 1)  # DDP's buckets are a copy (gradient_as_bucket_view: false)
        optimizer = states
    else:
        element = 2 if half else 4
        accumulated = 4 if zero.fp32_accumulation else element
        parameters = element * count  # whole at stage 3 too: released where not used within 10^9 others
        gradients = element * zero.reduce_bucket_size
        optimizer = 4 * own + math.ceil(states / processes)  # fp32 master weights, and the states
        if zero.stage == 1:
            gradients = accumulated * (count + zero.reduce_bucket_size)
            if zero.fp32_accumulation and precision == "bf16":  # an optimizer of its own: no buffer, both gradients
                gradients = (accumulated + element) * count
        elif not zero.offload_optimizer:
            gradients += accumulated * own
        if zero.offload_optimizer:  # with fp32 gradients, accumulated gradients, and below stage 3 a staging copy
            host += optimizer + (4 + accumulated + (element if zero.stage < 3 else 0)) * own
            optimizer = 0
        if zero.offload_parameters:
            host += element * own
        elif zero.stage == 3:
            parameters += element * own
    kind = "fp32" if not half else "half" if zero.stage else "autocast"
    tokens, (_, _, stream, head) = micro_batch * seq_len, _KEPT[kind]
    layer, embeddings = activation_bytes(config, tokens, kind)
    kept = stream * tokens * config.hidden_size if activation_checkpointing else layer
    activations = embeddings + config.num_hidden_layers * kept
    # What comes on top of them is largest at the loss: logits, their gradient and a few rows in fp32. Small
    # micro-batches peak at the end, where all is gone but two terms of the embedding's gradient, the decoder's and the
    # lookup's, and their sum; with checkpoints, a layer is recomputed while the decoder's term waits.
    predicted, element = math.ceil(tokens * mlm_probability), _KEPT[kind][0]
    rows = min(predicted, cross_entropy.rows_at_once(config.vocab_size)) * (4 if kind == "fp32" else 8)
    # of several heads: the logits and the layers of each, and the hidden states that they read
    layers = [len(of.layers(config.hidden_size, width)) for of in objectives.named(objective).values()]
    heads = sum(map(bool, layers))
    logits = element * config.vocab_size * (heads + 1)
    loss = predicted * (logits + head * config.hidden_size * sum(layers)) + rows * config.vocab_size
    loss += stream * tokens * config.hidden_size * (heads - 1)
    embedding = (2 if kind == "half" else 4) * config.vocab_size * width
    logits = max(loss, 3 * embedding - activations - casts, layer + embedding if activation_checkpointing else 0)
    return Memory(parameters, gradients, optimizer, activations, logits, host)


@dataclass(frozen=True)
class Estimate:
    """A recipe on a machine. `tokens_per_pass`: of the corpus, where known, else from `corpus_bytes`.

    Raises `InputError` for a utilisation out of range, and where the GPU has no bf16.
    """

    config: PreTrainedConfig  # vocab_size with the rows of padding
    hardware: Hardware  # one process a GPU
    seq_len: int
    mlm_probability: float
    micro_batch: int  # sequences
    accumulation: int  # micro-batches of each process for an optimizer step
    max_steps: int
    precision: str  # fp32, bf16, fp16
    gpu_hour_price: float  # USD
    zero: Zero = Zero()
    activation_checkpointing: bool = False
    objective: tuple[str, ...] = ("mlm",)
    optim: str = "adamw_torch"
    utilisation: float = DEFAULT_UTILISATION
    tokens_per_pass: float | None = None
    corpus_bytes: float | None = None
    max_train_samples: int | None = None  # blocks of a pass, where the corpus has more

    def __post_init__(self):
        if not 0 < self.utilisation <= 1:
            raise InputError(f"utilisation={self.utilisation} must be above 0 and at most 1, a share of the GPUs' peak")
        if self.precision == "bf16" and not self.device.bf16:
            raise InputError(f"bf16=true: {self.hardware.name} has no bf16; set --fp16 true")

    @property
    def device(self) -> Device:
        return DEVICES[self.hardware.name]

    @property
    def blocks(self) -> int:
        return self.max_steps * self.hardware.count * self.micro_batch * self.accumulation

    @property
    def tokens(self) -> int:
        """At most: every block full."""
        return self.blocks * self.seq_len

    @property
    def epochs(self) -> float | None:
        """Passes over the corpus, or the blocks of it that are trained on; None where its size is not known."""
        corpus_tokens = self.tokens_per_pass or (self.corpus_bytes or 0) / BYTES_PER_TOKEN
        known = [tokens for tokens in (corpus_tokens, (self.max_train_samples or 0) * self.seq_len) if tokens]
        return self.tokens / min(known) if known else None

    @property
    def flops(self) -> float:
        named = objectives.named(self.objective)
        return self.tokens * masked_lm.flops_per_token(self.config, self.seq_len, self.mlm_probability, named)

    @property
    def days(self) -> float:
        return self.flops / (self.hardware.count * self.device.peak_flops * self.utilisation) / 86_400

    @property
    def cost(self) -> float:
        """USD."""
        return self.days * 24 * self.hardware.count * self.gpu_hour_price

    @property
    def memory(self) -> Memory:
        return memory_per_gpu(
            self.config,
            micro_batch=self.micro_batch,
            seq_len=self.seq_len,
            mlm_probability=self.mlm_probability,
            precision=self.precision,
            processes=self.hardware.count,
            zero=self.zero,
            activation_checkpointing=self.activation_checkpointing,
            objective=self.objective,
            optim=self.optim,
        )

    @property
    def fits(self) -> bool:
        return self.memory.total <= FITS * self.device.memory_bytes

    @property
    def largest_that_fits(self) -> int:
        """The largest power of two that fits and divides a process's share of the batch; 0 where not even 1 fits."""
        size, share = 0, self.micro_batch * self.accumulation
        while share % (more := 2 * size or 1) == 0 and replace(self, micro_batch=more).fits:
            size = more
        return size


@dataclass
class EstimateArguments:
    """Flags beside the preset's."""

    _argument_group_name = "estimate"

    hardware: str = setting("8xH200", "GPUs, such as 1024xV100-32GB.", "start")
    utilisation: float = setting(DEFAULT_UTILISATION, "Share of the GPUs' peak that is reached.", "start")
    gpu_hour_price: float | None = setting(None, "Dollars; without it, a list price of the GPU.", "start")


def main(argv: list[str] | None = None) -> Estimate:
    """Run the command line `argv`: print what the preset costs. Raises `InputError`."""
    set_up_logging()
    cost = read_estimate(sys.argv[1:] if argv is None else argv)
    print(table(cost))
    return cost


def corpus_bytes(corpus: Corpus) -> float | None:
    """Bytes of the text by the sizes in the preset, else by its files; None for text that has neither."""
    sizes = [source.size_gb for source in corpus.sources]
    if all(sizes):
        return 1e9 * sum(sizes)
    return text_bytes(resolve(corpus)) if all(source.files for source in corpus.sources) else None


def read_estimate(argv: list[str]) -> Estimate:
    """The estimate of a command line, under the ZeRO stage of `--deepspeed`. Raises `InputError`."""
    argv = [*argv, "--use_cpu", "true"]  # this machine may have no GPU, and bf16 would be refused
    (chosen, args, training_args), _ = pretraining.read_arguments(argv, __doc__, own=(EstimateArguments,))
    pretraining.check_data(args)
    pretraining.check_model(args)
    if training_args.num_train_epochs:
        raise InputError(
            f"num_train_epochs={training_args.num_train_epochs:g}: text is not counted here; name --max_steps"
        )
    source = args.config_name or args.model_name_or_path
    config = weights.fresh_config(source, args.config_overrides) if args.config_name else weights.read_config(source)
    if config.model_type not in SHAPES:
        raise InputError(
            f"{source!r} is a {config.model_type!r} model; the estimate knows the layers of {', '.join(SHAPES)}"
        )
    architectures.check_checkpointing(config, training_args)
    config.vocab_size = round_up(config.vocab_size, args.pad_vocab_to_multiple_of or 1)
    hardware, micro_batch = parse_hardware(chosen.hardware), training_args.per_device_train_batch_size
    price = DEVICES[hardware.name].gpu_hour_price if chosen.gpu_hour_price is None else chosen.gpu_hour_price
    at_once = micro_batch * hardware.count
    sequences = args.global_batch_size or at_once * training_args.gradient_accumulation_steps
    in_cache = token_cache.tokens_per_pass(args.token_cache) if args.token_cache else None
    return Estimate(
        config=config,
        hardware=hardware,
        seq_len=args.max_seq_length,
        mlm_probability=args.mlm_probability,
        micro_batch=micro_batch,
        accumulation=batch.accumulation_steps(sequences, micro_batch, hardware.count),
        max_steps=training_args.max_steps,
        precision="bf16" if training_args.bf16 else "fp16" if training_args.fp16 else "fp32",
        zero=Zero.from_deepspeed(launching.deepspeed_settings(training_args), config.hidden_size),
        activation_checkpointing=bool(training_args.activation_checkpointing),
        objective=tuple(args.objective),
        optim=training_args.optim,
        utilisation=chosen.utilisation,
        gpu_hour_price=price,
        tokens_per_pass=in_cache,
        corpus_bytes=None if in_cache else corpus_bytes(pretraining.read_corpus(args)),
        max_train_samples=args.max_train_samples,
    )


def table(estimate: Estimate) -> str:
    """The estimate as a table, a unit in every line."""
    config, memory, device, largest = estimate.config, estimate.memory, estimate.device, estimate.largest_that_fits
    stage = f"ZeRO {estimate.zero.stage}" if estimate.zero.stage else "plain data parallelism"
    names = ("parameters", "gradients", "optimizer", "activations", "logits", "total")
    epochs = f"{estimate.epochs:,.2f} epochs" if estimate.epochs else "epochs unknown, as the size of the corpus is"
    if estimate.max_train_samples:
        epochs += f" of at most {estimate.max_train_samples:,} blocks"
    elif estimate.corpus_bytes and not estimate.tokens_per_pass:
        size = _in_unit(estimate.corpus_bytes, {"GB": 1e9, "MB": 1e6, "kB": 1e3}, 1)
        epochs += f" of {size} at {BYTES_PER_TOKEN} bytes a token (an assumption)"
    room = f"{FITS * device.memory_bytes / GIB:,.1f} GiB ({FITS:.0%} of {estimate.hardware.name}'s memory)"
    advice = f"lower per_device_train_batch_size={estimate.micro_batch} to {largest}"
    if not largest:
        advice = "not even 1 sequence does; take a higher ZeRO stage, offload, activation_checkpointing, a larger GPU"
    verdict = f"fits in {room}" if estimate.fits else f"does not fit: more than {room}; {advice}"
    note = " (the peak of half precision: fp32 takes longer)" if estimate.precision == "fp32" else ""
    time = f"{estimate.days:,.2f} days" if estimate.days >= 1 else duration(86_400 * estimate.days)
    lines = [
        f"Estimate for {estimate.hardware.count}x{estimate.hardware.name}: nothing is trained\n",
        f"Model       {parameter_count(config, estimate.objective):,} parameters, vocabulary {config.vocab_size:,}",
        f"Batch       {counted(estimate.blocks // estimate.max_steps, 'sequence')} = "
        f"{counted(estimate.hardware.count, 'process')} x {estimate.micro_batch} x {estimate.accumulation} accumulated",
        f"Steps       {counted(estimate.max_steps, 'optimizer step')}",
        f"Data        {estimate.blocks:,} blocks, at most {_in_unit(estimate.tokens, {'B': 1e9, 'M': 1e6}, 3)} tokens, "
        f"{epochs}",
        f"Compute     {estimate.flops / estimate.tokens / 1e9:.3f} GFLOP a token by formula, "
        f"{estimate.flops / 1e15:,.1f} PFLOP in all",
        f"Memory      per GPU, {estimate.precision}, {stage}",
        *(f"  {name:<12}{getattr(memory, name) / GIB:9.2f} GiB" for name in names),
        *([f"  {'on the host':<12}{memory.host / GIB:9.2f} GiB a process"] if memory.host else []),
        f"  {verdict}",
        f"  largest micro-batch that fits, of the powers of two that divide the batch: {counted(largest, 'sequence')}",
        f"Time        {time} at {estimate.utilisation:.1%} of {estimate.hardware.count} x "
        f"{device.peak_flops / 1e12:,.0f} TFLOP/s{note}",
        f"Cost        ${estimate.cost:,.2f} at ${estimate.gpu_hour_price:,.2f} a GPU hour",
        "\nUtilisation and price are assumptions: --utilisation (of a run: mfu of its log x matrix_rate of its record "
        "/ the rate above; base at 512 on one H200 comes to 21%, compiled without dropout to 28%; the paper's 1024 "
        f"V100 to {PAPER_UTILISATION:.1%}), --gpu_hour_price.",
    ]
    return "\n".join(lines)


def _in_unit(value: float, units: dict[str, float], digits: int) -> str:
    """`value` in the largest of the units, largest first, of which it is at least one; else in the last."""
    name = next((name for name, unit in units.items() if value >= unit), list(units)[-1])
    return f"{value / units[name]:,.{digits}f} {name}"


if __name__ == "__main__":
    exit_on_error(main)
