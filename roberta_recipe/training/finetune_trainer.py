"""Fine-tuning trainer (paper, section 5.1): batches of similar length, the best epoch on validation."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch.utils.data import DataLoader, Sampler
from transformers import BatchEncoding, DefaultFlowCallback, TrainerCallback
from transformers.trainer_utils import SaveStrategy

from roberta_recipe import durable
from roberta_recipe.data.order import random_order
from roberta_recipe.errors import InputError
from roberta_recipe.model import weights
from roberta_recipe.model.task_heads import layer_learning_rates
from roberta_recipe.record import BEST_NAME, loss_at_steps
from roberta_recipe.training.data_workers import ignore_signals_in_workers
from roberta_recipe.training.durable_trainer import DurableTrainer
from roberta_recipe.training.monitor import encoder_flops

SCORES, WEIGHTS = "validation_scores.npy", "model.safetensors"  # in the folder of the best epoch
_BATCHES_SORTED_TOGETHER = 50
_PADDING_SHARE = 16  # at most 1/16 of an evaluation batch is padding
_NO_SCORE = -100.0  # filler for tokens beyond the width of a batch, if another batch is wider
_EPOCH_ORDER, _BATCH_ORDER = 10, 11  # purposes of random orders


class LengthGroupedSampler(Sampler[int]):
    """The order of an epoch, in batches of `global_batch_size` features of similar length: a pure function of (lengths,
    batch, seed, epoch), the same for any number of processes and any accumulation.

    All features are shuffled, sorted by length within 50 batches, cut into batches, and the batches are shuffled. The
    incomplete last batch is dropped: different features in every epoch.
    """

    def __init__(self, lengths: list[int], global_batch_size: int, seed: int):
        if len(lengths) < global_batch_size:
            raise InputError(
                f"global_batch_size={global_batch_size} is more than the {len(lengths)} training examples; lower it"
            )
        self.lengths, self.batch, self.seed, self.epoch = np.asarray(lengths), global_batch_size, seed, 0

    def __len__(self):
        return len(self.lengths) // self.batch * self.batch

    def __iter__(self) -> Iterator[int]:
        order = random_order(self.seed, _EPOCH_ORDER, (self.epoch,), len(self.lengths))[: len(self)]
        together = self.batch * _BATCHES_SORTED_TOGETHER
        groups = [order[start : start + together] for start in range(0, len(order), together)]
        order = np.concatenate([group[np.argsort(self.lengths[group], kind="stable")] for group in groups])
        batches = order.reshape(-1, self.batch)
        shuffled = random_order(self.seed, _BATCH_ORDER, (self.epoch,), len(batches))
        return iter(batches[shuffled].ravel().tolist())


def compact(encoded: BatchEncoding, row: int) -> dict[str, np.ndarray]:
    """Model inputs of one row as arrays, a tenth of the memory of lists, without the attention mask."""
    kinds = {"input_ids": np.int32, "token_type_ids": np.int8}
    return {name: np.array(encoded[name][row], dtype=kind) for name, kind in kinds.items() if name in encoded}


def token_batches(lengths: list[int], batch_size: int) -> list[list[int]]:
    """Evaluation batches: the indices of all features, longest first. A batch, padded to a multiple of 8, has at most
    the tokens of `batch_size` features of maximum length; at most 1/16 of this number is padding."""
    room, padding, batches = batch_size * 8 * math.ceil(max(lengths) / 8), 0, []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        width = lengths[batches[-1][0]] if batches else 0
        padding += width - lengths[number]
        if not batches or (len(batches[-1]) + 1) * 8 * math.ceil(width / 8) > room or padding > room // _PADDING_SHARE:
            batches.append([])
            padding = 0
        batches[-1].append(number)
    return batches


def padded_to(max_seq_length: int) -> int | None:
    """`pad_to_multiple_of` of the collators: 8 on a GPU, for its kernels. None if it does not divide `max_seq_length`,
    and without a GPU, where it costs a fifth of the tokens of SST-2."""
    return None if max_seq_length % 8 or not torch.cuda.is_available() else 8


def length_of(feature: dict[str, Any]) -> int:
    """Length of a feature: its `length` (longest sequence) or that of its `input_ids`: tokens, or WNLI's phrases."""
    return feature["length"] if "length" in feature else len(feature["input_ids"])


class Epochs(TrainerCallback):
    """Callback for epochs: sets the sampler's epoch, and evaluates an epoch's last step before saving it: otherwise a
    run killed in between would resume without its evaluation. A stop within an epoch is not evaluated. An evaluated
    step is logged first, as it may be saved as the best (`_keep_as_best`)."""

    def __init__(self, trainer: "FinetuneTrainer"):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if weights.counts_from_padding(model.config):  # Trainer sets the tokenizer's id, and positions depend on it
            model.config.pad_token_id = model.get_input_embeddings().padding_idx

    def on_epoch_begin(self, args, state, control, **kwargs):
        # with several processes, Trainer cannot reach the sampler once batches are skipped to resume
        self.trainer.sampler.epoch = state.global_step // self.trainer.steps_per_epoch

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.trainer.steps_per_epoch == 0 or state.global_step >= state.max_steps:
            DefaultFlowCallback().on_epoch_end(args, state, control)  # Trainer calls it when the step is saved
        control.should_log |= control.should_evaluate and "no" not in (args.save_strategy, args.logging_strategy)

    def on_epoch_end(self, args, state, control, **kwargs):
        control.should_log = control.should_evaluate = control.should_save = False


class FinetuneTrainer(DurableTrainer):
    """`Trainer` that keeps the best epoch.

    `loss_sum(model, batch)` returns (sum of the losses of its items, scores); `labels` has one entry per item.
    `measure(scores)` returns the metrics of the validation set; the epoch with the highest `best_metric` is kept.
    Features are dicts (`length_of`); `fingerprint` has the `global_batch_size` and the `max_seq_length`. `layer_decay`:
    see `layer_learning_rates`.
    """

    def __init__(
        self,
        *,
        loss_sum: Callable[[torch.nn.Module, dict[str, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]],
        measure: Callable[[np.ndarray], dict[str, float]],
        best_metric: str,
        layer_decay: float,
        **kwargs,
    ):
        super().__init__(label_columns={"task": "labels"}, callbacks=[Epochs(self)], **kwargs)
        self.layer_decay, self.saved_max_length = layer_decay, self.fingerprint.get("max_seq_length")
        self.loss_sum, self.measure, self.best_metric = loss_sum, measure, best_metric
        self.sampler: LengthGroupedSampler | None = None
        self.best_step: int | None = self.resumed.get("best_step")
        self.best_score: float | None = self.resumed.get("best_score")  # None: not finite
        # since last counted: tokens without padding, squared lengths of the sequences
        self._tokens = torch.zeros(2, dtype=torch.int64, device=self.args.device)

    # Training

    def get_train_dataloader(self):
        lengths = [length_of(feature) for feature in self.train_dataset]
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self.sampler = LengthGroupedSampler(lengths, self.fingerprint["global_batch_size"], seed)
        loader = self._loader(
            self.train_dataset,
            batch_size=self.args.per_device_train_batch_size,
            sampler=self.sampler,
            persistent_workers=self.args.dataloader_persistent_workers,
        )
        return ignore_signals_in_workers(self.accelerator.prepare(loader))

    def _loader(self, features: list[dict[str, Any]], **sampling: Any) -> DataLoader:
        workers = self.args.dataloader_num_workers
        return DataLoader(
            features,
            collate_fn=self.data_collator,
            num_workers=workers,
            prefetch_factor=self.args.dataloader_prefetch_factor if workers else None,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
            **sampling,
        )

    @property
    def steps_per_epoch(self) -> int:
        return len(self.sampler) // self.sampler.batch

    def create_optimizer(self, model=None):
        if self.optimizer is None and self.layer_decay < 1:
            model, decayed, groups = model or self.model, set(self.get_decay_parameter_names(self.model)), {}
            for name, rate in layer_learning_rates(self.model, self.args.learning_rate, self.layer_decay).items():
                groups.setdefault((rate, self.args.weight_decay if name in decayed else 0.0), []).append(name)
            parameters = dict(model.named_parameters())
            cls, kwargs = self.get_optimizer_cls_and_kwargs(self.args, model)
            self.optimizer = cls(
                [
                    {"params": [parameters[name] for name in names], "lr": rate, "weight_decay": weight_decay}
                    for (rate, weight_decay), names in sorted(groups.items(), reverse=True)  # the log shows the first
                ],
                **kwargs,
            )
        return super().create_optimizer(model)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        total, scores = self.loss_sum(model, inputs)
        if share := self.args.label_smoothing_factor:  # as torch's cross_entropy, of logits (batch, classes)
            total = (1 - share) * total - share * scores.float().log_softmax(-1).mean(-1).sum()
        loss = self.loss_of_batch(total[None], num_items_in_batch)
        return (loss, scores) if return_outputs else loss

    def training_step(self, model, inputs, num_items_in_batch=None):
        mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
        lengths = mask.sum(-1).flatten()
        self._tokens += torch.stack([lengths.sum(), lengths.square().sum()]).to(self._tokens.device)
        return super().training_step(model, inputs, num_items_in_batch)

    def diverged(self, what):
        return super().diverged(f"seed {self.args.seed}: {what}")

    def count_consumed(self) -> None:
        tokens, squares = self.sum_over_processes(self._tokens.clone()).tolist()
        self.state.num_input_tokens_seen += tokens
        self.throughput.count(tokens, encoder_flops(self.model.config, tokens, squares))
        self._tokens.zero_()

    def recipe_state(self):
        return {**super().recipe_state(), "best_step": self.best_step, "best_score": self.best_score}

    def record(self):
        scores = loss_at_steps(self.state.log_history, f"eval_{self.best_metric}")
        return {**super().record(), "best_step": self.best_step, "score_at_steps": scores}

    @property
    def model_folder(self):
        return Path(self.args.output_dir, BEST_NAME)

    # Evaluation

    def scores(self, features: list[dict[str, Any]]) -> np.ndarray:
        """(features, ...): the model's scores, on all ranks, by `token_batches`. Raises `RunError` if not finite."""
        batches = token_batches(list(map(length_of, features)), self.args.per_device_eval_batch_size)
        # a rank with one batch fewer repeats one of the first batches: all ranks call the model equally often
        rank, ranks = self.args.process_index, self.args.world_size
        own = [batches[(turn * ranks + rank) % len(batches)] for turn in range(math.ceil(len(batches) / ranks))]
        generator = torch.Generator()  # not the global one, which dropout uses
        loader = self._loader(features, batch_sampler=own, generator=generator)
        self.callback_handler.eval_dataloader = loader
        self.model.eval()
        computed = []  # on the device
        for inputs in ignore_signals_in_workers(loader):
            with torch.no_grad(), self.accelerator.autocast():
                _, scores = self.loss_sum(self.model, self._prepare_inputs(inputs))
            computed.append(scores.float())
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, {})
        found = gather_object([(numbers, array.cpu().numpy()) for numbers, array in zip(own, computed, strict=True)])
        widths = np.max([array.shape[1:] for _, array in found], axis=0).astype(int)
        scores = np.full((len(features), *widths), _NO_SCORE, dtype=np.float32)
        for numbers, array in found:
            scores[(numbers, *map(slice, array.shape[1:]))] = array
        if not np.isfinite(scores).all():  # argmax of NaN is 0, which would pass for an answer
            raise self.diverged(f"the model's scores after step {self.state.global_step} are not finite")
        return scores

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        with self.throughput.timing("excluded"):
            scores = self.scores(self.eval_dataset)
            metrics = self.measure(scores)
            logged = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
            self.log(dict(logged))
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, logged)
            value = metrics[self.best_metric]
            if self.best_step is None or value > (-math.inf if self.best_score is None else self.best_score):
                self.best_step, self.best_score = self.state.global_step, value if math.isfinite(value) else None
                self._keep_as_best(scores)
        return logged

    def _keep_as_best(self, scores: np.ndarray) -> None:
        """Save the current weights, tokenizer and validation scores in `<output_dir>/best`, atomically; then
        request a checkpoint (unless save_strategy is "no"), so that a resumed run has the same best epoch."""
        temporary = durable.temporary_path(self.model_folder)
        with self.writing(temporary, f"the best epoch (step {self.state.global_step})"):
            self.write_model(temporary)
            if self.args.should_save:
                np.save(temporary / SCORES, scores)
                durable.move_into_place(temporary, self.model_folder)
        self.control.should_save |= self.args.save_strategy != SaveStrategy.NO

    def load_best(self) -> np.ndarray:
        """Load the best epoch's weights; returns its validation scores. Raises `InputError` for damaged files."""
        self.accelerator.wait_for_everyone()
        scores = validation_scores(self.args.output_dir, needed=(SCORES, WEIGHTS))
        self._load_from_checkpoint(str(Path(self.args.output_dir, BEST_NAME)))
        return scores


def validation_scores(output_dir: str | Path, needed: tuple[str, ...] = (SCORES,)) -> np.ndarray:
    """The validation scores of a run's best epoch (`FinetuneTrainer.scores`). Raises `InputError` where a file of the
    folder is damaged, or a file `needed` is missing."""
    folder = Path(output_dir, BEST_NAME)
    if damage := durable.damage(folder, needed):
        raise InputError(f"{folder} cannot be used: {damage}. Move {output_dir} away to repeat the run")
    return np.load(folder / SCORES)
