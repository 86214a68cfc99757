"""The implementations of a decode step: what each offers, and which one runs on a device."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, cast

import torch

from decodebench.layout.reads import DecodeError

#: name → the file that implements it; Triton's is loaded where Triton is there
BACKENDS = {
    "reference": "decodebench.measure.kernels.reference",
    "torch": "decodebench.measure.kernels.torch_ops",
    "cpp": "decodebench.measure.kernels.cpp",
    "triton": "decodebench.measure.kernels.triton_ops",
}
#: kind of device → the backend that is fastest there, and the one for where that cannot run
DEFAULTS = {"cuda": ("triton", "torch"), "cpu": ("cpp", "torch")}


class Backend(Protocol):
    """What a file in ``kernels/`` offers; shapes and meaning as in ``kernels/reference.py``.

    ``can_attend`` and ``can_update`` say why a layer has to run in torch instead, None where it need not.
    """

    NAME: str

    def why_not(self, device: torch.device) -> str | None:
        """Why it cannot run on this device at all; None where it can."""

    def can_attend(
        self, q: torch.Tensor, view: torch.Tensor, head_size_v: int, v_offset: int
    ) -> str | None: ...

    def can_update(self, kind: str, parts: dict[str, torch.Tensor]) -> str | None: ...

    def prepare(
        self, view: torch.Tensor, table: torch.Tensor, start: torch.Tensor, stop: torch.Tensor
    ) -> object:
        """What ``attend`` takes as ``plan``: made once, outside the clock."""

    def attend(
        self,
        q: torch.Tensor,
        view: torch.Tensor,
        table: torch.Tensor,
        start: torch.Tensor,
        stop: torch.Tensor,
        *,
        scale: float,
        head_size_v: int,
        v_offset: int,
        plan: Any = None,
    ) -> torch.Tensor: ...

    def write_kv(
        self, view: torch.Tensor, blocks: torch.Tensor, entries: torch.Tensor, new: torch.Tensor
    ) -> None: ...

    def state_step(
        self, kind: str, parts: dict[str, torch.Tensor], rows: torch.Tensor, inputs: dict[str, torch.Tensor]
    ) -> torch.Tensor: ...


def resolve_backend(name: str | None, device: str | torch.device) -> tuple[Backend, str | None]:
    """The backend, and a note where the default had to be another than the fastest.

    None chooses by ``DEFAULTS``. A backend asked for by name that cannot run
    raises ``DecodeError`` with the reason.
    """
    device = torch.device(device)
    if name is None:
        fast, plain = DEFAULTS["cuda" if device.type == "cuda" else "cpu"]
        try:
            return resolve_backend(fast, device)
        except DecodeError as error:
            return _load(plain), f"backend {plain} instead of {fast}: {error}"
    if name not in BACKENDS:
        raise DecodeError(f"backend {name!r}: known are {', '.join(BACKENDS)}")
    if name == "triton" and find_spec("triton") is None:
        raise DecodeError("backend 'triton': Triton is not installed; pip install 'triton>=3.7'")
    backend = _load(name)
    reason = backend.why_not(device)
    if reason:
        raise DecodeError(f"backend {name!r}: {reason}")
    return backend, None


def _load(name: str) -> Backend:
    return cast(Backend, import_module(BACKENDS[name]))
