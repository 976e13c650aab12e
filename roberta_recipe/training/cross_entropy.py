"""Cross-entropy over a large vocabulary without fp32 logits: a few rows at a time, the softmax computed again in the
backward pass.

`functional.cross_entropy(logits.float(), ...)` holds the logits, their log-probabilities and the gradients on both
sides in fp32: 12 bytes a logit, 6 GB for 9,800 positions of 50,304. Here it is the logits and their gradient, in the
precision of the logits.
"""

import torch

from roberta_recipe.data.masking import IGNORED

ROWS = 128  # positions at a time: 26 MB of fp32 logits at 50,304 entries, which stay in a GPU's L2 cache


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        index = targets.clamp(min=0)[:, None]  # any entry where the target is `IGNORED`
        rows = zip(logits.split(ROWS), index.split(ROWS), strict=True)
        losses = [-torch.log_softmax(part.float(), dim=-1).gather(1, at) for part, at in rows]
        ctx.save_for_backward(logits, index, targets != IGNORED)
        return torch.where(targets != IGNORED, torch.cat(losses)[:, 0], 0.0)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        logits, index, counts = ctx.saved_tensors
        out, grad = torch.empty_like(logits), torch.where(counts, grad, 0.0)[:, None]
        parts = (tensor.split(ROWS) for tensor in (logits, out, index, grad))
        for rows, of_rows, at, upstream in zip(*parts, strict=True):
            # softmax - one-hot, in fp32, cast after the product with the upstream gradient (and its loss scale)
            probs = torch.softmax(rows.float(), dim=-1).scatter_add_(1, at, -torch.ones_like(upstream))
            of_rows.copy_(probs.mul_(upstream))
        return out, None


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(positions,) fp32: cross-entropies in nats of `logits` (positions, vocab_size) in any precision; 0, without a
    gradient, where the target is -100."""
    return _CrossEntropy.apply(logits, targets)
