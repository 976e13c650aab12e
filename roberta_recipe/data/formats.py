"""Input formats by name (paper, section 4.2): packers of `packing` and `pairs`. A format of pairs is named with what
its labels tell, the next sentence or the order of two; or with "in_order", where nothing uses them."""

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
    **{f"{name} nsp": partial(packer, label=pairs.NSP) for name, packer in PAIRS.items()},
    **{f"{name} sop": partial(packer, label=pairs.SOP) for name, packer in PAIRS.items()},
    **{f"{name} in_order": partial(packer, label=pairs.SOP, share_of_ones=0.0) for name, packer in PAIRS.items()},
}


def has_pairs(input_format: str) -> bool:
    """Whether blocks of a format of `PACKERS` are pairs of segments."""
    return input_format.split()[0] in PAIRS
