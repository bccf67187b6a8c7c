"""What training steps need, by torch's own engine: derivatives inside of a forward, and what becomes of its gradients.

recorder        what the forward does with autograd, told by the patches of torch
gradients       `backward()`, `torch.autograd.grad`, and the `grad` of tensors from outside
phases          which op of the forward each op of a backward belongs to
optimizers      steps of optimizers
checkpoints     regions that a backward runs again
functions       functions with a backward of their own
flags           `requires_grad` of parameters
history         what of autograd's history a graph of ops would lose
"""
