"""Tokenizer loading, tokenization of training text (paper, section 4.4; Radford et al. 2019).

Ids as in RoBERTa's own vocabulary: `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3, then bytes and merges, `<mask>` last.
"""

import copy
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors
from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerBase, RobertaTokenizer

from roberta_recipe import durable
from roberta_recipe.errors import InputError
from roberta_recipe.input_files import explained, path_or_hub_id, resolve_path
from roberta_recipe.log import logger

LEADING_TOKENS = ["<s>", "<pad>", "</s>", "<unk>"]
MASK_TOKEN = AddedToken("<mask>", lstrip=True, special=True)  # lstrip: it takes the space before it
_NO_TEXT = "\U0010ffff"  # a noncharacter of Unicode
_PROBE = "The QUICK brown foxes can't jump: naïve Straße, 2024, 東京!"


def build_tokenizer(vocab: dict[str, int] | str, merges: list[tuple[str, str]] | str) -> RobertaTokenizer:
    """RoBERTa's tokenizer over a vocabulary, given as objects or as the paths of vocab.json and merges.txt."""
    return RobertaTokenizer(vocab=vocab, merges=merges, mask_token=MASK_TOKEN, model_max_length=512)


FILES = {  # tokenizer files of a checkpoint
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "vocab.txt"),
    *("special_tokens_map.json", "added_tokens.json"),
}
MLM_TOKENS = ("bos_token", "eos_token", "pad_token", "mask_token")
_BERT_NAMES = {"bos_token": "cls_token", "eos_token": "sep_token"}
_ROLES = (*MLM_TOKENS, "unk_token", "cls_token", "sep_token")


def load_tokenizer(name_or_path: str | None, needed: tuple[str, ...] = MLM_TOKENS) -> PreTrainedTokenizerBase:
    """`AutoTokenizer.from_pretrained` with padding on the right; also for a folder with vocab.json and merges.txt only.

    Raises `InputError` for a missing tokenizer, for files that differ from the folder's manifest, and where a `needed`
    token is missing.
    """
    if not name_or_path:
        raise InputError("tokenizer_name is not set: name a folder made by tokenizer/train_tokenizer.py, or a Hub id")
    folder, name = resolve_path(name_or_path), repr(str(name_or_path))
    if (folder / durable.MANIFEST).exists() and (damage := durable.damage(folder, only=FILES.__contains__)):
        fix = f"recreate it, or remove {durable.MANIFEST} if you changed it yourself"
        raise InputError(f"the tokenizer {name} is damaged: {damage}; {fix}")
    bare = [folder / "vocab.json", folder / "merges.txt"]
    fix = ": name a folder or a Hub id, or train one with tokenizer/train_tokenizer.py"
    fix += "; a SentencePiece model without tokenizer.json (DeBERTa-v3's) needs pip install sentencepiece protobuf"
    with explained(f"no tokenizer at tokenizer_name={name}", fix):
        if not (folder / "tokenizer_config.json").exists() and all(path.exists() for path in bare):
            tokenizer = build_tokenizer(*map(str, bare))
            if "Ġ" not in tokenizer.get_vocab():
                raise InputError(
                    f"{bare[0]} is not of a byte-level BPE; add its tokenizer.json and tokenizer_config.json"
                )
        else:
            tokenizer = AutoTokenizer.from_pretrained(path_or_hub_id(name_or_path), trust_remote_code=False)
    # for a folder with a config alone, transformers 5 returns an empty tokenizer
    if len(tokenizer) <= len(tokenizer.all_special_ids) or not tokenizer.is_fast:
        raise InputError(f"no tokenizer at tokenizer_name={name}: it needs the tokenizer.json of a fast tokenizer")
    if missing := [token for token in needed if _special(tokenizer, token) is None]:
        raise InputError(f"the tokenizer {name} has no {', '.join(missing)}, and needs {', '.join(needed)}")
    if needed == MLM_TOKENS and not _template_ids(tokenizer):
        _set_template(tokenizer, name)
    _warn_if_rebuilt(tokenizer, folder / "tokenizer.json", name)
    # positions count from the left, and heads read the first token; init_kwargs are saved
    tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "right"
    if tokenizer.init_kwargs.get("local_files_only"):  # set by HF_HUB_OFFLINE, which may differ between restarts
        tokenizer.init_kwargs["local_files_only"] = False
    return tokenizer


def _set_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Give a tokenizer whose template does not add two special tokens that of training, `<s> A </s>`, so that
    `pipeline` and fine-tuning of the saved checkpoint have it. Token types are those of packed pairs."""
    backend, ids = tokenizer.backend_tokenizer, _role_ids(tokenizer)
    bos, eos = tokenizer.convert_ids_to_tokens(ids)
    template = processors.TemplateProcessing(
        single=[bos, "$A", eos],
        pair=[bos, "$A", eos, f"{eos}:1", "$B:1", f"{eos}:1"],
        special_tokens=[(bos, ids[0]), (eos, ids[1])],
    )
    is_byte_level = isinstance(backend.post_processor, processors.ByteLevel)  # trims offsets
    backend.post_processor = processors.Sequence([backend.post_processor, template]) if is_byte_level else template
    logger.info(
        f"Template    {name} does not add two special tokens to a text; here it adds {bos} and {eos}, as in training"
    )


def _warn_if_rebuilt(tokenizer: PreTrainedTokenizerBase, path: Path, name: str) -> None:
    """Warn if the tokenizer class, which rebuilds its backend, drops the normalizer or pre-tokenizer of tokenizer.json:
    a text then has other ids."""
    if path.is_file():
        backends = (Tokenizer.from_file(str(path)), tokenizer.backend_tokenizer)
        ids, used = (backend.encode(_PROBE, add_special_tokens=False).ids for backend in backends)
        if ids != used:
            logger.warning(
                f"Tokenizer   {name}: {type(tokenizer).__name__} of transformers splits text in another way than its "
                'tokenizer.json; if that is right, set "tokenizer_class": "PreTrainedTokenizerFast" in '
                "tokenizer_config.json"
            )


def _special(tokenizer: PreTrainedTokenizerBase, name: str) -> str | None:
    token = getattr(tokenizer, name)
    return getattr(tokenizer, _BERT_NAMES[name]) if token is None and name in _BERT_NAMES else token


def boundary_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    """`bos_id` (begins a block) and `eos_id` (ends a sentence): the two tokens that the template adds around
    a text; without such a template, `<s>` and `</s>`, or BERT's [CLS] and [SEP]; None for a token that is unset."""
    first, last = _template_ids(tokenizer) or _role_ids(tokenizer)
    return {"bos_id": first, "eos_id": last}


def _template_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The two special tokens that the template adds around a text; empty for another number of them."""
    encoding = tokenizer.backend_tokenizer.encode("")  # `tokenizer("")` starts threads, on which a forked process hangs
    ids = [token for token, attended in zip(encoding.ids, encoding.attention_mask, strict=True) if attended]
    return ids if len(ids) == 2 else []


def _role_ids(tokenizer: PreTrainedTokenizerBase) -> list[int | None]:
    tokens = [_special(tokenizer, name) for name in MLM_TOKENS[:2]]
    return [None if token is None else tokenizer.convert_tokens_to_ids(token) for token in tokens]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of vocabulary, merges, pre-tokenization and special tokens: of everything that a block's ids depend on."""
    backend = _text_state(tokenizer)
    state = {name: backend[name] for name in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
    if (ids := list(boundary_ids(tokenizer).values())) != _role_ids(tokenizer):
        state["boundaries"] = ids
    return durable.fingerprint(state)


def files_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of all files of a saved tokenizer, including those that no block's ids depend on."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return durable.fingerprint({path.name: durable.sha256(path) for path in Path(folder).iterdir()})


def _text_state(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The backend's JSON with only standard roles (`</s>`, `<mask>`, ...) marked special. (`split_special_tokens` makes
    `</s>` in a text plain text, but also splits the user's special tokens, such as `[E1]`.)"""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    roles = {getattr(tokenizer, role) for role in _ROLES}
    for token in state["added_tokens"]:
        token["special"] = token["content"] in roles or (token["special"] and tokenizer.split_special_tokens)
    return state


def corpus_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """A copy of the tokenizer's backend for training text: `</s>` or `<mask>` in a text is plain text, not the special
    token as in `tokenizer(...)`. Other added tokens stay one token each."""
    state = _text_state(tokenizer)
    if state["model"]["type"] != "BPE":  # pieces match in text, also those of special tokens
        roles = {getattr(tokenizer, role) for role in _ROLES} - {tokenizer.unk_token}
        kind = type(vocab := state["model"]["vocab"])  # a list of [piece, score] in Unigram
        items = vocab.items() if kind is dict else vocab
        state["model"]["vocab"] = kind([piece + _NO_TEXT * (piece in roles), value] for piece, value in items)
        pieces = {piece for piece, _ in items}
        state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in roles & pieces]
    backend = Tokenizer.from_str(json.dumps(state))
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    return backend


def text_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy of a fast tokenizer with `corpus_backend`, for fine-tuning features. Read attributes such as
    `mask_token_id` from the original."""
    copied = copy.copy(tokenizer)
    copied._tokenizer, copied.split_special_tokens = corpus_backend(tokenizer), True
    return copied


def corpus_encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[str]], list[list[int]]]:
    """A function from texts to ids without special tokens, on all cores."""
    backend = corpus_backend(tokenizer)
    return lambda texts: [one.ids for one in backend.encode_batch_fast(texts, add_special_tokens=False)]
