"""Outlining: chosen module calls become calls of functions, which equal calls share.

Data flow:
    FunctionalTape + chosen calls -> of each, innermost first: its ops as a BodyTape with explicit inputs
    bodies with equal keys -> one function
    the ops of a call -> one `invoke_subgraph` op that has the function's body among its arguments
"""

from scopetrace.outline.cut import outline
from scopetrace.outline.ranges import Ranges
from scopetrace.outline.signature import FunctionOutput, FunctionSignature, OutlinedBody, new_values, values_with_path

__all__ = [
    "FunctionOutput",
    "FunctionSignature",
    "OutlinedBody",
    "Ranges",
    "new_values",
    "outline",
    "values_with_path",
]
