"""Decode kernels behind one small interface: ``reference``, ``torch``, ``cpp``, ``triton``.

A backend is a module with two functions, documented in ``reference`` (the specification):
``attend(q, view, table, start, stop, ...)`` and ``state_step(kind, parts, rows, inputs)``.
"""
