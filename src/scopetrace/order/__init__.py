"""In which order modules run and parameters are used.

Data flow:
    the tape of a trace, or a torch.fx.Tracer at work -> for each module call, what it used and whom it called
    these and the model's names -> ExecutionOrder: plain data, that can be saved, hashed and compared
    ExecutionOrder -> the orders, the last uses, what is never used, uses outside their own module

The facts are those of FSDP's execution-order tracer (`torch/distributed/fsdp/_trace_utils.py`, pytorch #80294), which
nothing calls any more.
"""
