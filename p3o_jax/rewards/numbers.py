r"""Reads an answer that is one number, exactly: 1,234.50, 3/4, 1\frac{1}{2}, 2^{10}, 1.5 \times 10^3, and a unit.

An expression, a list or a name is no number, whatever numbers are in it. All of it takes time linear in the text.
"""

from __future__ import annotations

import re
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from fractions import Fraction

Number = Fraction | Decimal

_MAX_NUMBER_CHARACTERS = 200
_MAX_POWER_BITS = 4096
_EXACT = Context(prec=2 * _MAX_NUMBER_CHARACTERS, Emax=MAX_EMAX, Emin=MIN_EMIN)
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)\s?[$€£¥]?\s?(?:"
    r"(?:(?P<whole>\d+)\s?)?\\[dtc]?frac\s?(?:\{\s?(?P<top>-?\d+)\s?\}|(?P<a>\d))\s?(?:\{\s?(?P<bottom>\d+)\s?\}|(?P<b>\d))"
    r"|(?P<mixed>\d+)\s(?P<over>\d+)/(?P<under>\d+)"
    rf"|(?P<digits>{_DIGITS})(?:"
    r"[eE](?P<exponent>[-+]?\d{1,9})(?!\w)"
    r"|\s?(?:\\times|\\cdot|×|\*)\s?10\s?(?:\^|\*\*)\s?(?:\{\s?(?P<power>-?\d{1,9})\s?\}|(?P<short>-?\d{1,9}))"
    r"|\s?(?:\^|\*\*)\s?(?:\{\s?(?P<raised>-?\d{1,6})\s?\}|(?P<to>-?\d{1,6}))"
    r"|\s?/\s?(?P<denominator>\d+)"
    r")?)"
)
_NO_UNIT = (
    r"(?:or|and|plus|minus|negative|times|over|sqrt|pi|sin|cos|tan|log|ln|exp|infinity|mod|half|halves|thirds?|"
    r"quarters?|dozens?|hundreds?|thousands?|millions?|billions?|trillions?)\b"
)
_WORD = rf"(?!(?i:{_NO_UNIT}))[^\W\d_][^\W\d_'’.-]*(?:['’.-]?[^\W\d_]+)+"
_TEXT = r"\\(?:text|mathrm|textrm|textbf|mbox|operatorname)\s?\{[^{}\d\\]*\}"
_BEFORE = re.compile(rf"(?:(?:{_WORD}|[aA](?=\s)|\\approx|≈|~|{_TEXT})[\s,:]*)*")
_UNIT = re.compile(
    rf"\s?(?:%|°|\^\s?\{{?\\circ\}}?|[$€£¥]|['\"’”]+(?!\w)|(?:/\s?|per\s)?(?:{_TEXT}|{_WORD}|[mgshLl](?![\w(]))"
    r"(?:\s?\^\s?(?:[23]|\{[23]\})|[²³])?)"
)
_JOINT = re.compile(r"\b(?:or|and)\b|[,;]")
_END = re.compile(r"(?:\s*\([^()]*\))?[\s.,;:?*_$]*")
_PART_BEFORE = re.compile(r"(?:[\w)}\]+*/^_×÷√π<>\\&|.-]|\b(?:or|and|plus|minus|times),?|[\d)}],)\s?$", re.IGNORECASE)
_PROSE_BEFORE = re.compile(rf"(?:{_WORD}|\b[aA]|[\d)][.)])[\s:]*$")
_PART_AFTER = re.compile(
    rf"\s?(?:[\^*/×÷√π<>&|+]|\\(?!text|mathrm|mbox|approx)|-\s?[\w(\\]|[(\[{{]?[^\W\d](?!\w)|{_NO_UNIT})"
)


def one_number(answer: str) -> Number | None:
    """Returns the number that an answer is, its unit, currency and thousands separators apart.

    Words may stand before and after it, and a remark in parentheses. Of an equation the last side counts. None: it is
    no number, or not one.
    """
    text = _plain(answer)
    left, equals, right = text.rpartition("=")
    if equals:
        if left.endswith(("<", ">", "!", "\\")) or _JOINT.search(re.sub(r"(?<=\d),(?=\d{3})", "", left)):
            return None
        text = right.strip()
    before = _BEFORE.match(text)
    match = _NUMBER.match(text, before.end() if before else 0)
    if match is None:
        return None
    position = match.end()
    while unit := _UNIT.match(text, position):
        position = unit.end()
    end = _END.match(text, position)
    return _value(match) if end is not None and end.end() == len(text) else None


def last_number(text: str) -> Number | None:
    """Returns the last number of a text that marks no answer; None if it is part of an expression or a list."""
    text = _plain(text)
    lines = [line for line in text.split("\n") if re.search(r"\d", line)]
    if not lines:
        return None
    line = lines[-1]
    if not re.search(_WORD, line):
        return one_number(line)
    match = None
    for match in _NUMBER.finditer(line):  # noqa: B007  # the last
        pass
    if match is None:
        return None
    before, after = line[: match.start()], line[match.end() :]
    if match["sign"] and re.search(r"[\w)}]$", before):  # 8-3: a difference
        return None
    if _PART_BEFORE.search(before) and not _PROSE_BEFORE.search(before):
        return None
    return None if _PART_AFTER.match(after) and not _UNIT.match(after) else _value(match)


def plain_number(text: str) -> Number | None:
    """Returns the number that a text is and nothing else, a currency sign or a full stop apart; None if it is not."""
    match = _NUMBER.fullmatch(_plain(text).strip("$").removesuffix("."))
    return _value(match) if match else None


def canonical(value: Number) -> str:
    """Returns the same text for the same number: 1234.00 and 1234 vote together."""
    if isinstance(value, Fraction) or (value and abs(value.adjusted()) > 50):
        return str(value)
    return str(Fraction(value))


def same_number(a: Number, b: Number, relative_tolerance: float = 0.0) -> bool:
    """Returns whether |a - b| <= relative_tolerance |b|, exactly."""
    with localcontext(_EXACT):
        if isinstance(a, Decimal) and isinstance(b, Decimal):
            return abs(a - b) <= Decimal(relative_tolerance) * abs(b)
        if any(isinstance(x, Decimal) and x and abs(x.adjusted()) > _MAX_NUMBER_CHARACTERS for x in (a, b)):
            return False  # no fraction of this length is that large or small
        return abs(Fraction(a) - Fraction(b)) <= Fraction(relative_tolerance) * abs(Fraction(b))


def _plain(text: str) -> str:
    """Without what only sets a number: thin spaces, delimiters of mathematics, emphasis."""
    text = text.replace("\u2212", "-").replace("{,}", ",").replace("\\!", "").replace("\\$", "$").replace("\\%", "%")
    text = re.sub(r"(?<=\d)\\,(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"\\[,;: ]|~|\\(?:displaystyle|left|right)\b", " ", text)
    text = re.sub(r"\\[()\[\]]|(?<![\w)}])\*\*|\*\*(?![\w({\\])", "", text)
    text = re.sub(r"(?<!\$)\$([^$\n]+)\$", r"\1", text)  # but not the sign before an amount
    return text.strip()


def _value(match: re.Match[str]) -> Number | None:
    """The exact value; a power of ten stays one, so that 1e999999999 costs nothing."""
    if len(match.group()) > _MAX_NUMBER_CHARACTERS:
        return None
    groups = match.groupdict()
    sign = -1 if groups["sign"] == "-" else 1
    for whole, top, bottom in (("whole", "top", "bottom"), ("whole", "a", "b"), ("mixed", "over", "under")):
        over, under = groups[top] or groups["a"], groups[bottom] or groups["b"]
        if over and under:
            fraction = Fraction(int(over), int(under)) if int(under) else None
            return None if fraction is None else sign * (int(groups[whole] or 0) + fraction)
    digits = Decimal(groups["digits"].replace(",", ""))
    if groups["denominator"]:
        return sign * Fraction(digits) / int(groups["denominator"]) if int(groups["denominator"]) else None
    raised = groups["raised"] or groups["to"]
    if raised:
        base, exponent = Fraction(digits), int(raised)
        bits = max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent)
        return sign * base**exponent if bits <= _MAX_POWER_BITS and (base or exponent > 0) else None
    with localcontext(_EXACT):
        return sign * digits.scaleb(int(groups["exponent"] or groups["power"] or groups["short"] or 0))
