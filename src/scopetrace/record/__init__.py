"""Running the callable once, under fake tensors: the recorded tape.

session         one recording, put together from the parts below: `record`
builder         the tape under construction, and which value of it each tensor is
ops             the path of one op
calls           module calls, leaf modules, and what else the forward does
data            Python reads the data of tensors; specialization
higher_order    torch.cond and its kind
dynamic_shapes  sizes that may differ from call to call
model           names and state of the traced model
"""

from scopetrace.record.session import Recording, argument_names, record, retraced

__all__ = ["Recording", "argument_names", "record", "retraced"]
