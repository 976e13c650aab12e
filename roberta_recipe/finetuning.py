"""Fine-tuning one model (paper, section 5.1): batches of like length, the best epoch on validation."""

import gc
import logging
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch.utils.data import Sampler
from transformers import AutoConfig, BatchEncoding
from transformers import logging as transformers_logging

from roberta_recipe import answerability, durable
from roberta_recipe.args import InputError, path_or_hub_id, resolve_path
from roberta_recipe.checkpoint import PARTIAL
from roberta_recipe.corpus import file_identity
from roberta_recipe.durable_trainer import DurableTrainer
from roberta_recipe.order import random_order
from roberta_recipe.run import BEST_NAME, accumulation_steps, largest_divisor, loss_at_steps

logger = logging.getLogger("recipe")

SCORES = "validation_scores.npy"  # in it
_BATCHES_SORTED_TOGETHER = 50
# Where Hugging Face's configs keep the dropout of a head.
_HEAD_DROPOUT = ("classifier_dropout", "classifier_dropout_prob", "seq_classif_dropout", "cls_dropout")
_LAYER = re.compile(r"\.layers?\.(\d+)\.")
_EPOCH_ORDER, _BATCH_ORDER = 10, 11  # what a random order is for


class LengthGroupedSampler(Sampler[int]):
    """Indices of one epoch after another: each batch of `global_batch_size` has features of like length.

    A function of (lengths, batch, seed, epoch) alone: batch k of an epoch has the same features for any number of
    processes and any accumulation. All features are shuffled, sorted by length within 50 batches, cut into batches,
    and the batches are shuffled. What fills no whole batch is left out, another part in every epoch.
    """

    def __init__(self, lengths: list[int], global_batch_size: int, seed: int):
        if len(lengths) < global_batch_size:
            raise InputError(
                f"global_batch_size={global_batch_size} is more than the {len(lengths)} training examples; lower it"
            )
        self.lengths, self.batch, self.seed, self.epoch = np.asarray(lengths), global_batch_size, seed, 0

    def __len__(self):
        return len(self.lengths) // self.batch * self.batch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = random_order(self.seed, _EPOCH_ORDER, (self.epoch,), len(self.lengths))[: len(self)]
        together = self.batch * _BATCHES_SORTED_TOGETHER
        parts = [order[start : start + together] for start in range(0, len(order), together)]
        order = np.concatenate([part[np.argsort(self.lengths[part], kind="stable")] for part in parts])
        batches = order.reshape(-1, self.batch)
        shuffled = random_order(self.seed, _BATCH_ORDER, (self.epoch,), len(batches))
        return iter(batches[shuffled].ravel().tolist())


def compact(encoded: BatchEncoding, row: int) -> dict[str, np.ndarray]:
    """Model inputs of one row as arrays, a tenth of the memory of Python's lists; the attention mask is left to the
    collator."""
    kinds = {"input_ids": np.int32, "token_type_ids": np.int8}
    return {name: np.array(encoded[name][row], dtype=kind) for name, kind in kinds.items() if name in encoded}


def padded_to(max_seq_length: int) -> int | None:
    """Multiple to pad to, for the sake of a GPU's kernels; none where that would go beyond the longest sequence."""
    return None if max_seq_length % 8 else 8


def length_of(feature: dict[str, Any]) -> int:
    """Tokens of a feature: its `length`, which says how long its longest sequence will be, or its `input_ids`."""
    return feature["length"] if "length" in feature else len(feature["input_ids"])


class FinetuneTrainer(DurableTrainer):
    """`Trainer` whose gradient is that of the whole batch, and which keeps the best epoch.

    `loss_sum(model, batch)` gives (sum of the losses of its items, scores), where `labels` has one entry an item; the
    loss is that sum over the items of the whole effective batch / their number. `measure(scores)` gives the metrics of
    the validation set, of which the highest `best_metric` picks the epoch. Features are dicts, see
    `length_of`; `fingerprint` has the `global_batch_size`. `layer_decay`: see `layer_rates`.
    """

    def __init__(
        self,
        *args,
        loss_sum: Callable[[torch.nn.Module, dict[str, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]],
        measure: Callable[[np.ndarray], dict[str, float]],
        best_metric: str,
        layer_decay: float,
        resumed: dict[str, Any] | None,
        **kwargs,
    ):
        super().__init__(*args, resumed=resumed, **kwargs)
        self.layer_decay = layer_decay
        self.loss_sum, self.measure, self.best_metric = loss_sum, measure, best_metric
        self.model_accepts_loss_kwargs = True  # the loss here is of the whole batch already
        self.computed_tokens: int = (resumed or {}).get("computed_tokens", 0)  # with padding
        self._sampler, self._train_seconds = None, None
        self._tokens = torch.zeros(2, dtype=torch.int64, device=self.args.device)  # that count, computed

    # Training

    def _get_train_sampler(self, train_dataset=None):
        lengths = [length_of(feature) for feature in self.train_dataset]
        self._sampler = LengthGroupedSampler(lengths, self.fingerprint["global_batch_size"], self.args.seed)
        return self._sampler

    def create_optimizer(self, model=None):
        if self.optimizer is None and self.layer_decay < 1:
            model, decayed, groups = model or self.model, set(self.get_decay_parameter_names(self.model)), {}
            for name, rate in layer_rates(self.model, self.args.learning_rate, self.layer_decay).items():
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

    def _run_epoch(self, *, model, epoch, train_dataloader, **kwargs):
        self._sampler.set_epoch(epoch)  # with several processes, it is out of reach once batches are skipped to resume
        super()._run_epoch(model=model, epoch=epoch, train_dataloader=train_dataloader, **kwargs)

    def train(self, *args, **kwargs):
        output = super().train(*args, **kwargs)
        self._train_seconds = self.train_seconds  # what is evaluated afterwards is not training
        return output

    @property
    def train_seconds(self) -> float:
        return self._train_seconds or super().train_seconds

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        total, scores = self.loss_sum(model, inputs)
        # gradients of processes are averaged, and the number is that of all
        loss = total * self.accelerator.num_processes / num_items_in_batch
        return (loss, scores) if return_outputs else loss

    def training_step(self, model, inputs, num_items_in_batch=None):
        mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
        self._tokens += torch.tensor([int(mask.sum()), mask.numel()], device=self._tokens.device)
        return super().training_step(model, inputs, num_items_in_batch)

    def count_consumed(self) -> None:
        tokens, computed = self.sum_over_processes(self._tokens.clone()).tolist()
        self.state.num_input_tokens_seen += tokens
        self.computed_tokens += computed
        self._tokens.zero_()

    def recipe_state(self):
        return {**super().recipe_state(), "computed_tokens": self.computed_tokens}

    def record(self):
        scores = loss_at_steps(self.state.log_history, f"eval_{self.best_metric}")
        best = {"best_step": self.state.best_global_step, "score_at_steps": scores}
        return {"computed_tokens": self.computed_tokens, **best}

    def log(self, logs, start_time=None):
        logs.pop("total_flos", None)  # without attention and head: never to be taken for a utilisation
        super().log(logs, start_time)

    # What is stored

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        if answerability.is_attached(self.model) and self.args.should_save:
            answerability.save(self.model, output_dir or self.args.output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if answerability.is_attached(self.model):
            answerability.load(self.model, resume_from_checkpoint)

    # Evaluation

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            _, scores = self.loss_sum(model, inputs)
        return None, scores.float(), None

    def scores(self, features: list[dict[str, Any]]) -> np.ndarray:
        """(features, ...): the model's scores, in the order of `features`; computed in order of length."""
        order = sorted(range(len(features)), key=lambda number: -length_of(features[number]))
        random_state = torch.get_rng_state()
        found = self.predict([features[number] for number in order]).predictions
        torch.set_rng_state(random_state)  # its data loader has drawn from it
        scores = np.empty_like(found)
        scores[order] = found
        return scores

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        scores = self.scores(self.eval_dataset)
        metrics = self.measure(scores)
        logged = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(dict(logged))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, logged)
        value = metrics[self.best_metric]
        if self.state.best_metric is None or value > self.state.best_metric:
            self.state.best_metric = value if math.isfinite(value) else -math.inf
            self.state.best_global_step = self.state.global_step
            self._keep_as_best(scores)
        return logged

    def _keep_as_best(self, scores: np.ndarray) -> None:
        """The weights, tokenizer and validation scores of now in `<output_dir>/best`, whole or as they were."""
        aside, failure = Path(self.args.output_dir, PARTIAL, BEST_NAME), None
        try:
            self.save_model(str(aside), _internal_call=True)
            if self.args.should_save:
                np.save(aside / SCORES, scores)
                durable.publish(aside, Path(self.args.output_dir, BEST_NAME))
        except (OSError, RuntimeError, SafetensorError) as error:
            failure = error
        self._end_writing(failure, f"the best epoch (step {self.state.global_step})")

    def load_best(self) -> np.ndarray:
        """Put the best epoch's weights into the model; returns its validation scores."""
        self.accelerator.wait_for_everyone()
        best = Path(self.args.output_dir, BEST_NAME)
        stored = type(self.model).from_pretrained(best, dtype=torch.float32)
        state = stored.state_dict()
        if answerability.is_attached(self.model):
            answerability.load(self.model, best)
            state |= {name: value for name, value in self.model.state_dict().items() if name not in state}
        self.model.load_state_dict(state)
        return validation_scores(self.args.output_dir)


def layer_rates(model: torch.nn.Module, learning_rate: float, layer_decay: float) -> dict[str, float]:
    """The rate of each parameter: `learning_rate` for the head, times `layer_decay` for each layer further down, the
    embeddings being below the lowest layer (ULMFiT, arXiv 1801.06146, section 3.2; ELECTRA, arXiv 2003.10555,
    appendix B). Raises `InputError` where the layers are not numbered in the names."""
    numbers = {name: _LAYER.search(name) for name, _ in model.named_parameters()}
    layers = 1 + max((int(found[1]) for found in numbers.values() if found), default=-1)
    if not layers:
        raise InputError(f"layer_decay={layer_decay}: {type(model).__name__} has no numbered layers; leave it at 1")
    depths = {
        name: layers - int(found[1]) if found else layers + 1 if "embeddings" in name else 0
        for name, found in numbers.items()
    }
    return {name: learning_rate * layer_decay**depth for name, depth in depths.items()}


def validation_scores(output_dir: str | Path) -> np.ndarray:
    """Of a run's best epoch, as `FinetuneTrainer.scores` gave them."""
    path = Path(output_dir, BEST_NAME, SCORES)
    if not path.is_file():
        raise InputError(f"{path} is missing: move {output_dir} away to have it run again")
    return np.load(path)


def load_with_head(
    cls: Any, name: str, head_dropout: float | None, random_weights: bool = False, **settings: Any
) -> torch.nn.Module:
    """A checkpoint as a model of the Auto class `cls`, `settings` in its config; its own head where it has one of the
    right size, else a fresh one, which is said. With `random_weights` its architecture alone. Raises `InputError` where
    there is no such checkpoint."""
    path = path_or_hub_id(name)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its report on a head without weights; what matters of it is said here
    try:
        config = AutoConfig.from_pretrained(path, **settings)
        for field in _HEAD_DROPOUT:
            if head_dropout is not None and hasattr(config, field):
                setattr(config, field, head_dropout)
        if random_weights:
            logger.info("Weights     random")
            return _with_head_dropout(cls.from_config(config, dtype=torch.float32), head_dropout)
        model, info = cls.from_pretrained(
            path, config=config, dtype=torch.float32, ignore_mismatched_sizes=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"no checkpoint to fine-tune at model_name_or_path={name!r}: {reason}") from None
    finally:
        transformers_logging.set_verbosity(verbosity)
    body = f"{model.base_model_prefix}."
    if lost := sorted(key for key in info["missing_keys"] if key.startswith(body) and "pooler" not in key):
        raise InputError(f"model_name_or_path={name!r} has no weights for {lost[0]} and {len(lost) - 1} others")
    replaced = {key.partition(".")[0] for key, *_ in info["mismatched_keys"]}
    if model.base_model_prefix in replaced:
        raise InputError(f"model_name_or_path={name!r}: its weights have other sizes than its config.json says")
    for head in replaced:  # as fairseq: all of it, not only the layer whose size is another
        for module in getattr(model, head).modules():
            if isinstance(module, torch.nn.Linear):
                torch.nn.init.normal_(module.weight, std=getattr(config, "initializer_range", 0.02))
                torch.nn.init.zeros_(module.bias)
    fresh = "fresh, as the checkpoint's has another size" if replaced else "fresh" if info["missing_keys"] else "kept"
    logger.info(f"Head        {fresh}")
    return _with_head_dropout(model, head_dropout)


def _with_head_dropout(model: torch.nn.Module, head_dropout: float | None) -> torch.nn.Module:
    """Also where the config has no name for it (DeBERTa's, ...): every dropout outside of the body."""
    if head_dropout is not None:
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Dropout) and not name.startswith(f"{model.base_model_prefix}."):
                module.p = head_dropout
    return model


def check_length(name: str, max_seq_length: int) -> None:
    """Raise `InputError` where a checkpoint has fewer positions than that; RoBERTa's begin behind its padding id."""
    try:
        config = AutoConfig.from_pretrained(path_or_hub_id(name))
    except (OSError, ValueError) as error:
        raise InputError(f"no checkpoint at model_name_or_path={name!r}: {str(error).splitlines()[0]}") from None
    positions = getattr(config, "max_position_embeddings", None) or max_seq_length
    if "roberta" in config.model_type or config.model_type in ("camembert", "longformer", "mpnet"):
        positions -= config.pad_token_id + 1
    if max_seq_length > positions:
        raise InputError(
            f"max_seq_length={max_seq_length} is more than the {positions} positions of {name!r}: --max_seq_length "
            f"{positions}"
        )


def weights_identity(name: str) -> str:
    """What tells a local checkpoint's weights from others of the same name."""
    files = sorted(resolve_path(name).glob("*.safetensors"))
    return durable.fingerprint([file_identity(str(path)) for path in files])


def fit_micro_batch(global_batch_size: int, at_most: int, processes: int) -> int:
    """The largest micro-batch up to `at_most` of which every process takes a whole number for one step."""
    accumulation_steps(global_batch_size, 1, processes)
    share = global_batch_size // processes
    return largest_divisor(share, max(min(at_most, share), 1))


def free_memory() -> None:
    """Between two runs of one process."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
