"""The package's own errors: bad input, told in one line that names what, where and the remedy."""

from __future__ import annotations

#: module that may be absent → the extra that brings it
EXTRA_OF = dict.fromkeys(("torch", "numpy", "pandas", "pyarrow", "tqdm"), "measure")
EXTRA_OF |= dict.fromkeys(
    ("matplotlib", "ipywidgets", "IPython", "nbformat", "nbclient", "nbconvert", "papermill", "jinja2"),
    "notebooks",
)
EXTRA_OF |= {"vllm": "vllm", "ray": "ray"}


class DecodebenchError(ValueError):
    """Base of every error this library raises on bad input: says what, where, and the remedy.

    Always one line that a person can read, whatever a value or another library's message brings.
    """

    def __init__(self, *told: object) -> None:
        super().__init__(*(one_line(text) if isinstance(text, str) else text for text in told))


def one_line(text: str, longest: int = 2000) -> str:
    """A text without line breaks, its middle left out where it is longer than ``longest`` characters."""
    text = " ".join(text.splitlines())
    return text if len(text) <= longest else f"{text[: longest - 400]} … {text[-390:]}"


class MissingExtra(DecodebenchError, ImportError):
    """Something was asked for whose packages are not installed: names the extra that brings them."""

    @classmethod
    def of(cls, error: ModuleNotFoundError, what: str) -> MissingExtra | None:
        """``error`` in words where one of our extras mends it, else None. ``what``: what was asked for."""
        module = (error.name or "").split(".")[0]
        extra = EXTRA_OF.get(module)
        if extra is None:
            return None
        return cls(f"{what} needs {module}, which is not installed: pip install 'decodebench[{extra}]'")
