"""Models, objectives and their losses.

masked_lm (the masked LM of any architecture, FLOPs), objectives (a declaration each), architectures (where each head
is), albert (shared layers), heads (a checkpoint to fine-tune), weights (checkpoints), initialization, attention (which
one), varlen and cpu_kernels (ours), cross_entropy.
"""
