"""Files that travel with the package: model configs, notebooks, stored results."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def shipped(relative: str) -> Path:
    """Where ``data/…`` or ``notebooks/…`` lies: inside the installed package, else at the top of the checkout."""
    inside = PACKAGE / relative
    return inside if inside.exists() else PACKAGE.parent / relative
