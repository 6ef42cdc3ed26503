r"""Finds the final answer of a text: the one that a reader would take for it.

Reasoning blocks are no part of it. Of the rest, in this order: the last `\boxed{...}`, the last `<answer>...</answer>`,
what follows the last `####` (GSM8K), or the last "answer is" or "Answer:". It is always the last, since models correct
themselves. Lines end at `\n` and nowhere else. All of it takes time linear in the text.
"""

from __future__ import annotations

import re

Marks = tuple[tuple[str, str], ...]
"""Pairs of what begins and what ends a block of reasoning."""

REASONING: Marks = (("<think>", "</think>"),)

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_TAGGED = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL | re.IGNORECASE)
_MARKED = re.compile(r"####|\banswer\s*(?:is|=|:)[ \t]*:?", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|[.!?](?=\s|$|\*)")
_JOINT = re.compile(r"[\s$]*(?:,|;|,?\s*\b(?:and|or)\b)[\s$]*")


def without_reasoning(text: str, marks: Marks = REASONING, prompt_end: str = "") -> str:
    """Returns what stands outside of reasoning blocks.

    A block that never ends takes the rest of the text with it. An end without a beginning ends a block that the prompt
    began: what is before it is reasoning.

    Args:
        text: a response.
        marks: what begins and ends a block.
        prompt_end: the last characters of the prompt that the model saw, where they are known.
    """
    for begin, end in marks:
        if opened(prompt_end, begin) and not text.lstrip().startswith(begin):
            text = begin + text
        outside, position = [], 0
        while (start := text.find(begin, position)) >= 0:
            outside.append(text[position:start])
            stop = text.find(end, start + len(begin))
            if stop < 0:
                position = len(text)
                break
            position = stop + len(end)
        outside.append(text[position:])
        text = "".join(outside).rpartition(end)[2]
    return text


def opened(prompt_end: str, begin: str) -> bool:
    """Whether a prompt ends with what begins a block, so that the response goes on within it."""
    return prompt_end.rstrip().endswith(begin)


def final_answer(text: str) -> str | None:
    r"""Returns the text of the final answer, stripped; None if the text does not mark one.

    Boxes with nothing between them but a comma or "and" or "or" are one answer: `\boxed{1} or \boxed{2}` is "1, 2".
    """
    boxes = _boxes(text)
    if boxes:
        first = len(boxes) - 1
        while first and _JOINT.fullmatch(text, boxes[first - 1][2], boxes[first][0]):
            first -= 1
        return ", ".join(text[start:end].strip() for _, start, _, end in boxes[first:])
    tagged = _TAGGED.findall(text)
    if tagged:
        text = tagged[-1]
    marks = list(_MARKED.finditer(text))
    if not marks:
        return text.strip() or None if tagged else None
    rest = text[marks[-1].end() :].lstrip(" \t*_:")
    line = rest.lstrip("\n").split("\n", 1)[0]
    if marks[-1].group() != "####":
        end = _SENTENCE_END.search(line)
        line = line[: end.start()] if end else line
    return line.strip(" \t\r*_").removesuffix(".").strip() or None


def before_open_box(text: str) -> str:
    """Returns what precedes a box that does not close, as where a response was cut in it."""
    return _BOXED.split(text, 1)[0]


def last_boxed(text: str) -> str | None:
    r"""Returns what is in the last `\boxed{}` whose braces close; None if there is none."""
    boxes = _boxes(text)
    return text[boxes[-1][1] : boxes[-1][3]].strip() if boxes else None


def last_lines(text: str, count: int) -> str:
    """Returns the last lines of a text that is stripped first."""
    return "\n".join(text.strip().split("\n")[-count:])


def _boxes(text: str) -> list[tuple[int, int, int, int]]:
    """Of every innermost box whose braces close: its start, its content's, its end, its content's."""
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
    boxes: list[tuple[int, int, int, int]] = []
    for match in _BOXED.finditer(text):
        end = closing.get(match.end() - 1)
        if end is not None:
            if boxes and match.start() < boxes[-1][3]:
                boxes.pop()
            boxes.append((match.start(), match.end(), end + 1, end))
    return boxes
