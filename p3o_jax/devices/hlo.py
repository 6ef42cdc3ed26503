"""Reading a compiled program: which collectives a device runs, how often, and how many bytes they move."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPERATION = re.compile(r"^(?P<type>\(.*?\)|\S+) (?P<name>[\w\-]+)\((?P<operands>[^)]*)\)")
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|called_computation)=%?([\w.\-]+)")
_LOOP = re.compile(r" while\(.*?condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


class Collective(NamedTuple):
    """One collective of the program text, on one device."""

    kind: str
    size_bytes: int  # of its larger side: what is gathered, or what is reduced
    executions: int  # in one run of the program
    op_name: str  # where it comes from in the traced program


def collectives(text: str) -> list[Collective]:
    """The collectives of an optimised HLO module, in text order.

    A loop's body counts as often as its condition compares a counter with; a loop whose condition does not say,
    such as one that waits for the last row to end, counts once.
    """
    computations = _computations(text)
    executions = _executions(computations, _entry(text))
    return [
        collective
        for name, lines in computations.items()
        for collective in _of_computation(name, lines, executions.get(name, 0))
    ]


class Instruction(NamedTuple):
    """One instruction of the program text."""

    name: str  # of the operation
    size_bytes: int  # of its result
    op_name: str  # where it comes from in the traced program


def instructions_in_open_loops(text: str) -> list[Instruction]:
    """What runs at the turns of loops that end on a condition rather than a count, such as decoding; with what they
    call: fused computations, branches, inner loops."""
    computations = _computations(text)
    inside: set[str] = set()

    def visit(name: str) -> None:
        if name in inside or name not in computations:
            return
        inside.add(name)
        for line in computations[name]:
            for callee in _called(line):
                visit(callee)

    for lines in computations.values():
        for line in lines:
            if (loop := _LOOP.search(line)) and "known_trip_count" not in line:
                visit(loop[2])
    found = []
    for name in inside:
        for line in computations[name]:
            instruction = _INSTRUCTION.match(line)
            operation = _OPERATION.match(instruction[2]) if instruction else None
            if operation is not None:
                op_name = re.search(r'op_name="([^"]*)"', line)
                size = _num_bytes(operation["type"])
                found.append(Instruction(operation["name"], size, op_name[1] if op_name else ""))
    return found


def _called(line: str) -> list[str]:
    """The computations that an instruction calls."""
    called = _CALLED.findall(line)
    for branches in _BRANCHES.findall(line):
        called += [branch.strip().lstrip("%") for branch in branches.split(",")]
    return called


def _entry(text: str) -> str:
    return re.findall(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)[0]


def _computations(text: str) -> dict[str, list[str]]:
    computations: dict[str, list[str]] = {}
    name = None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name = header[1]
            computations[name] = []
        elif name is not None:
            computations[name].append(line)
    return computations


def _executions(computations: dict[str, list[str]], entry: str) -> dict[str, int]:
    """How often each computation runs."""
    total = dict.fromkeys(computations, 0)

    def visit(name: str, times: int) -> None:
        total[name] += times
        for line in computations[name]:
            loop = _LOOP.search(line)
            if loop:
                visit(loop[2], times * _trip_count(computations[loop[1]], line))
                continue
            for callee in _called(line):
                if callee in computations:
                    visit(callee, times)

    visit(entry, 1)
    return total


def _trip_count(condition: list[str], loop: str) -> int:
    """Of a loop that counts from 0 by 1."""
    if known := re.search(r"known_trip_count\D*(\d+)", loop):
        return int(known[1])
    comparison = next((line for line in condition if "direction=LT" in line), "")
    constants = {
        match[1]: int(match[2])
        for line in condition
        if (match := re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)", line))
    }
    bounds = [value for name, value in constants.items() if re.search(rf"%?{re.escape(name)}[,)]", comparison)]
    return bounds[0] if len(bounds) == 1 else 1


def _of_computation(name: str, lines: list[str], executions: int) -> Iterator[Collective]:
    sizes: dict[str, int] = {}
    for line in lines:
        instruction = _INSTRUCTION.match(line)
        operation = _OPERATION.match(instruction[2]) if instruction else None
        if instruction is None or operation is None:
            continue
        result = _num_bytes(operation["type"])
        sizes[instruction[1]] = result
        kind = operation["name"].removesuffix("-start")
        if kind not in KINDS or not executions:
            continue
        operands = sum(sizes.get(operand.strip().lstrip("%"), 0) for operand in operation["operands"].split(","))
        if operation["name"] != kind and kind != "all-reduce":
            result -= operands  # of an asynchronous start the result holds the operands too
        # TPU writes a reduce-scatter as a fusion of an all-reduce and a slice.
        kind = "reduce-scatter" if name.startswith("all-reduce-scatter") else kind
        op_name = re.search(r'op_name="([^"]*)"', line)
        yield Collective(kind, max(result, operands), executions, op_name[1] if op_name else "")


def _num_bytes(type_text: str) -> int:
    """Bytes of a type or of a tuple of types."""
    return sum(
        math.prod(map(int, filter(None, sizes.split(",")))) * _bits(dtype) // 8
        for dtype, sizes in _SHAPE.findall(type_text)
    )


def _bits(dtype: str) -> int:
    return 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
