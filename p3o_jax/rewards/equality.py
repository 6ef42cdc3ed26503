"""Decides whether two answers are the same, exactly where both are exact.

Numbers are evaluated to 50 digits and compared relatively, so that 1/3^60 is not 1/3^59. Expressions with variables are
evaluated at fixed points: two that are not identical agree at all of them only by a coincidence of 20 digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from p3o_jax.rewards.expressions import (
    Combined,
    Many,
    Matrix,
    Node,
    Parts,
    Relation,
    Scalar,
    Tuple,
    Words,
    is_measure,
)

_DIGITS = 50
_FEWEST_DECIMALS = 6
"""A decimal stands for a number that it is not, such as a root, from so many digits on."""
_POINTS = (
    ("13/7", "29/11", "37/17", "41/19", "53/23", "61/29", "71/31"),
    ("3/13", "5/17", "7/19", "11/29", "13/31", "17/37", "19/41"),
    ("-13/11", "17/7", "-23/19", "29/13", "-31/17", "37/23", "-43/29"),
    ("-5/3", "-7/4", "-11/7", "-13/9", "-17/11", "-19/13", "-23/16"),
    ("31/3", "17/2", "47/5", "53/7", "59/8", "67/9", "73/10"),
)
_WHOLE = (("7", "4", "11", "5", "13", "6"), ("4", "9", "8", "3", "10", "5"), ("9", "6", "5", "8", "7", "12"))
_WHOLE_NAMES = frozenset("jkmnN")
_OPPOSITE = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}


def same(gold: Node, answer: Node) -> bool:
    """Returns whether an answer is the right one.

    Not symmetric where a side says more: `x + y = 5` counts for 5, and 5 does not for `x + y = 5`.
    """
    if isinstance(answer, Relation) and not isinstance(gold, Relation):
        return _same_as_solved(gold, answer)
    if isinstance(gold, Relation) and not isinstance(answer, Relation):
        name, value = _assignment(gold)
        return (bool(name) and same(value, answer)) or (_interval(gold) is not None and _same_intervals(gold, answer))
    if isinstance(gold, Many) and not isinstance(answer, Many) and len(gold.items) == 1:
        gold = gold.items[0]
    if isinstance(answer, Many) and not isinstance(gold, Many) and len(answer.items) == 1:
        answer = answer.items[0]
    if isinstance(gold, Tuple) and isinstance(answer, Many) and not answer.a_set:  # (1, 2) as x = 1, y = 2
        pairs = [_assignment(item) if isinstance(item, Relation) else ("", item) for item in answer.items]
        return all(name for name, _ in pairs) and _in_order(gold.items, [value for _, value in pairs])
    for one, other in ((gold, answer), (answer, gold)):  # x < 1 or x > 3 as a union of intervals
        if isinstance(one, Combined) and one.operator == r"\cup" and isinstance(other, Many):
            return all(isinstance(i, Relation) for i in other.items) and _in_any_order(one.items, other.items)
    match gold, answer:
        case Words(), Words():
            return gold.text == answer.text
        case Parts(), Parts():
            return gold.parts == answer.parts and (gold.suffix == answer.suffix or not gold.suffix)
        case Scalar(), Scalar():
            return _same_scalars(gold, answer)
        case Words(), Scalar():
            return _is_symbol(answer, gold)
        case Scalar(), Words():
            return _is_symbol(gold, answer)
        case Many(), Many():
            return _same_many(gold, answer)
        case Tuple(), Tuple():
            return (gold.left, gold.right) == (answer.left, answer.right) and _in_order(gold.items, answer.items)
        case Matrix(), Matrix():
            return len(gold.rows) == len(answer.rows) and all(map(_in_order, gold.rows, answer.rows))
        case Combined(), Combined():
            if gold.operator != answer.operator:
                return False
            if gold.operator == r"\setminus":
                return _in_order(gold.items, answer.items)
            return _in_any_order(gold.items, answer.items)
        case Relation(), Relation():
            return _same_relations(gold, answer)
    return False


def _in_order(gold: Sequence[Node], answer: Sequence[Node]) -> bool:
    return len(gold) == len(answer) and all(map(same, gold, answer))


def _in_any_order(gold: Sequence[Node], answer: Sequence[Node]) -> bool:
    left = list(answer)
    for one in gold:
        for i, other in enumerate(left):
            if same(one, other):
                del left[i]
                break
        else:
            return False
    return not left


def _same_many(gold: Many, answer: Many) -> bool:
    if gold.a_set or answer.a_set:
        return _in_any_order(_different(gold.items), _different(answer.items))
    return _in_any_order(gold.items, answer.items)


def _different(items: Sequence[Node]) -> list[Node]:
    kept: list[Node] = []
    for item in items:
        if not any(same(one, item) for one in kept):
            kept.append(item)
    return kept


def _is_symbol(scalar: Scalar, words: Words) -> bool:
    return str(scalar.value).casefold() == words.text and not scalar.unit


def _same_scalars(gold: Scalar, answer: Scalar) -> bool:
    units = {gold.unit, answer.unit}
    if len(units) == 2 and all(units) and (any(map(is_measure, units))):
        return False
    if same_values(gold.value, answer.value) or _rounded(gold, answer) or _rounded(answer, gold):
        return True
    percent = "%" in units and "" in units  # 50 % as 0.5
    if not percent:
        return False
    rate, other = (gold, answer) if gold.unit == "%" else (answer, gold)
    return same_values(rate.value / 100, other.value)


def _rounded(decimal: Scalar, exact: Scalar) -> bool:
    """Whether a decimal is a number that it cannot be, rounded to all of its digits."""
    if decimal.decimals < _FEWEST_DECIMALS or exact.decimals or exact.value.free_symbols:
        return False
    value, real = _number(decimal.value), _number(exact.value)
    if value is None or real is None or not real.is_real or abs(real) < 10 ** (_FEWEST_DECIMALS - decimal.decimals - 1):
        return False
    return bool(abs(value - real) * 2 <= 10**-decimal.decimals) if decimal.decimals < _DIGITS else False


def same_values(a: Any, b: Any) -> bool:
    """Returns whether two of sympy's expressions are equal wherever both have a value."""
    import sympy

    if a == b:
        return True
    if not isinstance(a, sympy.Expr) or not isinstance(b, sympy.Expr):
        return False
    a, b = _with_symbols(a), _with_symbols(b)
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    if not symbols:
        return bool(_close(_number(a), _number(b)))
    real = not (a.has(sympy.I) or b.has(sympy.I))
    said = [
        _close(*values)
        for values in ([_number(one, point) for one in (a, b)] for point in _points(symbols))
        if not (real and values[0] is not None and values[1] is not None and not values[0].is_real)
    ]
    return any(one is not None for one in said) and all(one is not False for one in said)


def _points(symbols: Sequence[Any]) -> list[dict[Any, Any]]:
    """Where expressions are compared; variables that count things are whole."""
    import sympy

    whole = [symbol for symbol in symbols if str(symbol) in _WHOLE_NAMES]
    rest = [symbol for symbol in symbols if symbol not in whole]
    points = []
    for i in range(len(_POINTS)):
        numbers = _POINTS[i], _WHOLE[i % len(_WHOLE)]
        points.append(
            {
                symbol: sympy.Rational(values[j % len(values)]) + j // len(values)
                for group, values in zip((rest, whole), numbers, strict=True)
                for j, symbol in enumerate(group)
            }
        )
    return points


def _with_symbols(value: Any) -> Any:
    """With f(x) and the like as variables of their own."""
    import sympy
    from sympy.core.function import AppliedUndef

    return value.xreplace({one: sympy.Symbol(f"{one}", real=True) for one in value.atoms(AppliedUndef)})


def _number(value: Any, point: dict[Any, Any] | None = None) -> Any:
    """Its value to 50 digits, at a point if it has variables; None if it has none."""
    import sympy

    try:
        number = value.doit().evalf(_DIGITS, subs=point)
    except (TypeError, ValueError, ArithmeticError, NotImplementedError, AttributeError):
        return None
    if number.is_infinite:
        return number
    return number if number.is_number and not number.has(sympy.nan, sympy.zoo) and not number.free_symbols else None


def _close(a: Any, b: Any) -> bool | None:
    """Whether two numbers agree in 40 digits, or are both 0 as far as it can be known; None: one has no value."""
    import sympy

    if a is None or b is None:
        return None
    if a == b:
        return True
    if a.is_infinite or b.is_infinite:
        return False
    parts = [sympy.re(a), sympy.im(a), sympy.re(b), sympy.im(b)]
    if any(not isinstance(part, sympy.Number) for part in parts):
        return None
    sizes = [abs(complex_) for complex_ in (a, b)]
    size = max(sizes)
    if any(getattr(part, "_prec", 100) < 20 for part in parts if part):  # what cancels, with no digit left
        return bool(abs(a - b) <= sympy.Float(10, 60) ** -40 * max(size, 1))
    return bool(abs(a - b) <= sympy.Float(10, 60) ** -40 * size)


def _assignment(relation: Relation) -> tuple[str, Node]:
    """The name and the value of x = ... = 3; no name if it is another relation."""
    if set(relation.operators) == {"="}:
        first, last = relation.sides[0], relation.sides[-1]
        if isinstance(first, Words):
            return first.text, last
        if isinstance(last, Scalar) and last.value.is_Symbol and len(relation.sides) == 2:  # 3 = x
            return str(last.value), first
    return "", relation


def _same_as_solved(gold: Node, answer: Relation) -> bool:
    """Whether a relation says that something is the gold, which is none itself."""
    name, value = _assignment(answer)
    if name:
        return same(gold, value)
    if set(answer.operators) == {"="}:  # m + n = 5 where the gold is 5
        last = answer.sides[-1]
        return isinstance(last, Scalar) and not last.value.free_symbols and same(gold, last)
    return _same_intervals(gold, answer)


def _same_intervals(gold: Node, answer: Node) -> bool:
    a, b = (_interval(one) if isinstance(one, Relation) else one for one in (gold, answer))
    if a is None or b is None or isinstance(a, Relation) or isinstance(b, Relation):
        return False
    return same(a, b)


def _interval(relation: Relation) -> Tuple | None:
    """The interval of 1 < x <= 2 or x > 3, whatever the variable is called; None of another relation."""
    import sympy

    operators, sides = relation.operators, relation.sides
    if not all(isinstance(side, Scalar) for side in sides) or any(one not in _OPPOSITE for one in operators):
        return None
    if operators[0] in (">", r"\ge"):
        operators, sides = tuple(_OPPOSITE[one] for one in reversed(operators)), sides[::-1]
    if any(one not in ("<", r"\le") for one in operators):
        return None
    symbols = [side.value.is_Symbol for side in sides]  # type: ignore[union-attr]  # scalars, as just seen
    infinite = Scalar(sympy.oo)
    match symbols, operators:
        case [True, False], [one]:
            return Tuple("(", (Scalar(-sympy.oo), sides[1]), ")" if one == "<" else "]")
        case [False, True], [one]:
            return Tuple("(" if one == "<" else "[", (sides[0], infinite), ")")
        case [False, True, False], [one, two]:
            return Tuple("(" if one == "<" else "[", (sides[0], sides[2]), ")" if two == "<" else "]")
    return None


def _same_relations(gold: Relation, answer: Relation) -> bool:
    gold_name, gold_value = _assignment(gold)
    name, value = _assignment(answer)
    if gold_name and name:
        return gold_name == name and same(gold_value, value)
    one, other = _interval(gold), _interval(answer)
    if one is not None and other is not None:
        return _variable(gold) == _variable(answer) and same(one, other)
    if len(gold.operators) > 1 or len(answer.operators) > 1:
        return gold.operators == answer.operators and _in_order(gold.sides, answer.sides)
    return _proportional(gold, answer)


def _variable(relation: Relation) -> str:
    return next(str(side.value) for side in relation.sides if isinstance(side, Scalar) and side.value.is_Symbol)


def _proportional(gold: Relation, answer: Relation) -> bool:
    """Whether two equations or inequalities say the same of their variables, up to a factor."""
    a, b = _difference(gold), _difference(answer)
    if a is None or b is None:
        return gold.operators == answer.operators and _in_order(gold.sides, answer.sides)
    (left, operator), (right, other) = a, b
    if operator != other:
        return False
    point = _points(sorted(left.free_symbols | right.free_symbols, key=str))[0]
    values = [_number(one, point) for one in (left, right)]
    if None in values or not values[0] or not values[1]:
        return False
    factor = values[1] / values[0]
    if operator not in ("=", r"\ne") and not factor.is_positive:
        return False
    ratio = right / left
    return all(
        _close(_number(ratio, point), factor) is not False for point in _points(sorted(ratio.free_symbols, key=str))
    )


def _difference(relation: Relation) -> tuple[Any, str] | None:
    """Left less right and the operator, as < or <= where it is an inequality; None if a side is no expression."""
    import sympy

    sides = []
    for side in relation.sides:
        if isinstance(side, Words):
            sides.append(sympy.Symbol(side.text.lstrip("\\"), real=True))
        elif isinstance(side, Scalar):
            sides.append(_with_symbols(side.value))
        else:
            return None
    operator = relation.operators[0]
    if operator in (">", r"\ge"):
        sides, operator = sides[::-1], _OPPOSITE[operator]
    return sides[0] - sides[1], operator
