"""Cost estimate of a pretraining recipe: parameters, epochs, FLOPs, memory per GPU, days, dollars.

    python tools/estimate.py --config presets/mlm/roberta_base.yaml --hardware 8xH200

Pure arithmetic: nothing is trained, no text is read. The corpus size comes from its preset, else from its local files.
The paper (section 5) pretrains large for 100K steps "using 1024 V100 GPUs for approximately one day", 7.6% of their
peak by the FLOPs counted here (`PAPER_UTILISATION`).
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

from roberta_recipe import durable
from roberta_recipe.data.chunks import Chunk, sum_counts
from roberta_recipe.data.corpus import BYTES_PER_TOKEN, Corpus, resolve, text_bytes
from roberta_recipe.data.token_cache import FINGERPRINT
from roberta_recipe.data.tokenizer_training import size_for
from roberta_recipe.errors import InputError, exit_on_error
from roberta_recipe.input_files import resolve_path
from roberta_recipe.log import counted, duration, set_up_logging
from roberta_recipe.model import architectures, masked_lm, objectives, weights
from roberta_recipe.settings import did_you_mean, setting
from roberta_recipe.training import batch, launching, optimizers, pretraining
from tools.devices import DEVICES, Device

MODEL_TYPES = ("roberta", "xlm-roberta", "camembert", "bert", "albert")  # the same layer shapes

# Achieved share of the peak FLOP/s. This recipe's base at 512 in bf16 on one H200 (results/gpu_h200.json): 21% with
# dropout, 28% compiled without it (21% and 29% counting padding). NVIDIA's BERT-large at 512 (DeepLearningExamples,
# README of TensorFlow2/LanguageModeling/BERT; 80 predictions a sequence: 1.02 TFLOP by our formula): 96.5, 749.7 and
# 22,506 sequences/s on 1, 8 and 256 A100, 32%, 31% and 29%.
DEFAULT_UTILISATION = 0.2
PAPER_UTILISATION = 0.076  # 100K x 8192 x 512 tokens x 2.010 GFLOP / (1024 x 125 TFLOP/s x 86,400 s)

FITS = 0.95  # usable share of GPU memory, an assumption; CUDA context, cuBLAS, NCCL and fragmentation take the rest
GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """`count` GPUs of one kind, a name in `DEVICES`."""

    count: int
    name: str


def parse_hardware(text: str) -> Hardware:
    """Parse `8xH200`, or `H200` for one, in any case. Raises `InputError`."""
    count, name = re.fullmatch(r"(?:([1-9]\d*)\s*[xX]\s*)?(.*)", text.strip()).groups()
    known = {key.upper(): key for key in DEVICES}
    if name.upper() not in known:
        longer = [key for key in known if key.startswith(name.upper())]  # A100: 40 or 80 GB
        hint = did_you_mean(name.upper(), longer or known)
        raise InputError(
            f"hardware={text!r}: unknown GPU {name!r}{hint}; write 8xH200, with one of {', '.join(DEVICES)}"
        )
    return Hardware(int(count or 1), known[name.upper()])


def parameter_count(config: PreTrainedConfig, trained_for: Sequence[str] = ("mlm",)) -> int:
    """Parameters of the model with the heads of these objectives; decoder and embedding share their weights."""
    return _counts(type(config), config.to_json_string(use_diff=False), tuple(trained_for))[0]


@functools.lru_cache(maxsize=16)  # a second each
def _counts(config_class: type[PreTrainedConfig], as_json: str, trained_for: tuple[str, ...]) -> tuple[int, int]:
    """(parameters, those of `optimizers.matrices_of_layers`)."""
    config = config_class.from_dict(json.loads(as_json))
    with torch.device("meta"):  # allocates no memory
        cls = masked_lm.masked_lm_class(config, config.model_type, objectives.named(trained_for))
        model = weights.fresh(cls, config)
        return model.num_parameters(), sum(weight.numel() for weight in optimizers.matrices_of_layers(model))


# Activations saved for the backward pass: bytes per element of a matrix product's operands; saved copies of the layer's
# input; bytes per element of the residual stream, which LayerNorm saves; bytes per head channel and predicted position.
# In fp32 and in pure half precision the three projections share the layer's input; under autocast the residual stream
# is fp32, and each projection saves its own cast.
_SAVED_BYTES = {"fp32": (4, 1, 4, 16), "autocast": (2, 3, 4, 10), "half": (2, 1, 2, 8)}


def activation_bytes(config: PreTrainedConfig, tokens: int, kind: str, mask_bytes: int = 1) -> tuple[int, int]:
    """Bytes saved for the backward pass of a layer, and of the embeddings, by a micro-batch of `tokens`, without head.

    `kind` is fp32, autocast (`Trainer`'s bf16 and fp16) or half (DeepSpeed's). A layer in half precision takes 34 bytes
    per token and channel, as in Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1) without the attention matrix:
    fused attention saves query, key, value, output, and one fp32 per head and row. A dropout mask takes 1 byte per
    element on CUDA, on a CPU (`mask_bytes`) the size of the activation's type.
    """
    element, inputs, stream, _ = _SAVED_BYTES[kind]
    hidden, mask = config.hidden_size, mask_bytes if config.hidden_dropout_prob else 0
    channel = (inputs + 5) * element + 2 * stream + 2 * mask  # 5: q, k, v, output, FFN input
    inner = 2 * element * config.intermediate_size  # before and after GELU
    rows = 4 * config.num_attention_heads + 16  # log-sum-exp; mean and deviation of two LayerNorms
    indices = 33  # three of int64, one LayerNorm, the label positions
    embeddings = (stream + mask) * masked_lm.embedding_width(config) + indices
    return tokens * (channel * hidden + inner + rows), tokens * embeddings


def _optimizer_elements(config: PreTrainedConfig, trained_for: Sequence[str], optim: str) -> int:
    """Number of elements in the optimizer state."""
    count, matrices = _counts(type(config), config.to_json_string(use_diff=False), tuple(trained_for))
    optimizer = optimizers.TABLE[optim]
    return optimizer.states * (count - matrices) + (optimizer.matrix_states or optimizer.states) * matrices


@dataclass(frozen=True)
class Memory:
    """Peak bytes on one GPU by use, and offloaded bytes on the host per process."""

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
    """DeepSpeed settings that affect memory; stage 0 is `Trainer` without DeepSpeed."""

    stage: int = 0
    offload_optimizer: bool = False
    offload_parameters: bool = False
    fp32_accumulation: bool = False  # of gradients (data_types.grad_accum_dtype: fp32), else in half precision
    reduce_bucket_size: int = 500_000_000  # elements of the gradient-reduction buffer: DeepSpeed's default

    @classmethod
    def from_deepspeed(cls, settings: dict, hidden_size: int) -> "Zero":
        """From a DeepSpeed configuration, with "auto" as transformers resolves it."""
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
    """Peak memory of a backward pass that accumulates into existing gradients; `precision` is fp32, bf16 or fp16.

    ZeRO follows Rajbhandari et al. 2020 (arXiv 1910.02054, section 3: with Adam 2 + 2 + 12 bytes per parameter) and
    DeepSpeed 0.19: gradients are reduced through a buffer, and stage 3 keeps recently used parameters gathered.
    """
    half, count = precision != "fp32", parameter_count(config, objective)
    width = masked_lm.embedding_width(config)
    states = 4 * _optimizer_elements(config, objective, optim)
    own = math.ceil(count / processes)  # parameters in a process's shard
    host = casts = 0
    if zero.stage == 0:
        if half:  # autocast's half-precision copies of weight matrices, saved for the backward pass; the rest is fp32
            layers = getattr(config, "num_hidden_groups", config.num_hidden_layers)  # ALBERT's layers share weights
            layers = 1 if activation_checkpointing else layers
            head = width * (config.hidden_size + config.vocab_size)
            casts = 2 * (layers * masked_lm.layer_weights(config) + head)
        parameters = 4 * count + casts
        gradients = 4 * count * (2 if processes > 1 else 1)  # DDP's buckets are copies (gradient_as_bucket_view=False)
        optimizer = states
    else:
        element = 2 if half else 4
        accumulated = 4 if zero.fp32_accumulation else element
        parameters = element * count  # at stage 3 too: released only if not reused within 10^9 parameters
        gradients = element * zero.reduce_bucket_size
        optimizer = 4 * own + math.ceil(states / processes)  # fp32 master weights and states
        if zero.stage == 1:
            gradients = accumulated * (count + zero.reduce_bucket_size)
            if zero.fp32_accumulation and precision == "bf16":  # BF16_Optimizer: no buffer, both gradients
                gradients = (accumulated + element) * count
        # offloaded at stage 2, sums in fp32 are on the GPU until the step (`_build_compact_grad_partition_buffer`)
        elif not zero.offload_optimizer or (zero.stage == 2 and half and zero.fp32_accumulation):
            gradients += accumulated * own
        if zero.offload_optimizer:  # plus fp32 and accumulated gradients and, below stage 3, a staging copy
            host += optimizer + (4 + accumulated + (element if zero.stage < 3 else 0)) * own
            optimizer = 0
        if zero.offload_parameters:
            host += element * own
        elif zero.stage == 3:
            parameters += element * own
    kind = "fp32" if not half else "half" if zero.stage else "autocast"
    tokens, (element, _, stream, head) = micro_batch * seq_len, _SAVED_BYTES[kind]
    layer, embeddings = activation_bytes(config, tokens, kind)
    saved = stream * tokens * config.hidden_size if activation_checkpointing else layer
    activations = embeddings + config.num_hidden_layers * saved
    # The peak is at the loss: logits, their gradient and a few fp32 rows. With small micro-batches it is at the end of
    # the backward pass: the decoder's and the lookup's gradient of the embedding and their sum; with activation
    # checkpointing, also a recomputed layer and the decoder's gradient.
    predicted = math.ceil(tokens * mlm_probability)
    rows = min(predicted, masked_lm.rows_at_once(config.vocab_size)) * (4 if kind == "fp32" else 8)
    # several heads: logits, layers and hidden states of each
    layers = [len(entry.layers(config.hidden_size, width)) for entry in objectives.named(objective).values()]
    heads = sum(map(bool, layers))
    logits = element * config.vocab_size * (heads + 1)
    loss = predicted * (logits + head * config.hidden_size * sum(layers)) + rows * config.vocab_size
    loss += stream * tokens * config.hidden_size * (heads - 1)
    embedding = (2 if kind == "half" else 4) * config.vocab_size * width
    logits = max(loss, 3 * embedding - activations - casts, layer + embedding if activation_checkpointing else 0)
    return Memory(parameters, gradients, optimizer, activations, logits, host)


@dataclass(frozen=True)
class Estimate:
    """A recipe on a machine. Raises `InputError` for an out-of-range utilisation, and for bf16 on a GPU without it."""

    config: PreTrainedConfig  # with padded vocab_size
    hardware: Hardware  # one process per GPU
    seq_len: int
    mlm_probability: float
    micro_batch: int  # sequences
    accumulation: int  # gradient accumulation steps
    max_steps: int
    precision: str  # fp32, bf16, fp16
    gpu_hour_price: float  # USD
    zero: Zero = Zero()
    activation_checkpointing: bool = False
    objective: tuple[str, ...] = ("mlm",)
    optim: str = "adamw_torch"
    utilisation: float = DEFAULT_UTILISATION
    blocks_per_pass: int | None = None
    corpus_bytes: float | None = None
    max_train_samples: int | None = None  # blocks per pass, if the corpus has more
    max_train_minutes: float | None = None

    def __post_init__(self):
        if not 0 < self.utilisation <= 1:
            raise InputError(f"utilisation={self.utilisation} must be above 0 and at most 1, a share of the GPUs' peak")
        if self.precision == "bf16" and not self.device.bf16:
            raise InputError(f"bf16=true: {self.hardware.name} has no bf16; set --fp16 true")

    @property
    def device(self) -> Device:
        return DEVICES[self.hardware.name]

    @property
    def flops_per_second(self) -> float:
        return self.hardware.count * self.device.peak_flops * self.utilisation

    @property
    def flops_per_token(self) -> float:
        named = objectives.named(self.objective)
        return masked_lm.flops_per_token(self.config, self.seq_len, self.mlm_probability, named)

    @property
    def blocks_of_step(self) -> int:
        return self.hardware.count * self.micro_batch * self.accumulation

    @property
    def steps(self) -> int:
        """Optimizer steps, fewer than `max_steps` if `max_train_minutes` ends the run."""
        step_s = self.blocks_of_step * self.seq_len * self.flops_per_token / self.flops_per_second
        return math.ceil(min(self.max_steps, 60 * (self.max_train_minutes or math.inf) / step_s))

    @property
    def blocks(self) -> int:
        return self.steps * self.blocks_of_step

    @property
    def tokens(self) -> int:
        """Upper bound: every block full."""
        return self.blocks * self.seq_len

    @property
    def epochs(self) -> float | None:
        """Passes over the corpus, or over its first `max_train_samples` blocks; None if its size is unknown."""
        corpus_blocks = self.blocks_per_pass or (self.corpus_bytes or 0) / BYTES_PER_TOKEN / self.seq_len
        known = [blocks for blocks in (corpus_blocks, self.max_train_samples) if blocks]
        return self.blocks / min(known) if known else None

    @property
    def flops(self) -> float:
        return self.tokens * self.flops_per_token

    @property
    def days(self) -> float:
        by_steps = self.flops / self.flops_per_second / 86_400
        return min(by_steps, (self.max_train_minutes or math.inf) / 1440)

    @property
    def cost(self) -> float:
        """USD."""
        return self.days * 24 * self.hardware.count * self.gpu_hour_price

    @property
    def memory(self) -> Memory:
        names = ("micro_batch", "seq_len", "mlm_probability", "precision", "zero", "activation_checkpointing")
        shared = {name: getattr(self, name) for name in (*names, "objective", "optim")}
        return memory_per_gpu(self.config, processes=self.hardware.count, **shared)

    @property
    def fits(self) -> bool:
        return self.memory.total <= FITS * self.device.memory_bytes

    @property
    def largest_that_fits(self) -> int:
        """The largest micro-batch that fits, a power of two that divides a process's share of the batch; 0: none."""
        size, share = 0, self.micro_batch * self.accumulation
        while share % (more := 2 * size or 1) == 0 and replace(self, micro_batch=more).fits:
            size = more
        return size


@dataclass
class EstimateArguments:
    """Flags of this tool, in addition to the preset's."""

    _argument_group_name = "estimate"

    hardware: str = setting("H200", "GPUs, such as 1024xV100-32GB.", "start")
    utilisation: float = setting(DEFAULT_UTILISATION, "Achieved share of the GPUs' peak FLOP/s.", "start")
    gpu_hour_price: float | None = setting(None, "USD per GPU hour; default: the price in tools/devices.py.", "start")


def main(argv: list[str] | None = None) -> Estimate:
    """Run the command line `argv`: print and return the estimate. Raises `InputError`."""
    set_up_logging()
    estimate = read_estimate(sys.argv[1:] if argv is None else argv)
    print(format_estimate(estimate))
    return estimate


def corpus_bytes(corpus: Corpus) -> float | None:
    """Bytes of text, from the sizes in the corpus preset or from its local files; None without either."""
    sizes = [source.size_gb for source in corpus.sources]
    if all(sizes):
        return 1e9 * sum(sizes)
    return text_bytes(resolve(corpus)) if all(source.files for source in corpus.sources) else None


def blocks_per_pass(folder: str | Path, corpus: Corpus) -> int | None:
    """Training blocks of one pass over a token cache; None if it is incomplete, unreadable or of other sources."""
    try:
        settings = durable.read_sealed(Path(folder, FINGERPRINT))
        files = sum(int(settings[f"source {source.name}"].split()[0]) for source in corpus.sources)
        shards = [durable.read_sealed(path)["chunks"] for path in Path(folder).glob("*/train-?????.json")]
    except (OSError, ValueError, KeyError):  # KeyError: another source, or a cache of an earlier version
        return None
    blocks = sum_counts(Chunk(*chunk) for chunks in shards for chunk, *_ in chunks)["blocks"]
    return blocks if len(shards) == files else None


def read_estimate(argv: list[str]) -> Estimate:
    """The estimate for a command line, with the ZeRO stage of `--deepspeed`. Raises `InputError`."""
    argv = [*argv, "--use_cpu", "true"]  # accepts bf16 on a machine without a GPU
    (chosen, args, training_args), _ = pretraining.read_arguments(argv, __doc__, extra=(EstimateArguments,))
    pretraining.check_data(args)
    pretraining.check_model(args)
    if training_args.num_train_epochs:
        raise InputError(
            f"num_train_epochs={training_args.num_train_epochs:g}: text is not counted here; set --max_steps"
        )
    config = weights.config_of(args.config_name, args.config_overrides, args.model_name_or_path)
    if config.model_type not in MODEL_TYPES:
        source = args.config_name or args.model_name_or_path
        raise InputError(f"{source!r} is a {config.model_type!r} model; the estimate is for {', '.join(MODEL_TYPES)}")
    architectures.check_checkpointing(config, training_args)
    weights.check_length(args.model_name_or_path or args.config_name, args.max_seq_length, config)
    corpus = pretraining.read_corpus(args)
    cached_blocks = blocks_per_pass(args.token_cache, corpus) if args.token_cache else None
    named = args.tokenizer_name or "vocab_size" in weights.overridden(args.config_overrides)
    size = None if cached_blocks and named else corpus_bytes(corpus)
    if args.config_name and args.tokenizer_name and resolve_path(args.tokenizer_name).is_dir():
        config.vocab_size = len(pretraining.load_tokenizer(args))
    elif size and not named:
        config.vocab_size = size_for(size)  # of the tokenizer that the run trains
    multiple = args.pad_vocab_to_multiple_of or 1
    config.vocab_size = math.ceil(config.vocab_size / multiple) * multiple
    hardware, micro_batch = parse_hardware(chosen.hardware), training_args.per_device_train_batch_size
    bf16 = DEVICES[hardware.name].bf16 if training_args.picks_bf16 else training_args.bf16
    price = DEVICES[hardware.name].gpu_hour_price if chosen.gpu_hour_price is None else chosen.gpu_hour_price
    plugin = training_args.deepspeed_plugin  # of `--deepspeed`
    sequences = args.global_batch_size or micro_batch * hardware.count * training_args.gradient_accumulation_steps
    micro_batch = batch.shared_micro_batch(sequences, micro_batch, hardware.count)
    return Estimate(
        config=config,
        hardware=hardware,
        seq_len=args.max_seq_length,
        mlm_probability=args.mlm_probability,
        micro_batch=micro_batch,
        accumulation=batch.accumulation_steps(sequences, micro_batch, hardware.count),
        max_steps=training_args.max_steps,
        precision="bf16" if bf16 else "fp16" if training_args.fp16 else "fp32",
        zero=Zero.from_deepspeed(
            launching.DEEPSPEED_DEFAULTS | (plugin.deepspeed_config if plugin else {}), config.hidden_size
        ),
        activation_checkpointing=bool(training_args.gradient_checkpointing),
        objective=tuple(args.objective),
        optim=training_args.optim,
        utilisation=chosen.utilisation,
        gpu_hour_price=price,
        blocks_per_pass=cached_blocks,
        corpus_bytes=size,
        max_train_samples=args.max_train_samples,
        max_train_minutes=args.max_train_minutes,
    )


def format_estimate(estimate: Estimate) -> str:
    """The printed estimate."""
    config, memory, device, largest = estimate.config, estimate.memory, estimate.device, estimate.largest_that_fits
    stage = f"ZeRO {estimate.zero.stage}" if estimate.zero.stage else "plain data parallelism"
    names = ("parameters", "gradients", "optimizer", "activations", "logits", "total")
    epochs = f"{estimate.epochs:,.2f} epochs" if estimate.epochs else "epochs unknown (no corpus size)"
    if estimate.max_train_samples:
        epochs += f" of at most {estimate.max_train_samples:,} blocks"
    elif estimate.corpus_bytes and not estimate.blocks_per_pass:
        size = _in_unit(estimate.corpus_bytes, {"GB": 1e9, "MB": 1e6, "kB": 1e3}, 1)
        epochs += f" of {size} at {BYTES_PER_TOKEN} bytes a token (an assumption)"
    room = f"{FITS * device.memory_bytes / GIB:,.1f} GiB ({FITS:.0%} of {estimate.hardware.name}'s memory)"
    advice = f"lower per_device_train_batch_size={estimate.micro_batch} to {largest}"
    if not largest:
        advice = "not even 1 sequence fits; use a higher ZeRO stage, offload, activation_checkpointing or a larger GPU"
    verdict = f"fits in {room}" if estimate.fits else f"does not fit: more than {room}; {advice}"
    note = " (half-precision peak: fp32 takes longer)" if estimate.precision == "fp32" else ""
    note += " (recomputed layers are not counted: up to a third longer)" * estimate.activation_checkpointing
    time = f"{estimate.days:,.2f} days" if estimate.days >= 1 else duration(86_400 * estimate.days)
    lines = [
        f"Estimate for {estimate.hardware.count}x{estimate.hardware.name}: nothing is trained\n",
        f"Model       {parameter_count(config, estimate.objective):,} parameters, vocabulary {config.vocab_size:,}",
        f"Batch       {counted(estimate.blocks_of_step, 'sequence')} = "
        f"{counted(estimate.hardware.count, 'process')} x {estimate.micro_batch} x {estimate.accumulation} accumulated",
        f"Steps       {counted(estimate.steps, 'optimizer step')}",
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
        "\nUtilisation and price are assumptions: --utilisation (measured: mfu in a run's log x matrix_rate in its "
        "record / the rate above; base at 512 on one H200: 21%, compiled without dropout 28%; the paper's 1024 V100: "
        f"{PAPER_UTILISATION:.1%}), --gpu_hour_price.",
    ]
    return "\n".join(lines)


def _in_unit(value: float, units: dict[str, float], digits: int) -> str:
    """`value` in the largest unit not above it, else in the smallest; `units`: largest first."""
    name = next((name for name, unit in units.items() if value >= unit), list(units)[-1])
    return f"{value / units[name]:,.{digits}f} {name}"


if __name__ == "__main__":
    exit_on_error(main)
