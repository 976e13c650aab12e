"""The data pipeline, from text to batches (paper, sections 3.2, 4.1, 4.2).

corpus (sources and their files) -> documents (rows of a file, sentences) -> tokenization (ids) -> packing (blocks) ->
chunks or token_cache (blocks from text, or from a cache) -> order, stream (blocks of a run) -> masking (batches).
"""

from typing import Literal

IGNORED = -100  # the label of a position that is not predicted
NSP, SOP = "next_sentence_labels", "sentence_order_labels"  # label columns of pairs
MaskingUnit = Literal["token", "whole_word", "span", "ngram", "entity", "noun_phrase"]
