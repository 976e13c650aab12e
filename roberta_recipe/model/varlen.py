"""Unpadded batches: all sequences concatenated in one row, with variable-length FlashAttention (cu_seqlens).

`attn_implementation="varlen"` (`torch.nn.attention.varlen`, CUDA, bf16 or fp16, no dropout of attention weights):
no padding is computed, and sequences that share a block need no mask (seq_len, seq_len).
"""

from typing import NamedTuple

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

VARLEN = "varlen"  # as `attn_implementation`


class Unpadded(NamedTuple):
    """The tokens of a batch (batch, seq_len) without padding, in order."""

    flat: torch.Tensor  # (tokens,): indices into the flattened batch
    position_ids: torch.Tensor  # (1, tokens)
    arguments: dict[str, torch.Tensor | int]  # of the attention function, with transformers' names

    def row(self, column: torch.Tensor) -> torch.Tensor:
        """(1, tokens) of a column (batch, seq_len)."""
        return column.flatten()[self.flat][None]


def unpad(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, sequence: torch.Tensor | None, first_position: int
) -> Unpadded:
    """Unpad a batch with `attention_mask` (batch, seq_len). A sequence is a row or, with `sequence` (batch, seq_len),
    the tokens of a row with the same index. Synchronizes for the number of sequences and, with a mask, of tokens."""
    sequence = torch.zeros_like(input_ids) if sequence is None else sequence
    begins = nn.functional.pad(sequence.diff() != 0, (1, 0), value=True)
    flat = torch.arange(input_ids.numel(), device=input_ids.device)
    if attention_mask is not None:
        flat = attention_mask.flatten().nonzero()[:, 0]
    begins = begins.flatten()[flat]
    starts = nn.functional.pad(begins.nonzero()[:, 0], (0, 1), value=len(flat)).to(torch.int32)
    widest = input_ids.shape[1]  # an upper bound, without a synchronization
    arguments = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": widest, "max_length_k": widest}
    return Unpadded(flat, positions_within(begins, first_position)[None], arguments)


def positions_within(begins: torch.Tensor, first_position: int) -> torch.Tensor:
    """Position ids (..., tokens) that restart at `first_position` where `begins` (..., tokens) is True."""
    columns = torch.arange(begins.shape[-1], device=begins.device)
    return columns - torch.where(begins, columns, 0).cummax(dim=-1).values + first_position


def varlen_attention(
    module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, max_length_q=None, **kwargs
) -> tuple[torch.Tensor, None]:
    """An attention function for transformers: (1, heads, tokens, head_size) to (1, tokens, heads, head_size). Without
    sequence lengths, as in a forward pass without labels: SDPA over padded rows."""
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    from torch.nn.attention.varlen import varlen_attn  # the import takes a third of a second

    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    lengths = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    return varlen_attn(q, k, v, *lengths, scale=scaling)[None], None
