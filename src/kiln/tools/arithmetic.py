"""`calc_arithmetic`: expressions with numbers, evaluated by simpleeval under bounds of kiln's own.

No step can take long: a whole number is at most BITS bits wide before and after every operation, an
expression at most CHARS characters long, and nothing in it loops. simpleeval's own limits are too wide
for that; they let the power of two numbers of seven digits through.
"""

from __future__ import annotations

import ast
import asyncio
import math
import operator
import re
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import simpleeval

from kiln.tools.tool import Arguments, Category, ToolResult

CHARS = 500
BITS = 4096
FACTORIAL_MOST = 500
CHOOSE_MOST = 2000

Number = int | float


class BadExpression(Exception):
    """The expression has no value here; the message says why."""


def evaluate(expression: str) -> Number:
    """The value of an arithmetic expression, a whole number or a finite float. Raises BadExpression."""
    if len(expression) > CHARS:
        raise BadExpression(f"the expression has more than {CHARS} characters")
    text = expression.strip().translate(_SPELLINGS).replace("^", "**")
    _check_words(text)
    try:
        tree = ast.parse(text, mode="eval")
        _check_shape(tree)
        return _number(_Evaluator().eval(text, previously_parsed=tree.body))
    except SyntaxError as error:
        raise BadExpression(f"it is not an expression: {error.msg}") from None
    except ZeroDivisionError:
        raise BadExpression("a division by zero") from None
    except OverflowError:
        raise BadExpression("a number grows too large") from None
    except (RecursionError, MemoryError):
        raise BadExpression("it is nested too deeply") from None
    except simpleeval.InvalidExpression as error:
        raise BadExpression(str(error)) from None
    except (TypeError, ValueError) as error:
        raise BadExpression(f"a function does not take these arguments: {error}") from None


def show(value: Number) -> str:
    """The number as people write it: whole numbers in full, others in 15 significant digits."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.15g}"
    return str(value)


_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "π": "pi"})
_WORD = re.compile(
    r"\s+|0[xX][0-9a-fA-F]+(?!\w)|0[bB][01]+(?!\w)|(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
    r"|(?P<name>[A-Za-z_][A-Za-z_0-9]*)|\*\*|//|<<|>>|[-+*/%(),&|~]"
)


def _check_words(text: str) -> None:
    """Refuse what is not arithmetic before Python's parser sees it; it warns about some of that."""
    at = 0
    while at < len(text):
        word = _WORD.match(text, at)
        if word is None:
            raise BadExpression(f"the character {text[at]!r} has no place in it")
        name = word["name"]
        if name is not None and name not in _FUNCTIONS and name not in _CONSTANTS:
            known = ", ".join([*_FUNCTIONS, *_CONSTANTS])
            raise BadExpression(f"{name} is not known; the functions and constants are {known}")
        at = word.end()
    if not text:
        raise BadExpression("it is empty")


def _check_shape(tree: ast.Expression) -> None:
    if isinstance(tree.body, ast.Tuple):
        raise BadExpression("it is not one number; write numbers without thousands separators")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Name):
            raise BadExpression("a number stands right before a parenthesis; write * between them")


def _number(value: object) -> Number:
    if isinstance(value, complex):
        raise BadExpression("the result is not a real number")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadExpression("a part of it is not a number")
    if isinstance(value, int):
        if value.bit_length() > BITS:
            raise OverflowError
    elif math.isinf(value):
        raise OverflowError
    elif math.isnan(value):
        raise BadExpression("the result is not a number")
    return value


def _bounded(function: Callable[..., Any]) -> Callable[..., Number]:
    """The function between numbers within bounds, its result included."""

    def call(*values: object) -> Number:
        return _number(function(*(_number(value) for value in values)))

    return call


def _power(base: Number, exponent: Number) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0 and base not in (-1, 0, 1):
        if base.bit_length() * exponent > 2 * BITS:
            raise OverflowError
    return base**exponent


def _shift_left(value: int, by: int) -> int:
    if by > BITS:
        raise OverflowError
    return value << by


def _round(value: Number, digits: int = 0) -> Number:
    if abs(digits) > 400:
        raise BadExpression("round takes at most 400 digits")
    return round(value, digits) if digits else round(value)


def _factorial(value: Number) -> int:
    if value > FACTORIAL_MOST:
        raise OverflowError
    return math.factorial(_whole(value))


def _choose(function: Callable[[int, int], int]) -> Callable[[Number, Number], int]:
    def call(n: Number, k: Number) -> int:
        if max(n, k) > CHOOSE_MOST:
            raise OverflowError
        return function(_whole(n), _whole(k))

    return call


def _whole(value: Number) -> int:
    if isinstance(value, float) and not value.is_integer():
        raise BadExpression(f"{show(value)} is not a whole number")
    return int(value)


def _mean(*values: Number) -> float:
    return math.fsum(values) / len(values)


def _log(value: Number, *base: Number) -> float:
    return math.log10(value) if base == (10,) else math.log(value, *base)


_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.LShift: _shift_left,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.Invert: operator.invert,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "round": _round,
    "floor": math.floor,
    "ceil": math.ceil,
    "sqrt": math.sqrt,
    "cbrt": math.cbrt,
    "exp": math.exp,
    "log": _log,
    "ln": math.log,
    "log2": math.log2,
    "log10": math.log10,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "asin": math.asin,
    "acos": math.acos,
    "atan": math.atan,
    "atan2": math.atan2,
    "sinh": math.sinh,
    "cosh": math.cosh,
    "tanh": math.tanh,
    "degrees": math.degrees,
    "radians": math.radians,
    "hypot": math.hypot,
    "pow": _power,
    "min": lambda *values: min(values),
    "max": lambda *values: max(values),
    "sum": lambda *values: sum(values),
    "mean": _mean,
    "gcd": lambda *values: math.gcd(*(_whole(value) for value in values)),
    "lcm": lambda *values: math.lcm(*(_whole(value) for value in values)),
    "factorial": _factorial,
    "comb": _choose(math.comb),
    "perm": _choose(math.perm),
}
_CONSTANTS: dict[str, Number] = {"pi": math.pi, "e": math.e, "tau": math.tau}
_NODES = (ast.Constant, ast.UnaryOp, ast.BinOp, ast.Call, ast.Name)


class _Evaluator(simpleeval.SimpleEval):  # type: ignore[misc]
    """simpleeval with numbers only: no text, attribute, item, comparison or condition."""

    nodes: dict[type, Any]

    def __init__(self) -> None:
        bounded_operators = {kind: _bounded(function) for kind, function in _OPERATORS.items()}
        bounded_functions = {name: _bounded(function) for name, function in _FUNCTIONS.items()}
        super().__init__(bounded_operators, bounded_functions, dict(_CONSTANTS))
        self.nodes = {kind: self.nodes[kind] for kind in _NODES}


class ExpressionArguments(msgspec.Struct, forbid_unknown_fields=True):
    expression: Annotated[
        str,
        msgspec.Meta(
            description="For example (3 + 4) * 2 ** 5, sqrt(2) or log(8, 2). Angles are in radians.",
            max_length=CHARS,
        ),
    ]


class CalcArithmetic:
    name = "calc_arithmetic"
    category: Category = "pure"
    description = (
        "Evaluate an arithmetic expression exactly. Knows + - * / // % ** and "
        f"{', '.join([*_FUNCTIONS, *_CONSTANTS])}."
    )
    _arguments = Arguments(ExpressionArguments)
    parameters = _arguments.schema

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        given = self._arguments.read(arguments)
        if isinstance(given, ToolResult):
            return given
        try:
            return ToolResult(show(await asyncio.to_thread(evaluate, given.expression)))
        except BadExpression as error:
            return ToolResult.failed(f"The expression has no value: {error}.")
