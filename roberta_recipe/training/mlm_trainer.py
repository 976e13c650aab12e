"""`Trainer` for pretraining (Table 9: 500K steps of 8K sequences): exact evaluation, hashes of the data consumed."""

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from accelerate.utils import DynamoBackend
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from roberta_recipe.data import masking, order
from roberta_recipe.data.chunks import TextReader
from roberta_recipe.data.corpus import Corpus, check_unchanged
from roberta_recipe.data.packing import Block
from roberta_recipe.hardware import cpu_cores, local_processes
from roberta_recipe.log import logger
from roberta_recipe.model import masked_lm
from roberta_recipe.record import PRESET_NAME, SourceMetrics, loss_at_steps
from roberta_recipe.standard_error import error_of_ratio
from roberta_recipe.training import data_loading, optimizers
from roberta_recipe.training.data_workers import DataTimeout, leave_signals_to_trainer
from roberta_recipe.training.durable_trainer import DurableTrainer

_DATA_DIGESTS = data_loading.RECORD[1:]  # of a step, a log line, a checkpoint and the record
_TOKENIZED_PER_CORE = 480_000  # tokens/s that a core reads and packs (docs/pretraining.md, "Pack once")
_TRAINED_SHARE = 0.35  # of the matrix rate: base at 512 on an H200, compiled, no dropout (results/gpu_h200.json)
DIGEST_MODULUS = 2**48  # the sum over processes stays below 2^63


class Beginning(TrainerCallback):
    """Once the checkpoint is loaded: the command line's hyperparameters after allowed changes; a warning of slow
    tokenization."""

    def __init__(self, trainer: "MlmTrainer"):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        trainer = self.trainer
        if trainer.changed:
            optimizers.put_back(trainer.optimizer, trainer.lr_scheduler, trainer.hyperparameters)
        if args.process_index == 0 and trainer.text_reader and not trainer.train_dataset.limit:
            self.warn_of_tokenization(args)

    def warn_of_tokenization(self, args: TrainingArguments) -> None:
        """Warn where tokenization is slower than training: every process and data worker tokenizes the whole text."""
        trainer, readers = self.trainer, local_processes() * max(1, args.dataloader_num_workers)
        tokenized = _TOKENIZED_PER_CORE * cpu_cores() / readers
        trained = args.world_size * _TRAINED_SHARE * trainer.throughput.matrix_rate / trainer.flops_per_token
        if tokenized < trained:
            preset = os.path.join(args.output_dir, PRESET_NAME)
            logger.warning(
                f"Tokenization is the bottleneck: some {tokenized / 1e6:.2f} M tokens/s for the {trained / 1e6:.2f} M "
                "that can be trained. Pack the text once, then start with --token_cache DIR: "
                f"python tools/pack.py --config {preset} --token_cache DIR"
            )


class MlmTrainer(DurableTrainer):
    """`Trainer` of a masked LM with further objectives.

    The model's `objectives` has the declaration of each objective, and its output's `loss_sums` the sum of losses of
    each (`masked_lm.ObjectivesOutput`); "mlm" is always among them. In evaluation, the loss of an objective is the sum
    over all its targets / their number, in nats, so that it does not depend on the batch; eval_loss is the masked LM's,
    eval_loss_error its standard error over documents, eval_<name>_loss another objective's. The first micro-batch of a
    step carries its record (`data_loading.RECORD`). `skipped` has the positions that `train_dataset` leaves out.
    `also_measured(trainer)`, called on all ranks, gives further metrics of each evaluation of `eval_dataset`.
    """

    def __init__(
        self,
        *,
        model: Any,
        flops_per_token: float,
        resumed: dict[str, Any] | None,
        skipped: order.Skipped = (),
        also_measured: Callable[["MlmTrainer"], dict[str, float]] | None = None,
        callbacks: Iterable[TrainerCallback] = (),
        **kwargs,
    ):
        callbacks = [Beginning(self), *callbacks]
        columns = {name: objective.column for name, objective in model.objectives.items()}
        super().__init__(model=model, objectives=columns, resumed=resumed, callbacks=callbacks, **kwargs)
        self.flops_per_token, resumed = flops_per_token, resumed or {}
        self.changed: list[str] = resumed.get("changed", [])  # settings since the checkpoint
        # of all blocks consumed, in any order: as read, and as the model saw them
        self.data_digests: dict[str, int] = {name: resumed.get(name, 0) for name in _DATA_DIGESTS}
        self.skipped, self.also_measured = skipped, also_measured
        self._first_position = resumed.get("position", 0)
        self._consumed = np.zeros(3, dtype=np.int64)  # records of this process's steps, since last counted
        if self.args.torch_compile:  # the encoder only: accelerate compiles the whole model, with head and losses
            self.accelerator.state.dynamo_plugin.backend = DynamoBackend.NO
            masked_lm.compile_encoder(model, self.args.torch_compile_backend, self.args.torch_compile_mode)

    # Data

    def get_train_dataloader(self) -> DataLoader:
        """Micro-batches of this process's blocks: `TrainBlocks` has divided them over processes already."""
        workers, size = self.args.dataloader_num_workers, self.args.per_device_train_batch_size
        progress = self.text_reader.progress if self.text_reader else None
        loader = data_loading.MicroBatchLoader(
            self.train_dataset,
            batch_size=size * self.args.gradient_accumulation_steps,
            collate_fn=functools.partial(data_loading.micro_batches, self.data_collator, size),
            num_workers=workers,
            prefetch_factor=self.args.dataloader_prefetch_factor if workers else None,
            device=self.args.device,
            waiting=functools.partial(DataTimeout, self, progress) if workers else contextlib.nullcontext,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
            generator=torch.Generator(),  # or it would draw from the generator that dropout draws from
        )
        return leave_signals_to_trainer(loader)

    @property
    def text_reader(self) -> TextReader | None:
        """The reader of training text; None where blocks come from a token cache."""
        reader = getattr(self.train_dataset, "reader", None)
        return reader if isinstance(reader, TextReader) else None

    @property
    def position(self) -> int:
        """The position from which the next step takes its blocks."""
        return self._position_of(self.state.global_step + 1)

    def blocks_of_steps(self, count: int) -> tuple[range, ...]:
        """The positions of the blocks of the last `count` steps, at most of this start's."""
        count = min(count, self.state.global_step - self._first_step)
        first = self._position_of(self.state.global_step + 1 - count)
        return order.kept(first, count * self.fingerprint["global_batch_size"], self.skipped)

    def _position_of(self, step: int) -> int:
        """The position of the first block of a step."""
        blocks = (step - 1 - self._first_step) * self.fingerprint["global_batch_size"]
        return order.position_after(self._first_position, blocks, self.skipped)

    # Training

    def save_model(self, output_dir=None, _internal_call=False):
        """The finished model is one of the stock class, without the heads of other objectives. Raises `RunError` where
        a text file has changed since the start."""
        if self.text_reader:  # each block of a token cache is checked when it is read
            check_unchanged(self.text_reader.corpus)
        self.left_out = () if _internal_call else self.model.heads_of_objectives
        super().save_model(output_dir, _internal_call)
        self.left_out = ()

    def create_optimizer(self, model=None):
        optimizer = super().create_optimizer(model)
        self.hyperparameters = optimizers.hyperparameters(optimizer)  # of the command line
        return optimizer

    def create_scheduler(self, num_training_steps, optimizer=None):
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if self.stopping.cooldown_share:
            scheduler.lr_lambdas = [functools.partial(self.stopping.cooled, share) for share in scheduler.lr_lambdas]
        return scheduler

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss_sums = model(**inputs).loss_sums
        return self.loss_of_batch(torch.stack([loss_sums[name] for name in self.objectives]), num_items_in_batch)

    def training_step(self, model, inputs, num_items_in_batch=None):
        self._consumed += inputs.pop("record", 0)
        return super().training_step(model, inputs, num_items_in_batch)

    def diverged(self, what):
        return super().diverged(f"{what} (blocks {order.in_words(self.blocks_of_steps(1))})")

    def count_consumed(self) -> None:
        counted = torch.from_numpy(self._consumed % DIGEST_MODULUS).to(self.args.device)
        tokens, *digests = self.sum_over_processes(counted).tolist()
        self.state.num_input_tokens_seen += tokens
        self.throughput.count(tokens, tokens * self.flops_per_token)
        for name, digest in zip(_DATA_DIGESTS, digests, strict=True):
            self.data_digests[name] = (self.data_digests[name] + digest) % DIGEST_MODULUS
        self._consumed[:] = 0

    def log(self, logs, start_time=None):
        # Trainer would add its "epoch", which on an endless stream is the share of max_steps
        epoch, self.state.epoch = self.state.epoch, None
        super().log(logs, start_time)
        self.state.epoch = epoch

    def logged_beside(self):
        return {name: f"{digest:012x}" for name, digest in self.data_digests.items()}

    def recipe_state(self):
        where = {"position": self.position, "skipped_blocks": self.skipped_blocks}
        return {**super().recipe_state(), **where, **self.data_digests}

    def record(self):
        return {
            **super().record(),
            **self.logged_beside(),
            "global_batch_size": self.fingerprint["global_batch_size"],
            "matrix_rate": self.throughput.matrix_rate,
            "stopped_by": self.stopping.stopped_by or "max_steps",
            "skipped_blocks": self.skipped_blocks,
            "blimp_at_steps": loss_at_steps(self.state.log_history, "eval_blimp"),
        }

    @property
    def skipped_blocks(self) -> list[list[int]]:
        return [[part.start, part.stop] for part in self.skipped]

    # Evaluation

    def get_eval_dataloader(self, eval_dataset=None):
        """Held-out examples are masked already: another collator than ours would mask them again."""
        loader = super().get_eval_dataloader(eval_dataset)
        if not isinstance(self.data_collator, masking.MlmCollator):
            own = getattr(loader, "base_dataloader", loader)
            own.collate_fn = masking.validation_collator(self.processing_class)
        return loader

    def evaluate(self, *args, **kwargs):
        random_state = torch.get_rng_state()
        # batches of other shapes, and without gradients: each would be compiled by itself
        with self.throughput.outside(), torch.compiler.set_stance("force_eager"):
            metrics = super().evaluate(*args, **kwargs)
        torch.set_rng_state(random_state)  # the data loader drew from it; evaluations change nothing
        return metrics

    def measured(self) -> dict[str, float]:
        """The metrics of the last step: as logged by training, else of `evaluate`."""
        for entry in reversed(self.state.log_history):
            if "eval_loss" in entry and entry["step"] == self.state.global_step:
                return {name: value for name, value in entry.items() if name != "step"}
        return self.evaluate()

    def evaluate_sources(self, corpus: Corpus, validation: list[Block]) -> dict[str, SourceMetrics]:
        """The metrics of each source's blocks in `validation`, whose masked form is `eval_dataset`; empty for one
        source."""
        found: dict[str, SourceMetrics] = {}
        for number, source in enumerate(corpus.sources if len(corpus.sources) > 1 else ()):
            indices = [index for index, block in enumerate(validation) if order.place_of(block.id)[0] == number]
            masked = [self.eval_dataset[index] for index in indices]
            if not masking.predicts(masked):
                continue
            prefix = f"eval_{source.name}"
            metrics = self.evaluate(masked, metric_key_prefix=prefix)
            found[source.name] = {
                **{name: metrics[f"{prefix}_{name}"] for name in ("loss", "perplexity", "bits", "documents")},
                "loss_error": metrics.get(f"{prefix}_loss_error"),
                "unigram_entropy": masking.unigram_entropy(
                    [validation[index] for index in indices], self.processing_class
                ),
                "blocks": len(indices),
                "tokens": sum(len(validation[index]["input_ids"]) for index in indices),
            }
        return found

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        # not the DDP wrapper, whose forward waits for processes that may have one batch less
        model = self.model_wrapped if self.is_deepspeed_enabled else self.model
        model.eval()
        # (objectives, 2): sum of losses, targets; (documents, 2): of the masked LM; and the number of blocks
        sums = torch.zeros(len(self.objectives), 2, dtype=torch.float64, device=self.args.device)
        clusters = max((example[masking.CLUSTER] for example in dataloader.dataset), default=-1) + 1
        of_document = torch.zeros(clusters, 2, dtype=torch.float64, device=self.args.device)
        blocks = torch.zeros((), dtype=torch.int64, device=self.args.device)
        for inputs, counts in self._equally_many(dataloader):
            inputs = {name: value for name, value in inputs.items() if name != "predicted"}  # which may be padded
            inputs = self._prepare_inputs(inputs)
            documents = inputs.pop(masking.CLUSTER)
            with torch.no_grad():
                output = model(**inputs)
            if not counts:
                continue
            for row, (name, column) in zip(sums, self.objectives.items(), strict=True):
                targets = (inputs[column] != masking.IGNORED).sum().double()
                row += torch.stack([output.loss_sums[name].double(), targets])
            of_position = documents[:, None].expand_as(inputs["labels"])[inputs["labels"] != masking.IGNORED]
            losses = output.losses.double()
            of_document.index_add_(0, of_position, torch.stack([losses, torch.ones_like(losses)], 1))
            blocks += len(inputs["labels"])
        totals = zip(self.objectives, self.sum_over_processes(sums).tolist(), strict=True)
        metrics = _evaluation_metrics({name: total / targets for name, (total, targets) in totals if targets})
        of_document = self.sum_over_processes(of_document).cpu().numpy()
        if (error := error_of_ratio(*of_document.T)) is not None:  # a log line has numbers only
            metrics["loss_error"] = error
        if self.also_measured and metric_key_prefix == "eval":  # not for each source again
            metrics |= self.also_measured(self)
        examples = int(self.sum_over_processes(blocks))
        metrics |= {"documents": int((of_document[:, 1] > 0).sum()), "blocks": examples}
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=examples)

    def _equally_many(self, dataloader) -> Iterator[tuple[dict[str, torch.Tensor], bool]]:
        """The batches of `dataloader`, each with whether it counts. Under ZeRO 3 a forward gathers weights from all
        ranks, so a rank with fewer batches adds some that do not count."""
        own = most = len(dataloader)
        collate = getattr(dataloader, "base_dataloader", dataloader).collate_fn
        if self.is_deepspeed_enabled:
            most = int(self.accelerator.gather(torch.tensor([own], device=self.args.device)).max())
        yield from ((inputs, True) for inputs in dataloader)
        for _ in range(most - own):
            yield collate([dataloader.dataset[0]]), False


def _evaluation_metrics(losses: dict[str, float]) -> dict[str, float]:
    """Metrics of the mean loss of each objective in nats; perplexity and bits are the masked LM's."""
    mlm = losses.pop("mlm")
    metrics = {"loss": mlm, "perplexity": math.exp(min(mlm, 700.0)), "bits": mlm / math.log(2)}
    return metrics | {f"{name}_loss": loss for name, loss in losses.items()}
