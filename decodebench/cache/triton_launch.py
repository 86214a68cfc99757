"""One launch of a Triton kernel as a value: what a GPU runs is what is built and judged ahead.

Import this only where Triton is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import triton


@dataclass(frozen=True)
class Launch:
    """One kernel launch, all that decides its machine code included.

    ``arguments`` by name in the kernel's order; ``constants`` are compiled in; ``options`` are Triton's.
    """

    kernel: triton.JITFunction
    grid: tuple[int, ...]
    arguments: Mapping[str, object]
    constants: Mapping[str, Any]
    options: Mapping[str, int] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where its tensors lie, whichever device is the current one."""
        return next(x.device for x in self.arguments.values() if isinstance(x, torch.Tensor))

    def run(self) -> None:
        """Launch it on the device of its tensors."""
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            self.kernel[self.grid](*self.arguments.values(), **self.constants, **self.options)

    def warm(self) -> None:
        """Compile it, so that no clock sees the compiler. Nothing runs; nothing to do but on a GPU."""
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                self.kernel.warmup(*self.arguments.values(), grid=self.grid, **self.constants, **self.options)
