"""Pretraining with `Trainer` (paper, Table 9). An optimizer step:

1. `stream.TrainBlocks` gives the step's blocks of this process. `data_loading.micro_batches`, in a data worker if there
   is one, masks and pads them; `MicroBatchLoader` moves the micro-batches to the device.
2. `DurableTrainer.get_batch_samples` counts the targets of each objective in the whole effective batch.
3. `compute_loss`: the model gives a sum of losses for each objective (`masked_lm.MaskedLmMixin`), `loss_of_batch`
   divides it by the count. `Trainer` accumulates gradients, and steps optimizer and schedule.
4. `Stopping.on_step_end` sums the losses over ranks, adds them to the logged mean, and decides whether training ends.
5. `log` writes means, speed and hashes; `_save_checkpoint` seals a checkpoint.
"""

import contextlib
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from accelerate.utils import DynamoBackend
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers.trainer_utils import EvalLoopOutput

from roberta_recipe.data import masking, order
from roberta_recipe.data.chunks import TextReader
from roberta_recipe.data.corpus import Corpus, check_unchanged, hub_ids
from roberta_recipe.data.packing import Block
from roberta_recipe.hardware import cpu_cores, local_processes
from roberta_recipe.log import logger
from roberta_recipe.model import masked_lm
from roberta_recipe.record import PRESET_NAME, SourceMetrics, loss_at_steps
from roberta_recipe.standard_error import error_of_ratio
from roberta_recipe.training import data_loading, optimizers
from roberta_recipe.training.data_workers import DataTimeout, ignore_signals_in_workers
from roberta_recipe.training.durable_trainer import DurableTrainer

_DATA_DIGESTS = data_loading.CONSUMED[1:]  # hashes in log lines, checkpoints and the run record
_TOKENIZED_PER_CORE = 195_000  # tokens/s, read and packed (docs/pretraining.md, "Pack once")
_TRAINED_SHARE = 0.35  # of the matrix rate: base at 512 on an H200, compiled, no dropout (results/gpu_h200.json)
DIGEST_MODULUS = 2**48  # the sum over processes stays below 2^63


class MlmTrainer(DurableTrainer):
    """`Trainer` of a masked LM with optional further objectives.

    The model's `objectives` declare them ("mlm" is always included), and its output has a sum of losses for each
    (`masked_lm.ObjectivesOutput`). An evaluation loss is the sum over all targets / their number, in nats, so that it
    does not depend on the batch: eval_loss is the masked LM's, eval_loss_error its standard error over documents,
    eval_<name>_loss that of another objective; the loss of a log line is the sum over objectives. `skipped`: the
    positions that `train_dataset` skips. `extra_metrics(trainer)`, called on all ranks, returns further metrics for
    each evaluation of `eval_dataset`.
    """

    def __init__(
        self,
        *,
        model: Any,
        flops_per_token: float,
        skipped: order.Skipped = (),
        extra_metrics: Callable[["MlmTrainer"], dict[str, float]] | None = None,
        **kwargs,
    ):
        columns = {name: objective.column for name, objective in model.objectives.items()}
        super().__init__(model=model, label_columns=columns, **kwargs)
        self.flops_per_token = flops_per_token
        # order-independent hashes of all consumed blocks: as read, and as the model saw them
        self.data_digests: dict[str, int] = {name: self.resumed.get(name, 0) for name in _DATA_DIGESTS}
        self.skipped, self.extra_metrics = skipped, extra_metrics
        self._consumed = np.zeros(3, dtype=np.int64)  # `data_loading.CONSUMED` of this process since `count_consumed`
        if self.args.torch_compile:  # the encoder only; accelerate would compile head and losses too
            self.accelerator.state.dynamo_plugin.backend = DynamoBackend.NO
            masked_lm.compile_encoder(model, self.args.torch_compile_backend, self.args.torch_compile_mode)

    # Training

    def _run_epoch(self, **kwargs):
        """The one epoch of the endless stream. Restores the command line's hyperparameters over those of the loaded
        checkpoint, if a change was allowed."""
        if self.resumed.get("changed"):
            optimizers.restore_hyperparameters(self.optimizer, self.lr_scheduler, self.hyperparameters)
            if self.is_deepspeed_enabled:  # part of ZeRO's state
                self.optimizer.optimizer.clip_grad = self.args.max_grad_norm
        if self.args.process_index == 0 and self.text_reader and not self.train_dataset.limit:
            self.warn_of_tokenization()
        super()._run_epoch(**kwargs)

    def warn_of_tokenization(self) -> None:
        """Warn if tokenization is slower than training: every process and data worker tokenizes the whole text."""
        tokenized = _TOKENIZED_PER_CORE * cpu_cores() / local_processes() / max(1, self.args.dataloader_num_workers)
        trained = self.args.world_size * _TRAINED_SHARE * self.throughput.matrix_rate / self.flops_per_token
        if tokenized < trained:
            preset = os.path.join(self.args.output_dir, PRESET_NAME)
            with tqdm.external_write_mode():  # above the progress bar
                logger.warning(
                    f"Tokenization is the bottleneck: {tokenized / 1e6:.2f} M of the {trained / 1e6:.2f} M tokens/s "
                    "that training can use. Pack the text once, then start with --token_cache DIR: "
                    f"python tools/pack.py --config {preset} --token_cache DIR"
                )

    # Data

    def get_train_dataloader(self) -> DataLoader:
        """Micro-batches of this process's blocks, which `TrainBlocks` shards over processes."""
        workers, size = self.args.dataloader_num_workers, self.args.per_device_train_batch_size
        progress = self.text_reader.progress if self.text_reader else None
        loader = data_loading.MicroBatchLoader(
            self.train_dataset,
            batch_size=size * self.args.gradient_accumulation_steps,
            collate_fn=functools.partial(data_loading.micro_batches, self.data_collator, size),
            num_workers=workers,
            prefetch_factor=self.args.dataloader_prefetch_factor if workers else None,
            device=self.args.device,
            count=self._consumed.__iadd__,
            waiting=functools.partial(DataTimeout, self, progress) if workers else contextlib.nullcontext,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
            generator=torch.Generator(),  # not the global one, which dropout uses
        )
        return ignore_signals_in_workers(loader)

    @property
    def text_reader(self) -> TextReader | None:
        """The reader of training text; None with a token cache."""
        reader = getattr(self.train_dataset, "reader", None)
        return reader if isinstance(reader, TextReader) else None

    @property
    def position(self) -> int:
        """The position of the next step's first block."""
        return self._step_position(self.state.global_step + 1)

    def last_blocks(self, steps: int) -> tuple[range, ...]:
        """The positions of the blocks of the last `steps` steps, at most those of this start."""
        steps = min(steps, self.state.global_step - self._first_step)
        first = self._step_position(self.state.global_step + 1 - steps)
        return order.unskipped(first, steps * self.fingerprint["global_batch_size"], self.skipped)

    def _step_position(self, step: int) -> int:
        """The position of the first block of a step, counted from 1."""
        blocks = (step - 1 - self._first_step) * self.fingerprint["global_batch_size"]
        return order.position_after(self.resumed.get("position", 0), blocks, self.skipped)

    # Training

    def save_model(self, output_dir=None, _internal_call=False):
        """Raises `RunError` if a text file has changed since the start."""
        if self.text_reader:  # a token cache checks its chunks when they are read
            check_unchanged(self.text_reader.corpus)
        super().save_model(output_dir, _internal_call)

    def create_scheduler(self, num_training_steps, optimizer=None):
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if self.stopping.cooldown_share:
            scheduler.lr_lambdas = [
                functools.partial(self.stopping.with_cooldown, share) for share in scheduler.lr_lambdas
            ]
        return scheduler

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss_sums = model(**inputs).loss_sums
        return self.loss_of_batch(torch.stack([loss_sums[name] for name in self.label_columns]), num_items_in_batch)

    def diverged(self, what):
        return super().diverged(f"{what} (blocks {order.in_words(self.last_blocks(1))})")

    def count_consumed(self) -> None:
        consumed = torch.from_numpy(self._consumed % DIGEST_MODULUS).to(self.args.device)
        tokens, *digests = self.sum_over_processes(consumed).tolist()
        self.state.num_input_tokens_seen += tokens
        self.throughput.count(tokens, tokens * self.flops_per_token)
        for name, digest in zip(_DATA_DIGESTS, digests, strict=True):
            self.data_digests[name] = (self.data_digests[name] + digest) % DIGEST_MODULUS
        self._consumed[:] = 0

    def log(self, logs, start_time=None):
        # Trainer would add an "epoch", which on an endless stream is the share of max_steps
        epoch, self.state.epoch = self.state.epoch, None
        super().log(logs, start_time)
        self.state.epoch = epoch

    def log_extras(self):
        return {name: f"{digest:012x}" for name, digest in self.data_digests.items()}

    def recipe_state(self):
        where = {"position": self.position, "skipped_blocks": self.skipped_blocks}
        return {**super().recipe_state(), **where, **self.data_digests}

    def record(self):
        return {
            **super().record(),
            **self.log_extras(),
            "global_batch_size": self.fingerprint["global_batch_size"],
            "stopped_by": self.stopping.stopped_by or "max_steps",
            "skipped_blocks": self.skipped_blocks,
            "datasets": hub_ids(self.train_dataset.reader.corpus),
            "blimp_at_steps": loss_at_steps(self.state.log_history, "eval_blimp"),
        }

    @property
    def skipped_blocks(self) -> list[list[int]]:
        return [[part.start, part.stop] for part in self.skipped]

    # Evaluation

    def get_eval_dataloader(self, eval_dataset=None):
        """Validation examples are already masked: a collator other than `MlmCollator` would mask them again."""
        loader = ignore_signals_in_workers(super().get_eval_dataloader(eval_dataset))
        if not isinstance(self.data_collator, masking.MlmCollator):
            base = getattr(loader, "base_dataloader", loader)
            base.collate_fn = masking.MlmCollator(self.processing_class)
        return loader

    def evaluate(self, *args, **kwargs):
        # eager, as each batch shape would be compiled; the data loader draws from the CPU's generator
        with self.throughput.timing("excluded"), torch.compiler.set_stance("force_eager"), torch.random.fork_rng([]):
            return super().evaluate(*args, **kwargs)

    def last_metrics(self) -> dict[str, float]:
        """The metrics of the last step, from the log or else from `evaluate`."""
        for entry in reversed(self.state.log_history):
            if "eval_loss" in entry and entry["step"] == self.state.global_step:
                return {name: value for name, value in entry.items() if name != "step"}
        return self.evaluate()

    def evaluate_sources(self, corpus: Corpus, validation: list[Block]) -> dict[str, SourceMetrics]:
        """Metrics by source; empty for a single source. `validation`: the blocks of `eval_dataset`, unmasked."""
        by_source: dict[str, SourceMetrics] = {}
        for number, source in enumerate(corpus.sources if len(corpus.sources) > 1 else ()):
            is_own = [order.place_of(block.id)[0] == number for block in validation]
            blocks, masked = (list(itertools.compress(rows, is_own)) for rows in (validation, self.eval_dataset))
            if not masking.has_targets(masked):
                continue
            prefix = f"eval_{source.name}"
            metrics = self.evaluate(masked, metric_key_prefix=prefix)
            by_source[source.name] = {
                **{name: metrics[f"{prefix}_{name}"] for name in ("loss", "perplexity", "bits", "documents")},
                "loss_error": metrics.get(f"{prefix}_loss_error"),
                "unigram_entropy": masking.unigram_entropy(blocks, self.processing_class),
                "blocks": len(blocks),
                "tokens": sum(len(block["input_ids"]) for block in blocks),
            }
        return by_source

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        # not the DDP wrapper: its forward would wait for ranks with one batch fewer
        model = self.model_wrapped if self.is_deepspeed_enabled else self.model
        model.eval()
        self.callback_handler.eval_dataloader = dataloader
        # (objectives, 2): sum of losses, number of targets; (documents, 2): the same of the masked LM, by document
        sums = torch.zeros(len(self.label_columns), 2, dtype=torch.float64, device=self.args.device)
        documents = max((example[masking.DOCUMENT] for example in dataloader.dataset), default=-1) + 1
        by_document = torch.zeros(documents, 2, dtype=torch.float64, device=self.args.device)
        blocks = torch.zeros((), dtype=torch.int64, device=self.args.device)
        for inputs, counts in self._equal_batch_counts(dataloader):
            inputs = {name: value for name, value in inputs.items() if name != "predicted"}  # which may be padded
            inputs = self._prepare_inputs(inputs)
            document = inputs.pop(masking.DOCUMENT)
            with torch.no_grad(), self.accelerator.autocast():  # without training, the model has no autocast of its own
                output = model(**inputs)
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
            if not counts:
                continue
            for row, (name, column) in zip(sums, self.label_columns.items(), strict=True):
                targets = (inputs[column] != masking.IGNORED).sum().double()
                row += torch.stack([output.loss_sums[name].double(), targets])
            position_document = document[:, None].expand_as(inputs["labels"])[inputs["labels"] != masking.IGNORED]
            losses = output.losses.double()
            by_document.index_add_(0, position_document, torch.stack([losses, torch.ones_like(losses)], 1))
            blocks += len(inputs["labels"])
        totals = zip(self.label_columns, self.sum_over_processes(sums).tolist(), strict=True)
        losses = {name: total / targets for name, (total, targets) in totals if targets}
        mlm = losses.pop("mlm")
        metrics = {"loss": mlm, "perplexity": math.exp(min(mlm, 700.0)), "bits": mlm / math.log(2)}
        metrics |= {f"{name}_loss": loss for name, loss in losses.items()}
        by_document = self.sum_over_processes(by_document).cpu().numpy()
        if (error := error_of_ratio(*by_document.T)) is not None:  # a log line has numbers only
            metrics["loss_error"] = error
        if self.extra_metrics and metric_key_prefix == "eval":  # not for each source
            metrics |= self.extra_metrics(self)
        examples = int(self.sum_over_processes(blocks))
        metrics |= {"documents": int((by_document[:, 1] > 0).sum()), "blocks": examples}
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=examples)

    def _equal_batch_counts(self, dataloader) -> Iterator[tuple[dict[str, torch.Tensor], bool]]:
        """(batch, whether it counts): under ZeRO 3 a forward gathers weights from all ranks, so a rank with fewer
        batches adds dummy batches that do not count."""
        own = most = len(dataloader)
        collate = getattr(dataloader, "base_dataloader", dataloader).collate_fn
        if self.is_deepspeed_enabled:
            most = int(self.accelerator.gather(torch.tensor([own], device=self.args.device)).max())
        yield from ((inputs, True) for inputs in dataloader)
        for _ in range(most - own):
            yield collate([dataloader.dataset[0]]), False
