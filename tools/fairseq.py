r"""Converter of RoBERTa checkpoints between fairseq and Hugging Face (fairseq/models/roberta/model.py).

    python tools/fairseq.py to_hf --checkpoint roberta.base/model.pt --dict roberta.base/dict.txt \
        --encoder encoder.json --bpe vocab.bpe --output_dir from_fairseq
    python tools/fairseq.py to_fairseq --model_name_or_path from_fairseq --output_dir fairseq_model

The logits are the same both ways (`benchmarks/against_fairseq.py`), or the conversion is refused: all settings that
affect fairseq's logits are checked. For fairseq, the token-type vector is added to the position embeddings, and the
embedding's padding rows are dropped. Load the folder in fairseq with

    RobertaModel.from_pretrained("fairseq_model", gpt2_encoder_json="fairseq_model/encoder.json",
                                 gpt2_vocab_bpe="fairseq_model/vocab.bpe")
"""

import argparse
import functools
import json
import pickle
import re
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: modules come from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
)

from roberta_recipe import durable
from roberta_recipe.data import tokenization
from roberta_recipe.errors import InputError, exit_on_error
from roberta_recipe.input_files import explained, read_input_json, read_text
from roberta_recipe.log import listed, logger, set_up_logging
from roberta_recipe.model.weights import for_saving, load, read_config
from roberta_recipe.settings import RecipeParser

_BODY = "encoder.sentence_encoder."
_OUTSIDE = {
    "embed_tokens": "embeddings.word_embeddings",
    "embed_positions": "embeddings.position_embeddings",
    "layernorm_embedding": "embeddings.LayerNorm",
}
_IN_LAYER = {
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.out_proj": "attention.output.dense",
    "self_attn_layer_norm": "attention.output.LayerNorm",
    "fc1": "intermediate.dense",
    "fc2": "output.dense",
    "final_layer_norm": "output.LayerNorm",
}
_LM_HEAD, _HEADS = "encoder.lm_head.", "classification_heads."
_TOKENS, _POSITIONS = f"{_BODY}embed_tokens.weight", f"{_BODY}embed_positions.weight"
_LM_DECODER = f"{_LM_HEAD}weight"

# fairseq's settings that affect the logits (base_architecture, TransformerEncoder, MultiheadAttention), with the only
# value that Hugging Face's RoBERTa supports, also fairseq's default.
_BODY_SETTINGS = {
    "encoder_normalize_before": False,
    "layernorm_embedding": True,
    "encoder_learned_pos": True,
    "no_token_positional_embeddings": False,
    "no_scale_embedding": True,
    "encoder_layers_to_keep": None,
    "encoder_xformers_att_config": None,
    "xformers_att_config": None,
    "quant_noise_pq": 0,
    "quant_noise_scalar": 0,
    "mha_heads_to_keep": -1,
    "ffn_blocks_to_remove": -1,
}
_HEAD_SETTINGS = {"pooler_activation_fn": "tanh", "spectral_norm_classification_head": False}
# fairseq's name -> Hugging Face's; of two names for one function, the last is fairseq's current one
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_fast": "gelu_new",
    "gelu_accurate": "gelu_new",
    "relu": "relu",
    "relu_squared": "relu2",
    "tanh": "tanh",
    "linear": "linear",
}
_RESAVE = """python -c "
import torch
from fairseq.checkpoint_utils import load_checkpoint_to_cpu
from omegaconf import OmegaConf
found = load_checkpoint_to_cpu('{path}')
settings = OmegaConf.to_container(found['cfg'], resolve=True, enum_to_str=True)
torch.save({{'model': found['model'], 'cfg': {{'model': settings['model']}}}}, '{plain}')
\""""
MNLI_LABELS = ("contradiction", "neutral", "entailment")  # fairseq's order: examples/roberta/README.md
_SPECIAL = tokenization.LEADING_TOKENS  # ids 0 to 3 in both libraries


def read_checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights under current names, and the model settings from `args` or, in newer files, `cfg` (else empty). Executes
    no pickled code. Raises `InputError` for content other than plain values, tensors and `argparse.Namespace`."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = next((line for line in str(error).splitlines() if "Unsupported" in line), str(error).split("\n")[0])
        resave = _RESAVE.format(path=path, plain=path.with_name(f"plain_{path.name}"))
        raise InputError(
            f"checkpoint={path} cannot be read without running code: {reason.strip()}. If you trust it, save weights "
            f"and settings where fairseq is installed, and convert plain_{path.name}:\n{resave}"
        ) from None
    stored = content.get("args") or content.get("cfg", {}).get("model", {})  # fairseq's precedence
    settings = vars(stored) if isinstance(stored, argparse.Namespace) else stored
    settings = {name: value for name, value in settings.items() if value is not None}  # None: unset
    return upgrade_names(content["model"]), settings


def upgrade_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of any release under the last release's names (its `upgrade_state_dict`)."""
    renamed = {}
    for name, tensor in weights.items():
        name = re.sub(r"^decoder\.", "encoder.", name).replace(".emb_layer_norm.", ".layernorm_embedding.")
        if packed := re.fullmatch(r"(.*self_attn\.)in_proj_(weight|bias)", name):
            for letter, value in zip("qkv", tensor.chunk(3), strict=True):
                renamed[f"{packed[1]}{letter}_proj.{packed[2]}"] = value
        elif not name.endswith(".version"):
            renamed[name] = tensor
    return renamed


def to_hugging_face(weights: dict[str, torch.Tensor], settings: dict[str, Any], head: str | None) -> PreTrainedModel:
    """`RobertaForMaskedLM`, or with a `head` of `classification_heads` `RobertaForSequenceClassification`. Raises
    `InputError` for unsupported settings and unknown weights, and `RuntimeError` for missing weights or other
    shapes."""
    config = build_config(weights, settings, head)
    state, left, names = {}, [], module_names(config.num_hidden_layers, head)
    for name, tensor in weights.items():
        module, _, kind = name.rpartition(".")
        if module in names:
            state[f"{names[module]}.{kind}"] = tensor.float()
        else:
            left.append(name)
    if strange := [name for name in left if not name.startswith((_HEADS, _LM_HEAD))]:
        raise InputError(f"{len(strange)} weights are not RoBERTa's, such as {strange[0]}: name another checkpoint")
    if left:
        logger.info(f"left out: {', '.join(sorted({'.'.join(name.split('.')[:2]) for name in left}))}")
    state["roberta.embeddings.token_type_embeddings.weight"] = torch.zeros(1, config.hidden_size)
    if "lm_head.decoder.bias" in state:
        state["lm_head.bias"] = state["lm_head.decoder.bias"]  # tied
    model = (RobertaForSequenceClassification if head else RobertaForMaskedLM)(config)
    model.load_state_dict(state)
    model.tie_weights()
    return model.eval()


def module_names(layers: int, head: str | None) -> dict[str, str]:
    """fairseq's module names -> Hugging Face's, for the body and `head` or the masked-LM head."""
    names = {f"{_BODY}{ours}": f"roberta.{theirs}" for ours, theirs in _OUTSIDE.items()}
    for layer in range(layers):
        before, after = f"{_BODY}layers.{layer}.", f"roberta.encoder.layer.{layer}."
        names |= {f"{before}{ours}": f"{after}{theirs}" for ours, theirs in _IN_LAYER.items()}
    if head:
        return names | {f"{_HEADS}{head}.{part}": f"classifier.{part}" for part in ("dense", "out_proj")}
    names |= {f"{_LM_HEAD}{part}": f"lm_head.{part}" for part in ("dense", "layer_norm")}
    return names | {"encoder.lm_head": "lm_head.decoder"}


def build_config(weights: dict[str, torch.Tensor], settings: dict[str, Any], head: str | None) -> RobertaConfig:
    """The config: sizes from the weights' shapes, the rest from the settings. Raises `InputError` for an unsupported
    setting."""
    if not settings:
        raise InputError(
            "the checkpoint has no settings (args or cfg) for attention heads and activation: name another checkpoint"
        )
    activation = hidden_activation(settings, head)
    with explained("the checkpoint is not a RoBERTa of fairseq"):
        vocab_size, hidden = weights[_TOKENS].shape
        positions = len(weights[_POSITIONS])
        inner = len(weights[f"{_BODY}layers.0.fc1.weight"])
    config = RobertaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_hidden_layers=len({name.split(".")[3] for name in weights if name.startswith(f"{_BODY}layers.")}),
        num_attention_heads=settings.get("encoder_attention_heads", 12),  # fairseq's default
        intermediate_size=inner,
        hidden_act=activation,
        max_position_embeddings=positions,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        hidden_dropout_prob=settings.get("dropout", 0.1),
        attention_probs_dropout_prob=settings.get("attention_dropout", 0.1),
        classifier_dropout=settings.get("pooler_dropout", 0.0),
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
    )
    if not head:
        config.tie_word_embeddings = is_tied(weights, settings)
        return config
    heads = {
        name.split(".")[1]: len(weights[name]) for name in weights if re.match(rf"{_HEADS}[^.]+\.out_proj.w", name)
    }
    if head not in heads:
        raise InputError(f"head={head} is not one of the checkpoint's: {', '.join(heads) or 'it has none'}")
    config.num_labels = heads[head]
    if head == "mnli":
        config.id2label = dict(enumerate(MNLI_LABELS))
        config.label2id = {label: number for number, label in config.id2label.items()}
    return config


def hidden_activation(settings: dict[str, Any], head: str | None) -> str:
    """Hugging Face's name of the activation. Raises `InputError` for settings of the logits that Hugging Face's RoBERTa
    does not support: its classification head uses tanh, its masked-LM head GELU."""
    for name, wanted in {**_BODY_SETTINGS, **(_HEAD_SETTINGS if head else {})}.items():
        value = settings.get(name, wanted)
        if value != wanted and (value or wanted):
            raise InputError(f"the checkpoint has {name}={value!r}, but Hugging Face's RoBERTa needs {wanted!r}")
    activation = settings.get("activation_fn", "gelu")
    known = tuple(_ACTIVATIONS) if head else ("gelu",)
    if activation not in known:
        raise InputError(f"activation_fn={activation!r}, but Hugging Face's RoBERTa supports {', '.join(known)} here")
    return _ACTIVATIONS[activation]


def is_tied(weights: dict[str, torch.Tensor], settings: dict[str, Any]) -> bool:
    """Whether the masked-LM decoder is tied to the embedding. Raises `InputError` for an empty head, and for weights
    that differ despite tied settings."""
    dense = weights.get(f"{_LM_HEAD}dense.weight")
    if dense is not None and not dense.any():
        raise InputError("the masked-LM head is empty (to_fairseq writes it so for a classifier): name a --head")
    differ = not weights.get(_LM_DECODER, weights[_TOKENS]).equal(weights[_TOKENS])
    untied = settings.get("untie_weights_roberta", False)
    if differ and not untied:
        raise InputError(f"untie_weights_roberta={untied}, and {_LM_DECODER} is not {_TOKENS}")
    return not untied


def to_fairseq(model: PreTrainedModel, vocab_size: int, head: str | None = None) -> dict[str, torch.Tensor]:
    """Weights under fairseq's names, with the token-type vector added to the positions and without rows beyond
    `vocab_size`. A classifier becomes the head `head` (MNLI's labels in fairseq's order) and gets an empty masked-LM
    head. Raises `InputError` for what fairseq's RoBERTa does not support."""
    check_supported(model, head)
    state = {name: tensor.detach().cpu().float() for name, tensor in model.state_dict().items()}
    types = state.pop("roberta.embeddings.token_type_embeddings.weight")
    names = {theirs: ours for ours, theirs in module_names(model.config.num_hidden_layers, head).items()}
    weights = {}
    for name, tensor in state.items():
        module, _, kind = name.rpartition(".")
        if module in names:
            rows = vocab_size if module == "lm_head.decoder" else len(tensor)
            weights[f"{names[module]}.{kind}"] = tensor[:rows].clone()
        elif name != "lm_head.bias":  # tied to the decoder's
            hint = "" if head else "; name a head, e.g. mnli"
            raise InputError(f"fairseq's RoBERTa has no module for {name}{hint}")
    weights[_TOKENS] = weights[_TOKENS][:vocab_size].clone()
    weights[_POSITIONS] += types[0]
    if head:  # fairseq loads no model without a masked-LM head; this one has equal logits for all tokens
        hidden, zeros = model.config.hidden_size, torch.zeros
        weights |= {_LM_DECODER: weights[_TOKENS], f"{_LM_HEAD}bias": zeros(vocab_size)}
        weights |= {f"{_LM_HEAD}dense.weight": zeros(hidden, hidden), f"{_LM_HEAD}dense.bias": zeros(hidden)}
        weights |= {f"{_LM_HEAD}layer_norm.weight": torch.ones(hidden), f"{_LM_HEAD}layer_norm.bias": zeros(hidden)}
    if head == "mnli":
        labels = {label.lower(): number for number, label in model.config.id2label.items()}
        if set(labels) != set(MNLI_LABELS):
            raise InputError(f"head=mnli has the labels {', '.join(MNLI_LABELS)}, and the model {', '.join(labels)}")
        order = [labels[label] for label in MNLI_LABELS]
        for kind in ("weight", "bias"):
            weights[f"{_HEADS}mnli.out_proj.{kind}"] = weights[f"{_HEADS}mnli.out_proj.{kind}"][order]
    return weights


def check_supported(model: PreTrainedModel, head: str | None) -> None:
    """Raise `InputError` for a config that fairseq's RoBERTa does not support."""
    config = model.config
    activations = _ACTIVATIONS.values() if head else ("gelu",)  # fairseq's masked-LM head uses the layers' activation
    if config.hidden_act not in activations:
        raise InputError(f"hidden_act={config.hidden_act!r}: fairseq supports {', '.join(dict.fromkeys(activations))}")
    wanted = {"layer_norm_eps": 1e-5, "pad_token_id": 1, "is_decoder": False, "add_cross_attention": False}
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise InputError(f"{name}={getattr(config, name)}, but fairseq's RoBERTa uses {value}")
    types = model.roberta.embeddings.token_type_embeddings.weight
    if not (types == types[0]).all():
        raise InputError(f"fairseq's RoBERTa has no token types, and the model has type_vocab_size={len(types)}")


def read_vocabulary(dict_txt: Path, encoder_json: Path, bpe: Path) -> PreTrainedTokenizerBase:
    """Hugging Face's tokenizer from fairseq's files. Rows of dict.txt are numbers of tokens in encoder.json (GPT-2's
    vocabulary), in embedding order. Raises `InputError` for a row without a token."""
    tokens = {str(number): token for token, number in read_input_json(encoder_json).items()}
    vocab = {token: number for number, token in enumerate(_SPECIAL)}
    for number, line in enumerate(read_text(dict_txt).splitlines(), 1):
        symbol = line.rsplit(" ", 1)[0]
        if symbol not in tokens and not symbol.startswith("madeupword"):  # padding to a multiple of 8
            raise InputError(f"{dict_txt}, line {number}: {symbol!r} is not a token of {encoder_json}")
        vocab[tokens.get(symbol, symbol)] = len(vocab)
    lines = read_text(bpe).replace("\r\n", "\n").split("\n")
    merges = [tuple(line.split(" ")) for line in lines[lines[0].startswith("#version") :] if line]  # "# #" is a merge
    pairs = [pair for pair in merges if "".join(pair) in vocab]
    if parts := sorted({part for pair in pairs for part in pair} - vocab.keys()):
        raise InputError(f"{dict_txt} lacks {listed(parts)}, from which {bpe} merges tokens that it has: no tokenizer")
    return tokenization.build_tokenizer(vocab, pairs)


def write_vocabulary(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write dict.txt, encoder.json and vocab.bpe with the same token ids. Raises `InputError` for a tokenizer other
    than GPT-2's BPE with RoBERTa's ids."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    ordered = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if [token for token, _ in ordered[:4]] != list(_SPECIAL) or ordered[-1][0] != tokenizer.mask_token:
        raise InputError("the tokenizer's ids are not RoBERTa's: <s> <pad> </s> <unk> first, <mask> last")
    inner = [token for token, _ in ordered[4:-1]]
    if added := [token["content"] for token in backend["added_tokens"] if token["content"] in set(inner)]:
        raise InputError(f"fairseq's BPE has no added tokens, and the tokenizer has {', '.join(added[:3])}")
    wanted = {
        "normalizer": {"type": None},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "ignore_merges": False},
    }
    for stage, values in wanted.items():
        for name, value in values.items():
            if (found := (backend[stage] or {}).get(name)) != value:
                raise InputError(f"the tokenizer's {stage} has {name}={found!r}, but fairseq's BPE uses {value!r}")
    lines = "".join(f"{number} 1\n" for number in range(len(inner)))
    (folder / "dict.txt").write_text(lines, encoding="utf-8")
    durable.write_json(folder / "encoder.json", {token: number for number, token in enumerate(inner)})
    merges = "".join(" ".join(pair) + "\n" for pair in backend["model"]["merges"])
    (folder / "vocab.bpe").write_text(f"#version: 0.2\n{merges}", encoding="utf-8")


def build_checkpoint(model: PreTrainedModel, vocab_size: int, head: str | None) -> dict[str, Any]:
    """The content of model.pt: weights, model settings, and an empty training history, which fairseq's loaders need;
    parameters as in `to_fairseq`."""
    config, weights = model.config, to_fairseq(model, vocab_size, head)
    positions = config.max_position_embeddings - config.pad_token_id - 1
    pooler_dropout = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
    settings = argparse.Namespace(
        arch="roberta",
        task="masked_lm",
        criterion="masked_lm",
        encoder_layers=config.num_hidden_layers,
        encoder_embed_dim=config.hidden_size,
        encoder_ffn_embed_dim=config.intermediate_size,
        encoder_attention_heads=config.num_attention_heads,
        dropout=config.hidden_dropout_prob,
        attention_dropout=config.attention_probs_dropout_prob,
        pooler_dropout=pooler_dropout,
        activation_fn={theirs: ours for ours, theirs in _ACTIVATIONS.items()}[config.hidden_act],
        pooler_activation_fn="tanh",
        untie_weights_roberta=not weights[_LM_DECODER].equal(weights[_TOKENS]),
        load_checkpoint_heads=True,
        max_positions=positions,
        tokens_per_sample=positions,
    )
    history = [{"optimizer_name": "FairseqAdam", "lr_scheduler_state": {}, "num_updates": 0}]
    return {"args": settings, "model": weights, "optimizer_history": history, "extra_state": {}}


def convert_to_hf(args: argparse.Namespace) -> None:
    """Run the command `to_hf`."""
    files = (args.dict, args.encoder, args.bpe)
    if all(files) == bool(args.tokenizer_name) or any(files) != all(files):
        raise InputError("name dict, encoder and bpe (fairseq's vocabulary) or, instead, tokenizer_name")
    if args.tokenizer_name:
        tokenizer = tokenization.load_tokenizer(args.tokenizer_name)
    else:
        with explained(f"{', '.join(files)} is not fairseq's dict.txt with GPT-2's encoder.json and vocab.bpe"):
            tokenizer = read_vocabulary(*map(Path, files))
    with explained(f"{args.checkpoint} is not a RoBERTa of fairseq"):
        weights, settings = read_checkpoint(Path(args.checkpoint))
        model = to_hugging_face(weights, settings, args.head)
    if len(tokenizer) != model.config.vocab_size:
        raise InputError(f"the tokenizer has {len(tokenizer):,} entries, the embedding {model.config.vocab_size:,}")
    model.save_pretrained(args.output_dir)
    for_saving(tokenizer, model.config).save_pretrained(args.output_dir)
    logger.info(f"{args.output_dir}: {type(model).__name__}, {model.num_parameters():,} parameters")


def convert_to_fairseq(args: argparse.Namespace) -> None:
    """Run the command `to_fairseq`."""
    if "." in (args.head or ""):
        raise InputError(f"head={args.head}: torch allows no dot in the name of a head")
    model = load_hugging_face(args.model_name_or_path, args.head)
    tokenizer, folder = tokenization.load_tokenizer(args.model_name_or_path), Path(args.output_dir)
    if len(tokenizer) > model.config.vocab_size:
        raise InputError(f"the tokenizer has {len(tokenizer):,} entries, the embedding {model.config.vocab_size:,}")
    checkpoint = build_checkpoint(model, len(tokenizer), args.head)
    durable.make_folder(folder)
    write_vocabulary(tokenizer, folder)
    torch.save(checkpoint, folder / "model.pt")
    if args.head:
        logger.warning(
            "the masked-LM head in model.pt is empty: a classifier has none, and fairseq loads no model without one"
        )
    logger.info(f"{folder}: model.pt, dict.txt, encoder.json, vocab.bpe")


def load_hugging_face(name: str, head: str | None) -> PreTrainedModel:
    """The masked-LM model or, with a `head`, the classifier of a Hugging Face checkpoint, in float32. Raises
    `InputError` if the checkpoint lacks this head."""
    config = read_config(name)
    if config.model_type != "roberta":
        raise InputError(f"{name!r} is a {config.model_type!r} model, and fairseq's is 'roberta'")
    cls = RobertaForSequenceClassification if head else RobertaForMaskedLM
    hint = "leave --head out for a masked-LM model" if head else "name the --head of a classifier, e.g. mnli"
    model, found = load(cls, name, config=config, advice=hint)
    if left := sorted(found["unexpected_keys"]):
        logger.warning(f"left out: {', '.join(left)}")
    return model.eval()


def main(argv: list[str] | None = None) -> None:
    parser = RecipeParser((), description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command", parser_class=functools.partial(RecipeParser, ()))
    to_hf = commands.add_parser("to_hf", help="fairseq's model.pt as a Hugging Face folder")
    to_hf.add_argument("--checkpoint", required=True, help="model.pt")
    to_hf.add_argument("--dict", help="dict.txt in the folder of model.pt")
    to_hf.add_argument("--encoder", help="encoder.json of GPT-2")
    to_hf.add_argument("--bpe", help="vocab.bpe of GPT-2")
    to_hf.add_argument("--tokenizer_name", help="tokenizer with the same ids, in place of dict, encoder and bpe")
    to_hf.add_argument("--head", help="classification head, e.g. mnli; default: the masked-LM head")
    to_hf.set_defaults(convert=convert_to_hf)
    back = commands.add_parser("to_fairseq", help="a Hugging Face RoBERTa as fairseq's model.pt")
    back.add_argument("--model_name_or_path", required=True)
    back.add_argument("--head", help="name of the classification head in model.pt, e.g. mnli")
    back.set_defaults(convert=convert_to_fairseq)
    for command in (to_hf, back):
        command.add_argument("--output_dir", required=True)
    args = parser.parse_args(argv)
    durable.check_new_folder(Path(args.output_dir))
    set_up_logging()
    args.convert(args)


if __name__ == "__main__":
    exit_on_error(main)
