"""Running the callable once, under fake tensors: ops, values and module calls.

calls           module calls, leaf modules, and what else the forward does
ops             the path of one op
op_call         one call of an op: its arguments, and what it may write
transforms      ops inside of torch.vmap, grad and their kind
data            Python reads the data of tensors; specialization
collectives     collectives of torch.distributed, as functional ones
higher_order    torch.cond and its kind
reads           what the forward reads beside its arguments
questions       which questions to torch are heard
python_values   what Python takes out of tensors where no op runs
uses            what its source does with a name
builder         the tape under construction
values          which value of the tape each tensor is
model           names of the traced model, and its state before the trace
dynamic_shapes  sizes that may differ from call to call
"""
