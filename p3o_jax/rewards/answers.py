r"""The final answer of a text: what a reader would take for it, and the number in it.

In this order: the last `\boxed{...}`, what follows the last `####` (GSM8K), what follows the last "answer is" or
"Answer:". It is always the last, since models correct themselves. All of it takes time linear in the text.
"""

from __future__ import annotations

import re
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from fractions import Fraction

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MARKED = re.compile(r"####|\banswer\s*(?:is|=|:)[ \t]*:?", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$|\*)")
_MAX_NUMBER_CHARACTERS = 200
_EXACT = Context(prec=2 * _MAX_NUMBER_CHARACTERS, Emax=MAX_EMAX, Emin=MIN_EMIN)
_NUMBER = re.compile(
    r"(?<![\w.])"  # not inside a word or another number
    r"(?P<sign>[-+\u2212]?)\s?[$€£]?\s?"
    r"(?P<digits>\d{1,3}(?:(?:,|\{,\}|\\,)\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    r"(?:[eE](?P<exponent>[-+]?\d{1,9})(?!\w)|\s?(?:\\times|×|\*)\s?10\s?(?:\^|\*\*)\s?\{?(?P<power>[-+]?\d{1,9})\}?)?"
    r"(?:\s?/\s?(?P<denominator>\d+)(?![\d.,]*\d))?"
)
_FRACTION = re.compile(r"(?P<sign>[-+\u2212]?)\s?\\[dt]?frac\s*\{\s*(?P<top>-?\d+)\s*\}\s*\{\s*(?P<bottom>\d+)\s*\}")


def final_answer(text: str) -> str | None:
    """The text of the final answer, stripped; None if the text does not mark one."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    marks = list(_MARKED.finditer(text))
    if not marks:
        return None
    rest = text[marks[-1].end() :].lstrip(" \t*_:")
    line = rest.lstrip("\n").split("\n", 1)[0]
    if marks[-1].group() != "####":
        end = _SENTENCE_END.search(line)
        line = line[: end.start()] if end else line
    return line.strip(" \t*_").removesuffix(".").strip() or None


def last_boxed(text: str) -> str | None:
    r"""What is in the last `\boxed{}` whose braces close; None if there is none."""
    closing: dict[int, int] = {}
    open_braces = []
    escaped = False
    for i, character in enumerate(text):
        if not escaped:
            if character == "{":
                open_braces.append(i)
            elif character == "}" and open_braces:
                closing[open_braces.pop()] = i
        escaped = character == "\\" and not escaped
    for match in reversed(list(_BOXED.finditer(text))):
        end = closing.get(match.end() - 1)
        if end is not None:
            return text[match.end() : end].strip()
    return None


def number_of(text: str, *, marked: bool) -> Fraction | Decimal | None:
    """The number of an answer, whatever its unit or thousands separators; None if it has none.

    Args:
        text: an answer or, if none is marked, the whole text.
        marked: a marked answer states the number first, or after its last `=`; in free text it is the last number.
    """
    if marked:
        text = text.rsplit("=", 1)[-1]
    plain = text.replace("\\!", "").replace("\\$", "$").replace("\\%", "%").replace("{,}", ",")
    found = _numbers(plain)
    return _value(found[0 if marked else -1]) if found else None


def plain_number(text: str) -> Fraction | Decimal | None:
    """The number that a text is and nothing else, a currency sign or a full stop apart; None if it is not one."""
    text = text.strip().strip("$").removesuffix(".").replace("\\$", "").replace("{,}", ",").strip()
    match = _FRACTION.fullmatch(text) or _NUMBER.fullmatch(text)
    return _value(match) if match else None


def canonical(value: Fraction | Decimal) -> str:
    """The same text for the same number: 1234.00 and 1234 vote together."""
    if isinstance(value, Fraction) or (value and abs(value.adjusted()) > 50):
        return str(value)
    return str(Fraction(value))


def _numbers(plain: str) -> list[re.Match[str]]:
    found = sorted([*_FRACTION.finditer(plain), *_NUMBER.finditer(plain)], key=lambda m: m.start())
    inside = {m.span() for m in found if m.re is _FRACTION}
    return [m for m in found if m.re is _FRACTION or not any(a <= m.start() < b for a, b in inside)]


def _value(match: re.Match[str]) -> Fraction | Decimal | None:
    """The exact value; a power of ten stays one, so that 1e999999999 costs nothing."""
    if len(match.group()) > _MAX_NUMBER_CHARACTERS:
        return None
    groups = match.groupdict()
    sign = -1 if groups["sign"] in ("-", "\u2212") else 1
    if match.re is _FRACTION:
        return sign * Fraction(int(groups["top"]), int(groups["bottom"])) if int(groups["bottom"]) else None
    digits = Decimal(groups["digits"].replace("{,}", "").replace("\\,", "").replace(",", ""))
    power = int(groups["exponent"] or groups["power"] or 0)
    if groups["denominator"]:
        return (
            sign * Fraction(digits) / int(groups["denominator"]) if int(groups["denominator"]) and not power else None
        )
    with localcontext(_EXACT):
        return sign * digits.scaleb(power)


def same_number(a: Fraction | Decimal, b: Fraction | Decimal, relative_tolerance: float = 0.0) -> bool:
    """|a - b| <= relative_tolerance |b|, exactly."""
    with localcontext(_EXACT):
        if isinstance(a, Decimal) and isinstance(b, Decimal):
            return abs(a - b) <= Decimal(relative_tolerance) * abs(b)
        if any(isinstance(x, Decimal) and x and abs(x.adjusted()) > _MAX_NUMBER_CHARACTERS for x in (a, b)):
            return False  # no fraction of this length is that large or small
        return abs(Fraction(a) - Fraction(b)) <= Fraction(relative_tolerance) * abs(Fraction(b))
