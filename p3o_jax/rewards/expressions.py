r"""Reads an answer as a whole: a list, set, tuple, interval, matrix, equation, inequality, time, quantity, or words.

What these are made of is parsed by latex2sympy2_extended, the parser of math-verify, which refuses what it does not
read to the end. Nothing is read in part: an answer is understood entirely or `Unreadable`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from p3o_jax.rewards.latex import SIGNS, as_latex, exact_decimals, split

MAX_CHARACTERS = 600
_MAX_DEPTH, _MAX_BARS, _MAX_POWERS = 20, 8, 20
"""Brackets within each other, bars of absolute values, and exponents: beyond, the parser takes for ever."""


class Unreadable(ValueError):
    """An answer that cannot be read entirely."""


@dataclass(frozen=True)
class Words:
    """Words, a choice, or a phrase, in small letters."""

    text: str


@dataclass(frozen=True)
class Parts:
    """What colons separate: a time of day or a ratio, with what follows it (am, pm)."""

    parts: tuple[int, ...]
    suffix: str


@dataclass(frozen=True)
class Scalar:
    """A number or an expression."""

    value: Any  # sympy's
    unit: str = ""
    decimals: int = 0  # after the point, where it is written as one decimal number


@dataclass(frozen=True)
class Many:
    """Several answers in any order; of a set, none counts twice."""

    items: tuple[Node, ...]
    a_set: bool = False


@dataclass(frozen=True)
class Tuple:
    """A point, vector or interval: what stands between two brackets, in order."""

    left: str
    items: tuple[Node, ...]
    right: str


@dataclass(frozen=True)
class Combined:
    r"""Sets with \cup, \cap or \setminus between them."""

    operator: str
    items: tuple[Node, ...]


@dataclass(frozen=True)
class Matrix:
    """Rows of a matrix or column vector."""

    rows: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True)
class Relation:
    """Equations and inequalities in a chain: sides[0] operators[0] sides[1] ..."""

    sides: tuple[Node, ...]
    operators: tuple[str, ...]


Node = Words | Parts | Scalar | Many | Tuple | Combined | Matrix | Relation

_AND_OR = r"(?:,?\s*\\text\s?\{\s*,?\s*(?:and|or)\s*\}|(?<![\\a-zA-Z])(?:,\s*)?(?:and|or)(?![a-zA-Z]))\s*"
_RELATION = r"\\(?:le|ge|ne|approx|equiv|sim)(?![a-zA-Z])|[<>=]"
_TEXT = r"\\(?:text|operatorname\*?)\s?\{([^{}]*)\}"
_CLOCK = re.compile(r"(\d+(?:\s?:\s?\d+)+)\s*((?:\\text\s?\{[^{}]*\}|[a-zA-Z. ])*)")
_BASE = re.compile(
    r"([0-9A-Za-z]+)_\s?\{?(?:\\text\s?\{)?\s*(\d+|two|three|four|five|six|seven|eight|nine|ten)\s*\}?\}?"
)
_MATRIX = re.compile(
    r"\\begin\s?\{(?P<kind>[pbB]?matrix|smallmatrix|array)\}(?:\{[lcr|\s]*\})?(?P<rows>.*)\\end\s?\{(?P=kind)\}"
)
_UNIT = re.compile(rf"(?P<value>.*?[\d}})\]!])\s*(?P<unit>(?:{_TEXT}(?:\s?\^\s?\{{?[23]\}}?)?\s*)+)$")
_PLAIN_UNIT = re.compile(r"(?P<value>-?[\d,./]*\d)\s*(?P<unit>(?:[a-zA-Z]{2,}[a-zA-Z/ .]*)(?:\^\s?\{?[23]\}?)?)$")
_SAME_UNITS = {
    "centimeter": "cm", "centimetre": "cm", "meter": "m", "metre": "m", "kilometer": "km", "kilometre": "km",
    "millimeter": "mm", "millimetre": "mm", "inche": "in", "inch": "in", "foot": "ft", "feet": "ft", "mile": "mi",
    "minute": "min", "second": "s", "sec": "s", "hour": "h", "hr": "h", "gram": "g", "kilogram": "kg", "liter": "l",
    "litre": "l", "dollar": "$", "cent": "¢", "percent": "%", "percentage": "%", "pct": "%", "degree": "°", "deg": "°",
    "pound": "lb", "ounce": "oz", "unit": "", "year old": "year", "miles per hour": "mph", "mi/h": "mph",
}  # fmt: skip
_MEASURES = {*_SAME_UNITS.values(), "yd", "yard", "day", "week", "year", "month", "mph", "€", "£", "kg", "acre"} - {""}
_BASES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def read(text: str) -> Node:
    """Reads an answer.

    Raises:
        Unreadable: it cannot be read entirely, with the reason.
    """
    if len(text) > MAX_CHARACTERS:
        raise Unreadable(f"an answer of {len(text)} characters")
    inside = re.fullmatch(rf"\s*{_TEXT}\s*[.,]?\s*", text)
    text = inside[1] if inside else text
    words = _words(text)
    if words is not None:
        return words
    try:
        return _read(as_latex(text))
    except Unreadable:
        phrase = " ".join(text.split())
        if re.search(r"[a-zA-Z]{2}", phrase) and not re.search(r"[\\{}^_=<>+*/$]", phrase):
            return Words(phrase.casefold())
        raise


def names_of(latex: str) -> str:
    """The left-hand side of an assignment as a name, without spaces; empty if it is none."""
    plain = re.sub(r"[\s{}]", "", re.sub(_TEXT, r"\1", latex))
    return (
        plain
        if re.fullmatch(
            r"\\?[a-zA-Z]+'*(?:_\w+)?(?:\([a-zA-Z0-9,]*\)|\^-1\([a-z]\))?|\([a-zA-Z](?:,[a-zA-Z])+\)", plain
        )
        else ""
    )


def _words(text: str) -> Words | None:
    r"""Words, a letter or a choice such as \textbf{(B)}; None if it is something else."""
    plain = re.sub(r"\\(?:text(?:bf|it|rm|normal)?|mathrm|mathbf|mbox)\s?\{([^{}]*)\}", r"\1", text)
    plain = re.sub(r"\s+", " ", plain.replace("$", " ").replace("~", " ").replace("**", "").replace("\\ ", " "))
    plain = plain.strip(" .,;:\"'")
    choice = re.fullmatch(r"\(?\s*([A-Za-z])\s*[).:]?", plain)
    if choice:
        return Words(choice[1].casefold())
    letters = re.fullmatch(r"[^\W\d_]+(?:[ '’/-]+[^\W\d_]+)*!?", plain)
    if any(sign in plain for sign in SIGNS):
        return None
    known = ("pi", "infinity", "oo", "inf", "and", "or", "sqrt")
    if (
        letters
        and not set(re.findall(r"\w+", plain.casefold())) & set(known)
        and not re.search(r"[a-z]/[a-z]\b", plain)
    ):
        return Words(plain.casefold())
    return None


def _read(latex: str) -> Node:
    try:
        return _node(latex)
    except (Unreadable, RecursionError):
        raise
    except ValueError as error:
        raise Unreadable(f"{error}: {latex[:80]!r}") from error


def _node(latex: str) -> Node:
    latex = re.sub(r"[.;,:\s]+$", "", latex).strip()
    latex = re.sub(r"^\\approx\s*", "", latex)
    if not latex:
        raise Unreadable("nothing between two separators")
    clock = _CLOCK.fullmatch(latex)
    if clock:
        suffix = re.sub(r"\\text|[^a-z]", "", clock[2].casefold())
        return Parts(tuple(int(part) for part in clock[1].split(":")), suffix)
    parts = _list(latex)
    if len(parts) > 1:
        return Many(tuple(_element(part) for part in parts))
    for operator in (r"\\cup", r"\\cap", r"\\setminus"):
        parts = split(latex, rf"{operator}(?![a-zA-Z])")
        if len(parts) > 1:
            return Combined(operator[1:], tuple(_node(part) for part in parts))
    sides = split(latex, r"\\in(?![a-zA-Z])")
    if len(sides) == 2 and names_of(sides[0]):
        return _node(sides[1])
    sides = split(latex, _RELATION)
    if len(sides) > 1:
        return _relation(latex, sides)
    if re.search(r"\\[pm][pm](?![a-zA-Z])", latex):
        signs = [re.sub(r"\\pm(?![a-zA-Z])", a, re.sub(r"\\mp(?![a-zA-Z])", b, latex)) for a, b in ("+-", "-+")]
        return Many(tuple(_node(re.sub(r"(^|[{(])\+", r"\1", one)) for one in signs))
    return _bracketed(latex) or _matrix(latex) or _scalar(latex)


def _element(latex: str) -> Node:
    return Words("...") if re.fullmatch(r"\\[lc]?dots|\.\.\.|…", latex) else _words(latex) or _node(latex)


def _list(latex: str) -> list[str]:
    """What commas, semicolons, "and" and "or" separate; 1,234 is one number where no comma has a space after it."""
    if re.fullmatch(r"-?\$?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?:[^\d,;].*)?", latex, re.S) and ", " not in latex:
        return [latex]
    grouped = r",(?!\d{3}(?!\d))|,(?=\d{3},\d{1,2}(?!\d))" if re.search(r",\s", latex) else r","
    between = rf"{_AND_OR}|;\s*|{grouped}\s*(?:{_AND_OR})?"
    return [part for part in split(latex, between) if part]


def _relation(latex: str, sides: list[str]) -> Node:
    operators = tuple(re.sub(r"\\(approx|sim|equiv)", "=", one) for one in _operators(latex))
    read = []
    for i, side in enumerate(sides):
        name = names_of(side) if i == 0 else ""
        read.append(Words(name) if name and operators[0] == "=" and not _is_number(name) else _node(side))
    return Relation(tuple(read), operators)


def _is_number(name: str) -> bool:
    return name in ("\\pi", "e", "i")


def _operators(latex: str) -> list[str]:
    """The relations outside of brackets, in order."""
    outside, depth = [], 0
    for token in re.findall(rf"\\[{{}}]|{_RELATION}|\\[a-zA-Z]+|.", latex):
        depth += (token in ("{", "(", "[", r"\{")) - (token in ("}", ")", "]", r"\}"))
        if not depth and re.fullmatch(_RELATION, token):
            outside.append(token)
    return outside


def _bracketed(latex: str) -> Node | None:
    r"""A set \{...\}, or a tuple or interval of at least two; None if the brackets are something else."""
    if latex.startswith(r"\{") and latex.endswith(r"\}"):
        inside = latex[2:-2].strip()
        condition = re.fullmatch(r"[a-zA-Z](?:\s*\\in\s*\\mathbb\{R\})?\s*[|:](.*)", inside)
        if condition:  # of one real variable: the interval
            return _node(condition[1])
        if "|" in inside or ":" in inside:
            raise Unreadable(f"a set given by a condition: {latex[:80]!r}")
        return Many(tuple(_element(part) for part in split(inside, "[,;]")) if inside else (), a_set=True)
    if latex == r"\emptyset":
        return Many((), a_set=True)
    if latex[0] in "([" and latex[-1] in ")]":
        inside = latex[1:-1]
        try:
            parts = split(inside, "[,;]")
        except ValueError:  # (a)(b)
            return None
        if len(parts) > 1:
            return Tuple(latex[0], tuple(_element(part) for part in parts), latex[-1])
    return None


def _matrix(latex: str) -> Node | None:
    match = _MATRIX.fullmatch(re.sub(r"^[(\[]\s*(\\begin.*)\s*[)\]]$", r"\1", latex))
    if match is None:
        return None
    rows = [row for row in split(match["rows"].strip(), r"\\\\") if row.strip()]
    cells = tuple(tuple(_node(cell) for cell in split(row, "&")) for row in rows)
    if len({len(row) for row in cells}) != 1:
        raise Unreadable("rows of a matrix with unequal lengths")
    return Matrix(cells)


def _scalar(latex: str) -> Node:
    value, unit = _without_unit(latex)
    base = _BASE.fullmatch(value)
    if base:
        radix = int(base[2]) if base[2].isdigit() else _BASES.index(base[2])
        return Scalar(_digits(base[1], radix), f"base {radix}")
    if re.search(r"\\text(?![a-zA-Z])|\\operatorname|\d\s+\d", value):
        thousands = re.fullmatch(r"-?\d{1,3}(?: \d{3})+", value)
        mixed = re.fullmatch(r"(-?\d+) (\d+)/(\d+)", value)
        if mixed:
            value = rf"{mixed[1]}\frac{{{mixed[2]}}}{{{mixed[3]}}}"
        elif not thousands:
            raise Unreadable(f"words or two numbers within an expression: {value[:80]!r}")
    if re.search(
        r"(?<![\\a-zA-Z{])[a-zA-Z]{2,} +[a-zA-Z0-9]|[a-zA-Z0-9)}] +(?!d[a-z]\b)[a-zA-Z]{2,}",
        re.sub(r"\\[a-zA-Z]+ ?", r"\\", value),
    ):
        raise Unreadable(f"words within an expression: {value[:80]!r}")
    decimal = re.fullmatch(r"-?(?:\d{1,3}(?:,\d{3})+|\d*)\.(\d+)", value)
    return Scalar(parsed(_in_radians(value)), unit, len(decimal[1]) if decimal else 0)


def _in_radians(latex: str) -> str:
    r"""With \cos 20^{\circ} as the cosine of an angle."""
    return re.sub(r"(\d+(?:\.\d+)?)\s?\^\s?\{?\s?\\circ\s?\}?", r"(\\frac{\1\\pi}{180})", latex)


def _without_unit(latex: str) -> tuple[str, str]:
    """The expression and its unit in one spelling: cm for centimeters."""
    value, unit = latex, ""
    modulo = re.fullmatch(
        r"(.*?)\s*(?:\\pmod\s?\{?\s?(\d+)\s?\}?|\(\s*(?:\\mod|\\text\{mod\s*\}|mod)\s*(\d+)\s*\))", latex
    )
    if modulo:
        return modulo[1], f"mod {modulo[2] or modulo[3]}"
    if match := re.fullmatch(r"(.*?)\s*\\?%", latex):
        value, unit = match[1], "%"
    elif not re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", latex) and (
        match := re.fullmatch(r"(.*?)\s*\^\s?\{?\s?\\circ\s?\}?(?:\s*(?:[CF]|\\text\s?\{\s*[CF]?\s*\}))?", latex)
    ):
        value, unit = match[1], "°"
    elif match := re.fullmatch(r"(-?)\s*([$€£])\s*(-?.*?)(?:\s*\\text\s?\{[^{}]*\}|\s+[a-z]{2}[a-z ]*)?", latex):
        value, unit = match[1] + match[3], match[2]
    elif match := re.fullmatch(r"(.*?)\s*([$€£])", latex):
        value, unit = match[1], match[2]
    elif (match := _UNIT.fullmatch(latex)) or ((match := _PLAIN_UNIT.fullmatch(latex)) and _is_word(match["unit"])):
        value, unit = match["value"], re.sub(_TEXT, r"\1", match["unit"])
    elif match := re.fullmatch(rf"{_TEXT}\s*(.*\d.*)", latex):  # \text{about } 5
        value = match[2]
    if not value:
        raise Unreadable("a unit without a value")
    unit = re.sub(r"\s+", " ", re.sub(r"[{}.]", "", unit)).strip().casefold().replace("square ", "sq ")
    if re.search(r"(?:^|\s)(?:plus|minus|times|over|half|hundred|thousand|million|billion|dozen)s?(?:\s|$)", unit):
        raise Unreadable(f"a number in words: {latex[:80]!r}")
    single = unit if unit in _SAME_UNITS or unit.endswith("ss") else unit.removesuffix("s") if len(unit) > 2 else unit
    return value.strip(), _SAME_UNITS.get(unit) or _SAME_UNITS.get(single, single)


def _is_word(unit: str) -> bool:
    """Whether letters after a number are a unit and no product of variables."""
    first = re.split(r"[ /^.]", unit)[0].casefold()
    known = {*_SAME_UNITS, *_MEASURES}
    return first in known or first.removesuffix("s") in known or (len(first) > 2 and bool(re.search("[aeiou]", first)))


def is_measure(unit: str) -> bool:
    """Whether a unit is one whose difference makes another quantity: cm, not apples."""
    return unit in _MEASURES or unit.startswith(("base ", "mod ")) or bool(re.search(r"\^|/", unit))


def _digits(digits: str, base: int) -> Any:
    """Digits to a base, as they are written where that is possible: the base may be left away."""
    import sympy

    try:
        value = int(digits, base)
    except ValueError:
        raise Unreadable(f"{digits} is no number to base {base}") from None
    return sympy.Integer(digits if digits.isdigit() else value)


def parsed(latex: str) -> Any:
    r"""Returns sympy's expression, with decimals as exact fractions and i as the imaginary unit.

    Raises:
        Unreadable: it cannot be parsed to its end, or is no number or expression.
    """
    import sympy
    from latex2sympy2_extended import latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    depth = deepest = 0
    for character in latex:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    if re.search(r"\\(?:gcd|lcm)(?![a-zA-Z])[^\\]*[a-zA-Z]", latex):  # sympy's is 1 for any two variables
        raise Unreadable(f"a divisor of variables: {latex[:80]!r}")
    if "!!" in latex:  # read as the factorial of a factorial
        raise Unreadable(f"a double factorial: {latex[:80]!r}")
    if deepest > _MAX_DEPTH or latex.count("|") > _MAX_BARS or latex.count("^") > _MAX_POWERS:
        raise Unreadable(f"nested too deeply: {latex[:80]!r}")
    try:
        value = latex2sympy(
            exact_decimals(latex),
            is_real=True,
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    except RecursionError:
        raise
    except Exception as error:  # antlr's and the converter's, whatever they are
        raise Unreadable(f"cannot be parsed: {latex[:80]!r}") from error
    if not isinstance(value, sympy.Basic) or (
        not isinstance(value, sympy.Expr) and value not in (sympy.S.Reals, sympy.S.Integers, sympy.S.Naturals)
    ):
        raise Unreadable(f"neither a number nor an expression: {latex[:80]!r}")
    if value.has(sympy.nan, sympy.zoo):
        raise Unreadable(f"has no value: {latex[:80]!r}")
    return value.xreplace({sympy.Symbol("i", real=True): sympy.I})
