"""The verbs of `p3o`: one module a verb, whose first line says what it does and whose `run(arguments)` does it.

Modules import what is heavy inside `run`, so that `p3o --help` is quick.
"""
