"""The package's own error: bad input, told in one line that names what, where and the remedy."""

from __future__ import annotations


class DecodebenchError(ValueError):
    """Base of every error this library raises on bad input: says what, where, and the remedy."""
