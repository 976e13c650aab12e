"""Memory-efficient cross-entropy over a large vocabulary: chunked in fp32, with recomputation in the backward pass.

`functional.cross_entropy(logits.float(), ...)` keeps logits, log-probabilities and both gradients in fp32: 12 bytes per
logit, 6 GB for 9,800 positions of 50,304. Here, only the logits and their gradient are kept, in their own precision.
"""

import torch

from roberta_recipe.data import IGNORED

LOGITS_AT_ONCE = 1 << 22  # fp32 copy and softmax take 34 MB, within an H100's L2 cache


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        index, rows = targets.clamp(min=0)[:, None], rows_at_once(logits.shape[1])  # any entry for `IGNORED`
        parts = zip(logits.split(rows), index.split(rows), strict=True)
        losses = [-torch.log_softmax(part, dim=-1, dtype=torch.float32).gather(1, at) for part, at in parts]
        ctx.save_for_backward(logits, index, targets != IGNORED)
        return torch.where(targets != IGNORED, torch.cat(losses)[:, 0], 0.0)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        logits, index, counts = ctx.saved_tensors
        out, grad = torch.empty_like(logits), torch.where(counts, grad, 0.0)[:, None]
        rows = rows_at_once(logits.shape[1])
        parts = (tensor.split(rows) for tensor in (logits, out, index, grad, torch.full_like(grad, -1.0)))
        for part, out_part, at, upstream, minus_one in zip(*parts, strict=True):
            # softmax - one-hot, in fp32, cast after the product with the upstream gradient (and its loss scale)
            probs = torch.softmax(part, dim=-1, dtype=torch.float32).scatter_add_(1, at, minus_one)
            out_part.copy_(probs.mul_(upstream))
        return out, None


def rows_at_once(vocab_size: int) -> int:
    """Positions per chunk."""
    return max(1, LOGITS_AT_ONCE // vocab_size)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(positions,) fp32: cross-entropies in nats of `logits` (positions, vocab_size) in any precision; 0, without a
    gradient, where the target is -100."""
    return _CrossEntropy.apply(logits, targets)
