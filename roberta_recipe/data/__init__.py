"""Text to batches (paper, sections 3.2, 4.1, 4.2), in the order in which a sequence travels:

corpus (sources and their files) -> documents (rows of a file) -> tokenization (sentences, ids) -> packing (blocks) ->
stream or token_cache (blocks from text, or packed once) -> order (which block comes when) -> masking (batches).
"""

IGNORED = -100  # the label of a position that is not predicted
