"""Input formats by name (paper, section 4.2): packers of `packing` and `pairs`. A format of pairs is named with what
its labels tell: the next sentence, or the order of two."""

from functools import partial

from roberta_recipe.data import packing, pairs

PAIRS = {
    "segment_pair": pairs.segment_pair,
    "segment_pair_short": partial(pairs.segment_pair, short=pairs.SHORT),
    "sentence_pair": pairs.sentence_pair,
}
PACKERS = {
    "full_sentences": packing.full_sentences,
    "doc_sentences": packing.doc_sentences,
    "contiguous": packing.contiguous,
    **{
        f"{name} {objective}": partial(packer, label=label)
        for name, packer in PAIRS.items()
        for objective, label in (("nsp", pairs.NSP), ("sop", pairs.SOP))
    },
}
