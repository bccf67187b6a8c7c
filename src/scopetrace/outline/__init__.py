"""Outlining: chosen module calls become calls of functions, which equal calls share.

Data flow:
    FunctionalTape + chosen calls -> of each, innermost first: its ops as a BodyTape with explicit inputs
    bodies with equal keys -> one function
    the ops of a call -> one `invoke_subgraph` op that has the function's body among its arguments
"""
