"""Command lines: `p3o` (`main`) with one module a verb, and that of experiments (`experiment`).

The first line of a verb's module says what it does, and its `run(arguments)` does it. Modules import what is heavy
inside `run`, so that `p3o --help` is quick.
"""
