"""Module calls as functions: chosen calls of a program become calls of shared bodies.

Data flow:
    tape + chosen calls -> for each, innermost first, its ops as a body whose inputs are explicit
    bodies with equal keys -> one function
    the ops of a call -> one `invoke_subgraph` op, with the function's body among its arguments
"""

from scopetrace.outline.cut import outline
from scopetrace.outline.function import FunctionInput, FunctionOutput, OutlinedBody
from scopetrace.outline.readers import Numbers

__all__ = ["FunctionInput", "FunctionOutput", "Numbers", "OutlinedBody", "outline"]
