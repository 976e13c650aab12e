"""Fast dropout and blockwise attention for training on a CPU.

PyTorch generates a dropout mask element by element, each at the cost of some hundred multiply-adds, and its attention
with dropout writes every weight matrix to memory. Here a mask takes 16 random bits per element, and attention processes
a few heads at a time, whose weights stay in the cache and are recomputed in the backward pass (Dao et al. 2022, section
3.1, without the tiling). benchmarks/README.md has the speed.
"""

import math

import numpy as np
import torch
from torch import nn
from transformers.integrations.sdpa_attention import repeat_kv

BLOCKWISE = "blockwise"  # as `attn_implementation`
_WEIGHTS_AT_ONCE = 1 << 19  # attention weights in cache: 2 MiB in fp32
_LEVELS = 1 << 16  # of a random number


def keep_probability(p: float) -> float:
    """The probability that `keep_mask` keeps an element: 1 - `p` within 2^-17."""
    return 1 - round(p * _LEVELS) / _LEVELS


def keep_mask(shape: torch.Size | tuple[int, ...], p: float) -> torch.Tensor:
    """A mask of `shape`, True independently by `keep_probability(p)`; seeded by one draw of torch's CPU generator."""
    count = math.prod(shape)
    seed = int(torch.empty((), dtype=torch.int64).random_())
    bits = np.random.SFC64(seed).random_raw(-(-count // 4)).view(np.uint16)[:count]
    return torch.from_numpy(bits >= round(p * _LEVELS)).view(shape)


class Dropout(nn.Dropout):
    """`nn.Dropout` with the fast mask, for a CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p in (0.0, 1.0):
            return super().forward(x)
        # uint8, as PyTorch's cast of bools is not vectorized
        keep = keep_mask(x.shape, self.p).view(torch.uint8)
        return x * keep.to(x.dtype).div_(keep_probability(self.p))


def use_fast_dropout(model: nn.Module) -> None:
    """Make every `nn.Dropout` of `model` a `Dropout`."""
    for module in model.modules():
        if type(module) is nn.Dropout:
            module.__class__ = Dropout


class _Attention(torch.autograd.Function):
    """softmax(q k^T scaling + bias) v over (batch x heads, seq_len, head_size), with dropout of the weights."""

    @staticmethod
    def forward(ctx, q, k, v, bias, scaling: float, p: float) -> torch.Tensor:
        """`bias`: None or (batch x heads, 1 or seq_len, seq_len), added to the scores. Matrix products have the
        precision of `q`, `k` and `v`, the softmax is in fp32. The factor 1 / `keep_probability` is applied to the
        output, which is smaller than the weights."""
        q = q * scaling
        out, packed = torch.empty_like(v), []
        for chunk in _chunks(q):
            weights = _softmax(q, k, bias, chunk)
            if p:
                mask = keep_mask(weights.shape, p)
                packed.append(torch.from_numpy(np.packbits(mask.numpy())))
                weights = weights.mul_(mask.view(torch.uint8).to(weights.dtype))
            torch.bmm(weights.to(v.dtype), v[chunk], out=out[chunk])
        if p:
            out.div_(keep_probability(p))
        ctx.save_for_backward(q, k, v, out, bias, *packed)
        ctx.scaling, ctx.p = scaling, p
        return out

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        q, k, v, out, bias, *packed = ctx.saved_tensors
        grad = grad.contiguous()
        grads = [torch.empty_like(tensor) for tensor in (q, k, v)]
        # subtracted from each weight's gradient in the backward pass of the softmax (Dao et al., equation 4)
        mean = (grad.float() * out.float()).sum(-1, keepdim=True)
        if ctx.p:
            grad = grad / keep_probability(ctx.p)
        for number, chunk in enumerate(_chunks(q)):
            weights = _softmax(q, k, bias, chunk)
            weight_grads = torch.bmm(grad[chunk], v[chunk].transpose(1, 2)).float()
            dropped = weights
            if ctx.p:
                bits = np.unpackbits(packed[number].numpy(), count=weights.numel()).reshape(weights.shape)
                keep = torch.from_numpy(bits).to(weights.dtype)
                weight_grads.mul_(keep)
                dropped = keep.mul_(weights)
            torch.bmm(dropped.to(v.dtype).transpose(1, 2), grad[chunk], out=grads[2][chunk])
            score_grads = weight_grads.sub_(mean[chunk]).mul_(weights).to(q.dtype)
            torch.bmm(score_grads, k[chunk], out=grads[0][chunk])
            torch.bmm(score_grads.transpose(1, 2), q[chunk], out=grads[1][chunk])
        return grads[0].mul_(ctx.scaling), grads[1], grads[2], None, None, None


def _chunks(q: torch.Tensor) -> list[slice]:
    """Slices of heads with attention weights that fit into the cache."""
    heads, length = q.shape[0], q.shape[1]
    size = max(1, _WEIGHTS_AT_ONCE // length**2)
    return [slice(start, start + size) for start in range(0, heads, size)]


def _softmax(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None, chunk: slice) -> torch.Tensor:
    """(heads, seq_len, seq_len) fp32 attention weights of a chunk."""
    scores = torch.bmm(q[chunk], k[chunk].transpose(1, 2)).float()
    if bias is not None:
        scores += bias[chunk]
    return torch.softmax(scores, -1, out=scores)


def blockwise_attention(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers: (batch, heads, seq_len, head_size) to (batch, seq_len, heads, head_size).

    `attention_mask`: None, or bool (batch, 1 or heads, seq_len, seq_len), True where a position is attended to.
    """
    batch, heads, length, size = query.shape
    scaling = size**-0.5 if scaling is None else scaling
    # in grouped-query attention, several query heads share a key
    flat = [repeat_kv(part, heads // part.shape[1]).reshape(batch * heads, -1, size) for part in (query, key, value)]
    bias = None
    if attention_mask is not None:
        # a padding mask is expanded over heads and queries, with strides of 0
        one_for_all = [slice(None) if stride else slice(1) for stride in attention_mask.stride()[1:3]]
        mask = attention_mask[:, *one_for_all]
        bias = torch.zeros(mask.shape).masked_fill_(~mask, torch.finfo(torch.float32).min)
        bias = bias.expand(batch, heads, -1, -1).flatten(0, 1)
    with torch.autocast("cpu", enabled=False):
        out = _Attention.apply(*flat, bias, scaling, dropout)
    return out.view(batch, heads, length, size).transpose(1, 2), None
