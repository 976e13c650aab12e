r"""RoBERTa checkpoints of fairseq as Hugging Face's, and back (names and shapes: fairseq/models/roberta/model.py).

    python -m roberta_recipe.tools.fairseq to_hf --checkpoint roberta.base/model.pt --dict roberta.base/dict.txt \
        --encoder encoder.json --bpe vocab.bpe --output_dir runs/roberta_base
    python -m roberta_recipe.tools.fairseq to_fairseq --model_name_or_path runs/roberta_base --output_dir fairseq_model

The logits are the same both ways. fairseq has no token types, so their single vector is added to the positions, and no
rows of the embedding without a token, so they are left out.
"""

import argparse
import json
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
)

from roberta_recipe import durable
from roberta_recipe.data import tokenization
from roberta_recipe.errors import InputError, exit_on_error
from roberta_recipe.input_files import path_or_hub_id, read_input_json, read_text
from roberta_recipe.log import logger, set_up_logging

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
MNLI_LABELS = ("contradiction", "neutral", "entailment")  # fairseq's order: examples/roberta/README.md
_SPECIAL = tokenization.LEADING_TOKENS  # 0 to 3 in both


def read_checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights under today's names, and the training arguments. No code of the pickle is run. Raises `InputError` where
    it holds more than tensors and an `argparse.Namespace`, or is no checkpoint."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
        weights = content["model"]
    except FileNotFoundError:
        raise InputError(f"checkpoint={path} is missing") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = next((line for line in str(error).splitlines() if "Unsupported" in line), str(error).split("\n")[0])
        raise InputError(
            f"checkpoint={path} cannot be read without running what it holds: {reason}. In a fairseq that trusts it, "
            "save {'model': checkpoint['model'], 'args': None} anew"
        ) from None
    except (KeyError, TypeError):
        raise InputError(f"checkpoint={path} is no checkpoint of fairseq: it has no 'model'") from None
    return modern(weights), vars(content["args"]) if content.get("args") else {}


def modern(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of any release under the names of the last release (its `upgrade_state_dict`)."""
    renamed = {}
    for name, tensor in weights.items():
        name = re.sub(r"^decoder\.", "encoder.", name).replace(".emb_layer_norm.", ".layernorm_embedding.")
        if packed := re.fullmatch(r"(.*self_attn\.)in_proj_(weight|bias)", name):
            for letter, value in zip("qkv", tensor.chunk(3), strict=True):
                renamed[f"{packed[1]}{letter}_proj.{packed[2]}"] = value
        elif not name.endswith(".version"):
            renamed[name] = tensor
    return renamed


def to_hugging_face(
    weights: dict[str, torch.Tensor], arguments: dict[str, Any], head: str | None = None, heads: int | None = None
) -> PreTrainedModel:
    """`RobertaForMaskedLM`, or with a `head` of `classification_heads` `RobertaForSequenceClassification`. `heads`:
    attention heads, where the arguments do not say. Raises `InputError` for weights that are missing or left over."""
    config = config_of(weights, arguments, heads)
    found, used = {}, set()
    for name, tensor in weights.items():
        if new := hugging_face_name(name, head):
            found[new] = tensor.float()
            used.add(name)
    left = [name for name in weights if name not in used and not name.startswith((_HEADS, _LM_HEAD))]
    if left:
        raise InputError(f"{len(left)} weights are not RoBERTa's, {left[0]} among them")
    found["roberta.embeddings.token_type_embeddings.weight"] = torch.zeros(1, config.hidden_size)
    if head:
        config.num_labels = len(found["classifier.out_proj.weight"]) if "classifier.out_proj.weight" in found else 0
        if not config.num_labels:
            head_names = sorted({name.split(".")[1] for name in weights if name.startswith(_HEADS)})
            raise InputError(f"head={head} is none of the checkpoint's: {', '.join(head_names) or 'it has none'}")
        if head == "mnli":
            config.id2label = dict(enumerate(MNLI_LABELS))
            config.label2id = {label: number for number, label in config.id2label.items()}
        model: PreTrainedModel = RobertaForSequenceClassification(config)
    else:
        model = RobertaForMaskedLM(config)
    missing, unexpected = model.load_state_dict(found, strict=False)
    model.tie_weights()
    missing = [name for name in missing if not name.startswith("lm_head.decoder.")]  # tied
    if missing or unexpected:
        raise InputError(f"the checkpoint lacks {', '.join(missing[:3])}, and has {', '.join(unexpected[:3])} too many")
    return model.eval()


def hugging_face_name(name: str, head: str | None) -> str | None:
    """Hugging Face's name of a weight; None for a weight of another head."""
    if name.startswith(_BODY):
        module, _, kind = name.removeprefix(_BODY).rpartition(".")
        if module in _OUTSIDE:
            return f"roberta.{_OUTSIDE[module]}.{kind}"
        layer = re.fullmatch(r"layers\.(\d+)\.(.*)", module)
        if layer and layer[2] in _IN_LAYER:
            return f"roberta.encoder.layer.{layer[1]}.{_IN_LAYER[layer[2]]}.{kind}"
    if name.startswith(_LM_HEAD) and not head:
        rest = name.removeprefix(_LM_HEAD)
        return {"weight": "lm_head.decoder.weight", "bias": "lm_head.bias"}.get(rest, f"lm_head.{rest}")
    if head and name.startswith(f"{_HEADS}{head}."):
        return f"classifier.{name.removeprefix(f'{_HEADS}{head}.')}"
    return None


def config_of(weights: dict[str, torch.Tensor], arguments: dict[str, Any], heads: int | None) -> RobertaConfig:
    """A config from the weights' shapes; attention heads and dropouts are from the arguments (without arguments, a head
    for every 64 of the hidden size, and 0.1)."""
    try:
        vocab_size, hidden = weights[f"{_BODY}embed_tokens.weight"].shape
        positions = len(weights[f"{_BODY}embed_positions.weight"])
        inner = len(weights[f"{_BODY}layers.0.fc1.weight"])
    except KeyError as error:
        raise InputError(f"the checkpoint is no RoBERTa of fairseq: it has no {error}") from None
    heads = heads or arguments.get("encoder_attention_heads") or hidden // 64
    if not heads or hidden % heads:
        raise InputError(f"{heads} attention heads do not divide the hidden size {hidden}: --num_attention_heads")
    layers = {name.split(".")[3] for name in weights if name.startswith(f"{_BODY}layers.")}
    return RobertaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_hidden_layers=len(layers),
        num_attention_heads=heads,
        intermediate_size=inner,
        max_position_embeddings=positions,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        hidden_dropout_prob=arguments.get("dropout", 0.1),
        attention_probs_dropout_prob=arguments.get("attention_dropout", 0.1),
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
    )


def to_fairseq(model: PreTrainedModel, vocab_size: int, head: str | None = None) -> dict[str, torch.Tensor]:
    """Weights under fairseq's names; the token type's vector is added to all positions, rows beyond `vocab_size` are
    left out. A classifier becomes the head `head`, MNLI's with its labels in fairseq's order."""
    state = {name: tensor.detach().cpu().float() for name, tensor in model.state_dict().items()}
    types = state.pop("roberta.embeddings.token_type_embeddings.weight")
    names = {f"roberta.{theirs}": f"{_BODY}{ours}" for ours, theirs in _OUTSIDE.items()}
    for layer in range(model.config.num_hidden_layers):
        layer_name = f"roberta.encoder.layer.{layer}"
        names |= {f"{layer_name}.{theirs}": f"{_BODY}layers.{layer}.{ours}" for ours, theirs in _IN_LAYER.items()}
    weights = {}
    for name, tensor in state.items():
        module, _, kind = name.rpartition(".")
        if module in names:
            weights[f"{names[module]}.{kind}"] = tensor.clone()
        elif name in ("lm_head.decoder.weight", "lm_head.bias"):
            weights[_LM_HEAD + kind] = tensor[:vocab_size].clone()
        elif module in ("lm_head.dense", "lm_head.layer_norm"):
            weights[f"{_LM_HEAD}{name.removeprefix('lm_head.')}"] = tensor.clone()
        elif module.startswith("classifier.") and head:
            weights[f"{_HEADS}{head}.{name.removeprefix('classifier.')}"] = tensor.clone()
        elif name != "lm_head.decoder.bias":  # tied to lm_head.bias
            hint = "" if head else "; name a head, e.g. mnli"
            raise InputError(f"fairseq's RoBERTa has no module for {name}{hint}")
    tokens, positions = f"{_BODY}embed_tokens.weight", f"{_BODY}embed_positions.weight"
    weights[tokens] = weights[tokens][:vocab_size].clone()
    weights[positions] += types[0]
    if head == "mnli":
        labels = {label.lower(): number for number, label in model.config.id2label.items()}
        if set(labels) != set(MNLI_LABELS):
            raise InputError(f"head=mnli has the labels {', '.join(MNLI_LABELS)}, and the model {', '.join(labels)}")
        order = [labels[label] for label in MNLI_LABELS]
        for kind in ("weight", "bias"):
            weights[f"{_HEADS}mnli.out_proj.{kind}"] = weights[f"{_HEADS}mnli.out_proj.{kind}"][order]
    return weights


def read_vocabulary(dict_txt: Path, encoder_json: Path, bpe: Path) -> PreTrainedTokenizerBase:
    """Hugging Face's tokenizer from fairseq's files: a row of dict.txt is the number of a token in encoder.json
    (GPT-2's vocabulary), in the order of the embedding. Raises `InputError` for a row that is no token."""
    tokens = {str(number): token for token, number in read_input_json(encoder_json).items()}
    vocab = {token: number for number, token in enumerate(_SPECIAL)}
    for number, line in enumerate(read_text(dict_txt).splitlines(), 1):
        symbol = line.rsplit(" ", 1)[0]
        if symbol not in tokens and not symbol.startswith("madeupword"):  # fills up to a multiple of 8
            raise InputError(f"{dict_txt}, line {number}: {symbol!r} is no token of {encoder_json}")
        vocab[tokens.get(symbol, symbol)] = len(vocab)
    lines = read_text(bpe).replace("\r\n", "\n").split("\n")
    merges = [tuple(line.split(" ")) for line in lines[lines[0].startswith("#version") :] if line]  # "# #" is a merge
    return tokenization.build_tokenizer(vocab, [pair for pair in merges if "".join(pair) in vocab])


def write_vocabulary(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """dict.txt, encoder.json and vocab.bpe from which fairseq gives every token the same id."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    ordered = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if [token for token, _ in ordered[:4]] != list(_SPECIAL) or ordered[-1][0] != tokenizer.mask_token:
        raise InputError("the tokenizer's ids are not RoBERTa's: <s> <pad> </s> <unk> first, <mask> last")
    inner = [token for token, _ in ordered[4:-1]]
    lines = "".join(f"{number} 1\n" for number in range(len(inner)))
    (folder / "dict.txt").write_text(lines, encoding="utf-8")
    durable.write_json(folder / "encoder.json", {token: number for number, token in enumerate(inner)})
    merges = "".join(" ".join(pair) + "\n" for pair in model["merges"])
    (folder / "vocab.bpe").write_text(f"#version: 0.2\n{merges}", encoding="utf-8")


def arguments_of(config: RobertaConfig) -> argparse.Namespace:
    """The arguments from which fairseq builds the model."""
    return argparse.Namespace(
        arch="roberta",
        task="masked_lm",
        criterion="masked_lm",
        encoder_layers=config.num_hidden_layers,
        encoder_embed_dim=config.hidden_size,
        encoder_ffn_embed_dim=config.intermediate_size,
        encoder_attention_heads=config.num_attention_heads,
        dropout=config.hidden_dropout_prob,
        attention_dropout=config.attention_probs_dropout_prob,
        activation_fn="gelu",
        max_positions=config.max_position_embeddings - config.pad_token_id - 1,
        tokens_per_sample=config.max_position_embeddings - config.pad_token_id - 1,
    )


def convert_to_hf(args: argparse.Namespace) -> None:
    """The command `to_hf`."""
    files = (args.dict, args.encoder, args.bpe)
    if all(files) == bool(args.tokenizer_name) or any(files) != all(files):
        raise InputError("name dict, encoder and bpe (fairseq's vocabulary) or, instead, tokenizer_name")
    if args.tokenizer_name:
        tokenizer = tokenization.load_tokenizer(args.tokenizer_name)
    else:
        if absent := [path for path in files if not Path(path).is_file()]:
            raise InputError(f"{absent[0]} is missing")
        tokenizer = read_vocabulary(*map(Path, files))
    weights, arguments = read_checkpoint(Path(args.checkpoint))
    model = to_hugging_face(weights, arguments, args.head, args.num_attention_heads)
    if len(tokenizer) != model.config.vocab_size:
        raise InputError(f"the tokenizer has {len(tokenizer):,} entries, the embedding {model.config.vocab_size:,}")
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    logger.info(f"{args.output_dir}: {type(model).__name__}, {model.num_parameters():,} parameters")


def convert_to_fairseq(args: argparse.Namespace) -> None:
    """The command `to_fairseq`."""
    path = path_or_hub_id(args.model_name_or_path)
    try:
        config = AutoConfig.from_pretrained(path)
        cls = RobertaForSequenceClassification if args.head else RobertaForMaskedLM
        model = cls.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise InputError(f"no checkpoint at model_name_or_path={args.model_name_or_path!r}: {error}") from None
    if config.model_type != "roberta":
        raise InputError(f"{args.model_name_or_path!r} is a {config.model_type!r} model, and fairseq's is 'roberta'")
    tokenizer, folder = tokenization.load_tokenizer(args.model_name_or_path), Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    weights = to_fairseq(model, len(tokenizer), args.head)
    torch.save({"args": arguments_of(config), "model": weights}, folder / "model.pt")
    write_vocabulary(tokenizer, folder)
    logger.info(f"{folder}: model.pt, dict.txt, encoder.json, vocab.bpe")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    to_hf = commands.add_parser("to_hf", help="fairseq's model.pt as a Hugging Face folder")
    to_hf.add_argument("--checkpoint", required=True, help="model.pt")
    to_hf.add_argument("--dict", help="dict.txt beside model.pt")
    to_hf.add_argument("--encoder", help="encoder.json of GPT-2")
    to_hf.add_argument("--bpe", help="vocab.bpe of GPT-2")
    to_hf.add_argument("--tokenizer_name", help="a tokenizer of the same ids, in place of dict, encoder and bpe")
    to_hf.add_argument("--head", help="a classification head, e.g. mnli; without it, the masked-LM head")
    to_hf.add_argument("--num_attention_heads", type=int, help="where the checkpoint has no arguments")
    to_hf.set_defaults(convert=convert_to_hf)
    back = commands.add_parser("to_fairseq", help="a Hugging Face RoBERTa as fairseq's model.pt")
    back.add_argument("--model_name_or_path", required=True)
    back.add_argument("--head", help="name of the classification head in model.pt, e.g. mnli")
    back.set_defaults(convert=convert_to_fairseq)
    for command in (to_hf, back):
        command.add_argument("--output_dir", required=True)
    args = parser.parse_args(argv)
    set_up_logging()
    args.convert(args)


if __name__ == "__main__":
    exit_on_error(main)
