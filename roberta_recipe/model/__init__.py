"""Models, objectives and losses.

masked_lm (masked LM of any architecture, cross-entropy, FLOPs), objectives, architectures (heads, ALBERT's parameter
sharing), task_heads (fine-tuning), weights (loading of checkpoints), initialization, attention (choice of the
implementation, unpadded batches), cpu_kernels.
"""
