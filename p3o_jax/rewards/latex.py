r"""Writes an answer as LaTeX that a parser takes: `sqrt(3)/2` as `\sqrt{3}/2`, `2^10` as `2^{10}`, `x≤3` as `x\le 3`.

Nothing is taken away but what sets a formula without meaning anything: spaces, sizes, delimiters, emphasis.
"""

from __future__ import annotations

import re

SIGNS = {
    "\u2212": "-", "–": "-", "—": "-", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ", "∗": "*",
    "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ", "∞": r"\infty ", "±": r"\pm ",
    "∓": r"\mp ", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∈": r"\in ",
    "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "°": r"^{\circ}",
    "²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}",
    "⅔": r"\frac{2}{3}", "’": "'", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "<=": r"\le ", ">=": r"\ge ",
    "!=": r"\ne ", r"\|": "|",
}  # fmt: skip
_SYNONYMS = {
    r"\leq": r"\le ", r"\leqslant": r"\le ", r"\geq": r"\ge ", r"\geqslant": r"\ge ", r"\neq": r"\ne ", r"\lt": "<",
    r"\gt": ">", r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\varnothing": r"\emptyset ",
    r"\lbrace": r"\{", r"\rbrace": r"\}", r"\langle": "(", r"\rangle": ")", r"\lbrack": "[", r"\rbrack": "]",
    r"\imath": "i", r"\infin": r"\infty ", r"\degree": r"^{\circ}", r"\bmod": r"\mod ", r"\ast": "*",
    r"\arcsec": r"\operatorname{arcsec}", r"\backslash": r"\setminus ", r"\lvert": "|", r"\rvert": "|", r"\vert": "|",
    r"\mid": "|", r"\lVert": "|", r"\rVert": "|", r"\colon": ":",
    r"\smallsetminus": r"\setminus ", r"\land": r"\text{ and }", r"\lor": r"\text{ or }",
}  # fmt: skip
_SETTING = (
    r"\\(?:[,;:!>]|(?:left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|scriptstyle|limits|nolimits|quad|qquad"
    r"|enspace|thinspace|hfill|noindent|boldsymbol)(?![a-zA-Z]))"
)
_FUNCTIONS = (
    "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|sec|csc|cot|log|ln|exp|sqrt|pi|theta|alpha|beta|infty|min|max|gcd"
)
_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])")
_REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\(?:overline|bar|dot)\s?\{?(\d+)\}?(?:(\d*)\\dot\s?\{?(\d)\}?)?")


def as_latex(text: str) -> str:
    r"""Returns the LaTeX of an answer, without delimiters of mathematics and with one space where there were more."""
    text = text.replace("\r", " ").replace("\n", " ").replace("\t", " ")
    text = re.sub(r"(?<!\\)\\[()\[\]]|(?<!\\)\$|(?<![\w)}])\*\*|\*\*(?![\w({\\])", " ", text).replace(r"\$", "$")
    text = re.sub(r"(?<=\d)(?:\{,\}|\\,|,\\!)(?=\d{3}(?!\d))", ",", text)
    for sign, latex in SIGNS.items():
        text = text.replace(sign, latex)
    text = re.sub(rf"(?<!\\){_SETTING}|(?<!\\)\\ |~", " ", text)
    text = re.sub(r"√\s?(\d+|[a-zA-Z])", r"\\sqrt{\1}", text).replace("√", r"\sqrt ")
    text = re.sub(r"\\log_\s?\{?\s?e\s?\}?", r"\\ln ", text)
    text = re.sub(r"\\mathbb\s?([A-Z])", r"\\mathbb{\1}", text)
    text = re.sub(r"\\[a-zA-Z]+", lambda match: _SYNONYMS.get(match.group(), match.group()), text)
    text = re.sub(r"\\(?:math(?:rm|it|sf|tt)|text(?:rm|it|sf|tt|normal|bf)|mbox|hbox)(?![a-zA-Z])", r"\\text", text)
    text = re.sub(r"\\text\s?\{\s?([eid])\s?\}", r"\1", text)
    text = re.sub(rf"\\(?:text|operatorname\*?)\s?\{{\s?({_FUNCTIONS})\s?\}}", r"\\\1 ", text)
    text = re.sub(rf"(?<![\\a-zA-Z{{])({_FUNCTIONS})(?![a-zA-Z])", r"\\\1 ", text)
    text = re.sub(r"(?<![\\a-zA-Z])(?:infinity|inf|oo)(?![a-zA-Z])", r"\\infty ", text)
    text = text.replace("**", "^").replace("*", r"\cdot ")
    text = _braced(_braced(text, r"\\sqrt\s*\("), r"\^\s*\(")
    text = re.sub(r"\^\s*(-?\d+(?:\.\d+)?)", r"^{\1}", text)
    text = re.sub(r"\\sqrt\s*(\d)(?!\])", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<=[\w}])_\s?(\w)", r"_{\1}", text)
    text = re.sub(r"\^\s?\{?\s?(\\text\s?\{\s?(?:st|nd|rd|th)\s?\})\s?\}?", r"\1", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*(\w)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\w)\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"\s+", " ", text).strip()
    return re.sub(r"[.;,:\s]+$", "", text)


def exact_decimals(latex: str) -> str:
    r"""Returns the same with every decimal as a fraction: 0.25 as \frac{25}{100}, 0.1\overline{6} as \frac{15}{90}.

    Raises:
        ValueError: something such as 1.2.3.
    """

    def repeating(match: re.Match[str]) -> str:
        whole, before, repeated, middle, last = (part or "" for part in match.groups())
        repeated += middle + last
        nines = (10 ** len(repeated) - 1) * 10 ** len(before)
        top = int((whole or "0") + before + repeated) - int((whole or "0") + before)
        return rf"(\frac{{{top}}}{{{nines}}})"

    latex = _REPEATING.sub(repeating, latex)
    latex = re.sub(r"\d{1,3}(?:,\d{3})+(?!\d)", lambda match: match.group().replace(",", ""), latex)
    latex = _DECIMAL.sub(lambda m: rf"(\frac{{{int(m[1] + m[2])}}}{{{10 ** len(m[2])}}})", latex)
    if re.search(r"\.\d", latex):
        raise ValueError("a number with two points")
    return latex


def _braced(text: str, opening: str) -> str:
    """With braces for the parentheses that begin with a pattern."""
    while match := re.search(opening, text):
        depth, end = 1, match.end()
        while end < len(text) and depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        if depth:  # they do not close
            return text
        text = f"{text[: match.end() - 1].rstrip()}{{{text[match.end() : end - 1]}}}{text[end:]}"
    return text


def split(latex: str, separator: str) -> list[str]:
    """Splits at a pattern wherever it stands outside of all brackets and environments.

    Brackets need not be of one kind to belong together: (1, 2] is an interval.
    """
    parts, depth, start, position = [], 0, 0, 0
    pattern, token = (
        re.compile(separator),
        re.compile(r"\\begin(?![a-zA-Z])|\\end(?![a-zA-Z])|\\[{}]|\\[a-zA-Z]+|.", re.S),
    )
    while position < len(latex):
        match = pattern.match(latex, position) if not depth else None
        if match and match.end() > position:
            parts.append(latex[start:position].strip())
            start = position = match.end()
            continue
        found = token.match(latex, position)
        assert found is not None
        depth += {"{": 1, "(": 1, "[": 1, r"\{": 1, r"\begin": 1}.get(found.group(), 0)
        depth -= {"}": 1, ")": 1, "]": 1, r"\}": 1, r"\end": 1}.get(found.group(), 0)
        if depth < 0:
            raise ValueError("a bracket closes that was not opened")
        position = found.end()
    if depth:
        raise ValueError("a bracket does not close")
    return [*parts, latex[start:].strip()]
