"""Models, objectives and losses.

masked_lm (masked LM of any architecture, FLOPs), objectives, architectures (head of each), albert (parameter sharing),
task_heads (fine-tuning), weights (loading of checkpoints), initialization, attention (choice of the implementation),
varlen and cpu_kernels (our implementations), cross_entropy, log_probabilities (scoring).
"""
