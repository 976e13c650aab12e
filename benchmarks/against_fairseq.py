r"""Comparison with fairseq's own code: weights and logits in both directions, token ids, blocks.

    python benchmarks/against_fairseq.py --fairseq DIR --python PYTHON [--text FILE ...] [--tokenizer DIR]

fairseq runs in an environment of its own. Set-up in an empty folder (Python 3.11; fairseq 3d262bb, torch 2.13, numpy
2.4, Cython 3.3):

    git clone https://github.com/facebookresearch/fairseq && python3.11 -m venv venv
    venv/bin/pip install "pip<24.1"  # a newer pip refuses the metadata of omegaconf 2.0.6
    venv/bin/pip install torch omegaconf==2.0.6 hydra-core==1.0.7 numpy cython setuptools regex sacrebleu bitarray \
        cffi scikit-learn packaging tqdm requests
    cd fairseq && CPATH=$(../venv/bin/python -c "import numpy; print(numpy.get_include())") ../venv/bin/cythonize \
        -+ -i fairseq/data/data_utils_fast.pyx fairseq/data/token_block_utils_fast.pyx

Then `--fairseq fairseq --python venv/bin/python`. fairseq's files stay as they are; `import_fairseq` patches
`dataclass` in memory. `--text` takes UTF-8 files with a paragraph per line and an empty line between documents; without
it, text is generated. A run takes about five minutes of one core (fairseq composes its configuration for every model).
Every row of the printed table must end in "equal", else the exit code is 1. The exception are the rows "too long in
fairseq", a known difference: of a sentence longer than a block, fairseq makes one overlong block, and we split it.
"""

import argparse
import contextlib
import dataclasses
import io
import itertools
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

INSIDE = sys.argv[1:2] == ["--inside"]  # run by fairseq's interpreter
ROOT = Path(__file__).resolve().parent.parent
MAX_DIFFERENCE = 2e-5  # of logits, relative to the largest; float32 with another order of additions
CLASSES = 3
MASKED = "The cat <mask> in the garden."

if not INSIDE:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from conftest import make_documents
    from transformers import (
        AutoModelForMaskedLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        RobertaConfig,
        RobertaForMaskedLM,
        RobertaForSequenceClassification,
    )

    from roberta_recipe.data import packing, tokenization
    from roberta_recipe.data.documents import split_sentences
    from roberta_recipe.data.tokenizer_training import train_tokenizer
    from roberta_recipe.errors import InputError
    from tools import fairseq as converter


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Set all weights to random values, as biases of 0 and scales of 1 would hide errors."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        scale = "norm" in name.lower() and name.endswith("weight")
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2 + scale


def packed(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """Rows of different lengths as a flat tensor with sizes."""
    return {"sizes": torch.tensor([len(row) for row in rows]), "ids": torch.tensor(list(itertools.chain(*rows)))}


def unpacked(rows: dict[str, torch.Tensor]) -> list[list[int]]:
    return [row.tolist() for row in rows["ids"].long().split(rows["sizes"].tolist())]


# ---- in fairseq's interpreter


def import_fairseq(folder: str) -> None:
    """Import fairseq with hydra 1.0.7 under Python 3.11, which requires hashable default values of dataclass fields."""
    declare = dataclasses.dataclass

    def hashable(cls=None, /, **options):
        if cls is None:
            return lambda decorated: hashable(decorated, **options)
        if cls.__module__.startswith(("fairseq", "hydra", "omegaconf")):
            options.setdefault("unsafe_hash", True)
        return declare(cls, **options)

    dataclasses.dataclass = hashable
    sys.path.insert(0, folder)
    with contextlib.redirect_stdout(io.StringIO()):
        import fairseq.checkpoint_utils
        import fairseq.models.roberta  # noqa: F401


def load(path: str, data: str) -> torch.nn.Module:
    """A checkpoint, read by `load_model_ensemble_and_task`, with its classification heads."""
    from fairseq import checkpoint_utils

    overrides = {"data": data, "load_checkpoint_heads": True}
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([path], arg_overrides=overrides)
    return model.eval()


@torch.no_grad()
def logits(model: torch.nn.Module, ids: torch.Tensor, head: str | None) -> torch.Tensor:
    return model(ids, classification_head_name=head)[0]


@torch.no_grad()
def answer_ours(job: dict) -> list[dict]:
    """Logits of our converted checkpoints by both of fairseq's loaders; ids and filled masks by its hub interface."""
    from fairseq.models.roberta import RobertaModel

    answers = []
    for folder, head in job["ours"]:
        ids = job["ids"]
        files = {"gpt2_encoder_json": f"{folder}/encoder.json", "gpt2_vocab_bpe": f"{folder}/vocab.bpe"}
        hub = RobertaModel.from_pretrained(folder, checkpoint_file="model.pt", **files).eval()
        answer = {"ensemble": logits(load(f"{folder}/model.pt", folder), ids, head)}
        answer["hub"] = hub.predict(head, ids, return_logits=True) if head else hub.model(ids)[0]
        answer["encoded"] = [hub.encode(line).tolist() for line in job["lines"][:50]]
        if head:  # beside an empty masked-LM head
            answer["filled"] = hub.model(ids)[0].softmax(-1).unique().tolist()
        else:
            answer["filled"] = [probability for _, probability, _ in hub.fill_mask(MASKED, topk=5)]
        answers.append(answer)
    return answers


def build_own(job: dict) -> dict[str, dict[str, torch.Tensor]]:
    """Build and save checkpoints with fairseq, with each form of settings; returns their logits."""
    from fairseq import checkpoint_utils, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from omegaconf import OmegaConf

    answers = {}
    for number, (name, settings, form) in enumerate(job["own"]):
        args = argparse.Namespace(arch="roberta", task="masked_lm", criterion="masked_lm", data=job["data"], **settings)
        cfg = convert_namespace_to_omegaconf(args)
        model = tasks.setup_task(cfg.task).build_model(cfg.model)
        model.register_classification_head("mnli", num_classes=CLASSES)
        randomize(model, number)
        plain = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)  # as in fairseq's Trainer.state_dict
        state = {"args": args if form == "args" else None, "cfg": {"args": None, "cfg": plain, "DictConfig": cfg}[form]}
        state |= {"model": model.state_dict(), "extra_state": {}}
        state["optimizer_history"] = [{"optimizer_name": "FairseqAdam", "lr_scheduler_state": {}, "num_updates": 0}]
        path = f"{job['work']}/own_{name}.pt"
        checkpoint_utils.torch_persistent_save(state, path)
        with contextlib.suppress(KeyError, RuntimeError):  # fairseq cannot load a head with spectral_norm again
            model = load(path, job["data"])
        model.eval()
        answers[name] = {"mlm": logits(model, job["ids"], None), "head": logits(model, job["ids"], "mnli")}
    return answers


def train_own(job: dict) -> dict[str, torch.Tensor]:
    """Train our checkpoint for three updates with `fairseq-train`; returns the logits of the result."""
    from fairseq.data import Dictionary, indexed_dataset
    from fairseq_cli.train import cli_main

    folder, longest = Path(job["data"]), job["settings"]["max_positions"] - 1
    sentences = [row for row in unpacked(job["corpora"][0]["rows"]) if len(row) <= longest][:400]
    vocab_size = len(Dictionary.load(f"{folder}/dict.txt")) + 1  # with <mask>
    for split in ("train", "valid"):
        builder = indexed_dataset.make_builder(f"{folder}/{split}.bin", impl="mmap", vocab_size=vocab_size)
        for sentence in sentences:
            builder.add_item(torch.tensor(sentence))
        builder.finalize(f"{folder}/{split}.idx")
    positions = str(job["settings"]["max_positions"])
    flags = ["--task", "masked_lm", "--criterion", "masked_lm", "--arch", "roberta_base", "--sample-break-mode"]
    flags += ["complete", "--tokens-per-sample", positions, "--max-positions", positions, "--optimizer", "adam", "--lr"]
    flags += ["1e-4", "--batch-size", "4", "--max-update", "3", "--cpu", "--num-workers", "0", "--save-dir"]
    flags += [job["work"], "--finetune-from-model", f"{job['ours'][0][0]}/model.pt"]
    for name in ("encoder_layers", "encoder_embed_dim", "encoder_ffn_embed_dim", "encoder_attention_heads"):
        flags += [f"--{name.replace('_', '-')}", str(job["settings"][name])]
    sys.argv = ["fairseq-train", str(folder), *flags]
    cli_main()
    Path(job["work"], "checkpoint_last.pt").rename(f"{job['work']}/own_trained.pt")
    return {"mlm": logits(load(f"{job['work']}/own_trained.pt", job["data"]), job["ids"], None)}


def encode(job: dict) -> dict[str, torch.Tensor]:
    """Token ids of the lines by fairseq's BPE and dictionary, as in `fairseq-preprocess`."""
    from fairseq.data import Dictionary
    from fairseq.data.encoders.gpt2_bpe_utils import get_encoder

    dictionary = Dictionary.load(f"{job['data']}/dict.txt")
    bpe = get_encoder(f"{job['data']}/encoder.json", f"{job['data']}/vocab.bpe")
    rows = [
        dictionary.encode_line(" ".join(map(str, bpe.encode(line))), append_eos=False, add_if_not_exist=False).tolist()
        for line in job["lines"]
    ]
    return packed(rows)


def block(corpus: dict) -> dict[str, torch.Tensor]:
    """fairseq's blocks of a corpus, as in its masked_lm task."""
    from fairseq.data import PrependTokenDataset, TokenBlockDataset

    rows = [torch.tensor(row) for row in unpacked(corpus["rows"])]
    length, mode = corpus["max_seq_length"], corpus["mode"]
    blocks = TokenBlockDataset(rows, corpus["rows"]["sizes"], length - 1, pad=1, eos=2, break_mode=mode)
    with_bos = PrependTokenDataset(blocks, 0)
    return packed([with_bos[number].tolist() for number in range(len(with_bos))])


def inside(folder: str, work: str) -> None:
    import_fairseq(folder)
    job = torch.load(f"{work}/job.pt", weights_only=False)
    answers = {
        "ours": answer_ours(job),
        "own": build_own(job),
        "encoded": encode(job),
        "blocks": [block(corpus) for corpus in job["corpora"]],
    }
    answers["own"]["trained"] = train_own(job)
    torch.save(answers, f"{work}/answers.pt")


# ---- in this repository's interpreter

SHAPES = [(2, 32, 4, 64, 66), (3, 48, 2, 80, 34), (1, 64, 1, 128, 130), (4, 40, 8, 24, 514)]
KINDS = {  # our models: config settings, name of the head
    "tied": ({}, None),
    "untied": ({"tie_word_embeddings": False}, None),
    "mnli": ({"num_labels": CLASSES, "id2label": dict(enumerate(("contradiction", "neutral", "entailment")))}, "mnli"),
    "relu, a head": ({"hidden_act": "relu", "num_labels": 5}, "topic"),
    "gelu_new, a head": ({"hidden_act": "gelu_new", "num_labels": 1}, "score"),
}
SETTINGS = {  # fairseq's models
    "encoder_layers": 2,
    "encoder_embed_dim": 32,
    "encoder_ffn_embed_dim": 64,
    "encoder_attention_heads": 4,
    "max_positions": 64,
    "tokens_per_sample": 64,
}
OWN = {  # changed settings, and the outputs that Hugging Face's RoBERTa can compute
    "default": ({}, {"mlm", "head"}),
    "8_heads": ({"encoder_attention_heads": 8}, {"mlm", "head"}),
    "untied": ({"untie_weights_roberta": True}, {"mlm", "head"}),
    "layerdrop": ({"encoder_layerdrop": 0.2}, {"mlm", "head"}),
    "relu": ({"activation_fn": "relu"}, {"head"}),
    "gelu_accurate": ({"activation_fn": "gelu_accurate"}, {"head"}),
    "gelu_fast": ({"activation_fn": "gelu_fast"}, {"head"}),
    "relu_squared": ({"activation_fn": "relu_squared"}, {"head"}),
    "tanh": ({"activation_fn": "tanh"}, {"head"}),
    "linear": ({"activation_fn": "linear"}, {"head"}),
    "pooler_relu": ({"pooler_activation_fn": "relu"}, {"mlm"}),
    "spectral_norm": ({"spectral_norm_classification_head": True}, {"mlm"}),
    "normalize_before": ({"encoder_normalize_before": True}, set()),
    "no_layernorm_embedding": ({"layernorm_embedding": False}, set()),
    "scaled_embedding": ({"no_scale_embedding": False}, set()),
    "sinusoidal": ({"encoder_learned_pos": False}, set()),
    "no_positions": ({"no_token_positional_embeddings": True}, set()),
    "quant_noise_pq": ({"quant_noise_pq": 0.1}, set()),
    "layers_to_keep": ({"encoder_layers_to_keep": "0"}, set()),
}


class Table:
    """Result table: a check, number of cases, number of differing ones, largest difference."""

    def __init__(self):
        self.rows = []

    def add(self, check: str, cases: int, differ: int, largest: float | None = None, known: bool = False) -> None:
        self.rows.append({"cases": cases, "differ": differ, "known": known})
        verdict = "equal" if not differ else f"{differ:,} differ{' (known)' if known else ''}"
        size = "" if largest is None else f"largest difference {largest:.1e}, "
        print(f"{check:<72} {cases:>9,}  {size}{verdict}", flush=True)

    def faults(self) -> int:
        return sum((row["differ"] > 0 and not row["known"]) or not row["cases"] for row in self.rows)


def generated_text(seed: int = 0) -> list[str]:
    """Documents of simple sentences, and of random Unicode characters."""
    rng = random.Random(seed)
    letters = "".join(map(chr, [*range(32, 127), *range(160, 600), *range(0x400, 0x460), *range(0x4E00, 0x4E40)]))
    letters += "\u00a0\u2009\u3000\t'’🎉👩‍🔬"
    strange = ["".join(rng.choices(letters, k=rng.randint(1, 60))) for _ in range(3000)]
    words = [word for word in strange if word.strip()]
    return make_documents(600, seed) + ["\n".join(words[i : i + 10]) for i in range(0, len(words), 10)]


def read_documents(files: list[str]) -> list[str]:
    texts = (Path(file).read_text(encoding="utf-8") for file in files)
    return [document for text in texts for document in text.split("\n\n") if document.strip()]


def to_fairseq_lines(documents: list[list[list[int]]]) -> list[list[int]]:
    """Rows as written by `fairseq-preprocess`: a sentence and `</s>`; an empty line (`</s>`) between documents."""
    rows = []
    for sentences in filter(None, documents):
        rows += [[2]] if rows else []
        rows += [[*sentence, 2] for sentence in sentences]
    return rows


def random_corpora(count: int, oversize: bool) -> list[tuple[int, list[list[list[int]]]]]:
    """(block length, documents) of random corpora, with or without sentences longer than a block."""
    rng, corpora = random.Random(int(oversize)), []
    for _ in range(count):
        length = rng.randint(4, 40)
        longest = 3 * length if oversize else length - 2  # beside <s> and </s>
        corpora.append((length, []))
        for _ in range(rng.randint(1, 8)):
            sizes = [rng.randint(1, rng.randint(1, longest)) for _ in range(rng.randint(0, 9))]
            corpora[-1][1].append([[rng.randint(4, 99) for _ in range(size)] for size in sizes])
    return [corpus for corpus in corpora if any(corpus[1])]


def our_blocks(documents: list[list[list[int]]], length: int, mode: str) -> list[list[int]]:
    """Our blocks: `complete` is FULL-SENTENCES, `complete_doc` is FULL-SENTENCES within each document."""
    corpora = [documents] if mode == "complete" else [[document] for document in documents]
    made = (packing.full_sentences(corpus, length, bos_id=0, eos_id=2) for corpus in corpora)
    return [columns["input_ids"] for columns in itertools.chain(*made)]


def make_ours(work: Path, tokenizer) -> list[tuple[str, str | None]]:
    """Convert random Hugging Face models of all shapes and kinds with tools/fairseq.py."""
    made = []
    for number, kind in enumerate([*KINDS, *KINDS]):
        layers, hidden, heads, inner, positions = SHAPES[number % len(SHAPES)]
        settings, head = KINDS[kind]
        config = RobertaConfig(
            vocab_size=len(tokenizer),
            num_hidden_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            intermediate_size=inner,
            max_position_embeddings=positions,
            type_vocab_size=1,
            layer_norm_eps=1e-5,
            **settings,
        )
        model = (RobertaForSequenceClassification if head else RobertaForMaskedLM)(config)
        randomize(model, number)
        model.roberta.embeddings.token_type_embeddings.weight.data.zero_()  # it would be added to the positions
        if not head:
            model.lm_head.decoder.bias.data[:4] = -100  # fill_mask cannot print a special token
        here, there = work / f"hf_{number}", work / f"fairseq_{number}"
        model.save_pretrained(here)
        tokenizer.save_pretrained(here)
        named = ["--head", head] if head else []
        converter.main(["to_fairseq", "--model_name_or_path", str(here), "--output_dir", str(there), *named])
        made.append((str(there), head))
    return made


def load_ours(folder: str, head: str | None):
    return (AutoModelForSequenceClassification if head else AutoModelForMaskedLM).from_pretrained(folder).eval()


@torch.no_grad()
def difference(model, ids: torch.Tensor, theirs: torch.Tensor, head: str | None) -> float:
    """Largest difference of logits, without padding, relative to the largest logit."""
    ours, mask = model(ids, attention_mask=ids != 1).logits, ids != 1
    if not head:
        ours, theirs = ours[mask], theirs[mask]
    return float((ours - theirs).abs().max() / theirs.abs().max())


def compare_ours(table: Table, job: dict, answers: list[dict], tokenizer) -> None:
    worst, wrong_ids, wrong_fills, unequal = {"ensemble": [], "hub": []}, 0, 0, 0
    encoded = [tokenizer(line).input_ids for line in job["lines"][:50]]
    masked = torch.tensor([tokenizer(MASKED).input_ids])
    for (folder, head), answer in zip(job["ours"], answers, strict=True):
        source = folder.replace("fairseq_", "hf_")
        model = load_ours(source, head)
        for loader, differences in worst.items():
            differences.append(difference(model, job["ids"], answer[loader], head))
        wrong_ids += sum(ours != theirs for ours, theirs in zip(encoded, answer["encoded"], strict=True))
        if head:  # an empty masked-LM head: every token has the same probability
            wanted = torch.tensor([1 / len(tokenizer)])
        else:
            with torch.no_grad():
                wanted = model(masked).logits[masked == tokenizer.mask_token_id].softmax(-1).topk(5).values[0]
        found = torch.tensor(answer["filled"])
        wrong_fills += found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=1e-3)
        unequal += not same_after_round_trip(model, folder, head, tokenizer)
    for loader, name in (("ensemble", "load_model_ensemble_and_task"), ("hub", "RobertaModel.from_pretrained")):
        found = worst[loader]
        differ = sum(not one <= MAX_DIFFERENCE for one in found)  # a NaN differs
        table.add(f"to_fairseq, loaded by {name}: logits", len(found), differ, max(found))
    table.add("to_fairseq, RobertaHubInterface.encode: ids of lines", len(encoded) * len(answers), wrong_ids)
    table.add("to_fairseq, fill_mask: probabilities; all equal beside a classifier", len(answers), wrong_fills)
    table.add("to_fairseq, then to_hf: all weights bit for bit, vocabulary, ids", len(answers), unequal)


def same_after_round_trip(model, folder: str, head: str | None, tokenizer) -> bool:
    files = [("--dict", "dict.txt"), ("--encoder", "encoder.json"), ("--bpe", "vocab.bpe")]
    vocabulary = [word for flag, name in files for word in (flag, f"{folder}/{name}")]
    named = ["--head", head] if head else []
    converter.main(
        ["to_hf", "--checkpoint", f"{folder}/model.pt", "--output_dir", f"{folder}/back", *vocabulary, *named]
    )
    again, before = load_ours(f"{folder}/back", head).state_dict(), model.state_dict()
    before = {name: tensor for name, tensor in before.items() if name != "lm_head.bias"}  # the decoder's is used
    weights = all(again[name].equal(tensor) for name, tensor in before.items())
    second = AutoTokenizer.from_pretrained(f"{folder}/back")
    text = "The cat sees <mask> in the garden, naïvely 🎉."
    ids = second(text).input_ids == tokenizer(text).input_ids
    return weights and len(again) == len(model.state_dict()) and ids and second.get_vocab() == tokenizer.get_vocab()


def convert_own(job: dict, name: str, kind: str, tokenizer_dir: str):
    """Convert a checkpoint of fairseq to a Hugging Face model. Raises `InputError` if it is refused."""
    checkpoint, there = f"{job['work']}/own_{name}.pt", f"{job['work']}/own_{name}_{kind}"
    head = "mnli" if kind == "head" else None
    named = ["--head", head] if head else []
    paths = ["--checkpoint", checkpoint, "--output_dir", there, "--tokenizer_name", tokenizer_dir]
    converter.main(["to_hf", *paths, *named])
    return load_ours(there, head)


def compare_own(table: Table, job: dict, answers: dict, tokenizer_dir: str, resave) -> None:
    found, converted, refused = {"args": [], "cfg": []}, 0, []
    for name, _, form in job["own"]:
        if form == "DictConfig":
            continue
        settings, expected = OWN[name.removesuffix(f"_{form}")]
        for kind in ("mlm", "head"):
            try:
                model = convert_own(job, name, kind, tokenizer_dir)
            except InputError as error:
                refused.append(kind in expected or not any(setting in str(error) for setting in settings))
                continue
            if kind in expected:
                head = "mnli" if kind == "head" else None
                found[form].append(difference(model, job["ids"], answers[name][kind], head))
            converted += kind not in expected
    for form, values in found.items():
        differ = sum(not one <= MAX_DIFFERENCE for one in values)
        table.add(f"to_hf of fairseq's checkpoints, settings in {form}: logits", len(values), differ, max(values))
    table.add("to_hf of other arithmetic: refused, and the setting is named", len(refused), sum(refused) + converted)

    model = convert_own(job, "trained", "mlm", tokenizer_dir)
    gap = difference(model, job["ids"], answers["trained"]["mlm"], None)
    table.add("fairseq-train from our model.pt, its checkpoint by to_hf: logits", 1, not gap <= MAX_DIFFERENCE, gap)
    gap = resave()
    table.add("to_hf of a pickled DictConfig: refused; saved by its command: logits", 1, not gap <= MAX_DIFFERENCE, gap)


def compare_text(table: Table, job: dict, theirs: dict, tokenizer) -> None:
    ours = tokenization.corpus_encoder(tokenizer)(job["lines"])
    rows = unpacked(theirs)
    differ = sum(left != right for left, right in zip(ours, rows, strict=True))
    table.add(f"ids of lines of text, {sum(map(len, ours)):,} in all", len(rows), differ)


def compare_blocks(table: Table, corpora: list[dict], answers: list[dict]) -> None:
    names = dict.fromkeys((corpus["name"], corpus["mode"]) for corpus in corpora)
    for name, mode in names:
        cases = differ = longer = 0
        for corpus, answer in zip(corpora, answers, strict=True):
            if (corpus["name"], corpus["mode"]) != (name, mode):
                continue
            length = corpus["max_seq_length"]
            ours, theirs = our_blocks(corpus["documents"], length, mode), unpacked(answer)
            cases += len(theirs)
            if "oversize" in name:
                longer += sum(len(row) > length for row in theirs)
                same = [token for row in ours for token in row[1:]] == [token for row in theirs for token in row[1:]]
                differ += 0 if same and max(map(len, ours)) <= length else len(theirs)
            else:
                differ += sum(left != right for left, right in itertools.zip_longest(ours, theirs))
        if "oversize" in name:
            table.add(f"blocks, {mode}, {name}: ids in their order", cases, differ)
            table.add(f"blocks, {mode}, {name}: too long in fairseq", cases, longer, known=True)
        else:
            table.add(f"blocks, {mode}, {name}", cases, differ)


def make_corpora(documents: list[str], tokenizer, length: int, random_count: int) -> list[dict]:
    encode_all, sentences = tokenization.corpus_encoder(tokenizer), [split_sentences(d) for d in documents]
    ids = iter(encode_all(list(itertools.chain(*sentences))))
    text = [[next(ids) for _ in document] for document in sentences]
    fitting = [[sentence for sentence in document if len(sentence) <= length - 2] for document in text]
    named = [("text", length, fitting)]
    if fitting != text:
        named.append(("text with oversize", length, text))
    named += [("random corpora", *corpus) for corpus in random_corpora(random_count, oversize=False)]
    named += [("random corpora with oversize", *corpus) for corpus in random_corpora(random_count, True)]
    return [
        {
            "name": name,
            "mode": mode,
            "max_seq_length": length,
            "documents": documents,
            "rows": packed(to_fairseq_lines(documents)),
        }
        for name, length, documents in named
        for mode in (("complete",) if "oversize" in name else ("complete", "complete_doc"))
    ]


def run_fairseq(args: argparse.Namespace, work: Path, *command: str) -> None:
    """Run this file, or another command, in fairseq's interpreter."""
    command = command or (str(Path(__file__).resolve()), "--inside", str(Path(args.fairseq).resolve()), str(work))
    done = subprocess.run([args.python, *command], capture_output=True, text=True, cwd=work, check=False)
    if done.returncode:
        raise SystemExit(f"fairseq's interpreter ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")


def resave_and_compare(args: argparse.Namespace, job: dict, answers: dict, tokenizer_dir: str) -> float:
    """Run the command from the error message about a DictConfig in fairseq's interpreter; returns the difference of
    logits."""
    try:
        convert_own(job, "DictConfig", "mlm", tokenizer_dir)
        raise SystemExit("a pickled DictConfig was read")
    except InputError as error:
        code = str(error).split('python -c "\n')[1].removesuffix('"')
    here = f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); sys.argv = ['', '--inside']; "
    here += f"import against_fairseq; against_fairseq.import_fairseq({str(Path(args.fairseq).resolve())!r})\n"
    run_fairseq(args, Path(job["work"]), "-c", here + code)
    Path(job["work"], "plain_own_DictConfig.pt").rename(Path(job["work"], "own_DictConfig.pt"))
    model = convert_own(job, "DictConfig", "mlm", tokenizer_dir)
    return difference(model, job["ids"], answers["DictConfig"]["mlm"], None)


def make_job(work: Path, documents: list[str], tokenizer, args: argparse.Namespace) -> dict:
    own = [
        (f"{name}_{form}", settings, form)
        for name, (settings, converts) in OWN.items()
        for form in (("args", "cfg") if converts else ("cfg",))
    ]
    own.append(("DictConfig", {}, "DictConfig"))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, len(tokenizer), (4, 30), generator=generator)
    ids[:, 0], ids[1, 20:], ids[2, 5:] = 0, 1, 1  # two rows have padding
    ours = make_ours(work, tokenizer)
    return {
        "work": str(work),
        "data": ours[0][0],
        "settings": SETTINGS,
        "ids": ids,
        "ours": ours,
        "own": [(name, SETTINGS | settings, form) for name, settings, form in own],
        "lines": [line for document in documents for line in document.split("\n") if line],
        "corpora": make_corpora(documents, tokenizer, args.max_seq_length, args.random_corpora),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fairseq", required=True, help="clone of fairseq, with its two Cython modules compiled")
    parser.add_argument("--python", required=True, help="fairseq's interpreter")
    parser.add_argument("--text", nargs="+", help="text files; default: generated text")
    parser.add_argument("--tokenizer", help="a tokenizer with RoBERTa's ids; default: trained on generated text")
    parser.add_argument("--max_seq_length", type=int, default=512, help="block length")
    parser.add_argument("--random_corpora", type=int, default=1000)
    args = parser.parse_args()
    documents = read_documents(args.text) if args.text else generated_text()
    table = Table()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        tokenizer_dir = args.tokenizer or str(work / "tokenizer")
        if not args.tokenizer:
            train_tokenizer(generated_text(), vocab_size=900).save_pretrained(tokenizer_dir)
        tokenizer = tokenization.load_tokenizer(tokenizer_dir)
        job = make_job(work, documents, tokenizer, args)
        torch.save(job, work / "job.pt")
        run_fairseq(args, work)
        answers = torch.load(work / "answers.pt", weights_only=True)
        compare_ours(table, job, answers["ours"], tokenizer)
        resave = lambda: resave_and_compare(args, job, answers["own"], tokenizer_dir)  # noqa: E731
        compare_own(table, job, answers["own"], tokenizer_dir, resave)
        compare_text(table, job, answers["encoded"], tokenizer)
        compare_blocks(table, job["corpora"], answers["blocks"])
    if table.faults():
        raise SystemExit(f"{table.faults()} rows are not equal")


if __name__ == "__main__":
    inside(*sys.argv[2:]) if INSIDE else main()
