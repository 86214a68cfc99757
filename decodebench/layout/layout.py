"""A layout as people hold it: groups, blocks and places, with what fits, what is wasted, and how it is shown."""

from __future__ import annotations

from decodebench.layout import capacity as sizes
from decodebench.layout import dump, text
from decodebench.layout.records import Placed
from decodebench.words import bytes_text, counted, short


class Layout(Placed):
    """Groups, number of blocks, and where each layer's pages lie; vLLM's ``Layout``."""

    def capacity(self, length: int | None = None) -> sizes.Capacity:
        """What fits for requests of ``length`` tokens (default: the maximum length)."""
        return sizes.capacity(self, length)

    def waste(self, length: int | None = None) -> sizes.Waste:
        """Bytes by cause when the memory is full of requests of ``length`` tokens."""
        return sizes.waste(self, length)

    def log_lines(self) -> list[str]:
        """What vLLM's log says about such a layout."""
        return sizes.log_lines(self)

    def to_dict(self) -> dict:
        """This layout as one case of an engine's dump."""
        return dump.case({self.budget: self}, self)

    def __repr__(self) -> str:
        return (
            f"Layout of {short(self.model.name) if self.model else 'layers by hand'}: "
            f"{counted(len(self.groups), 'group')}, {counted(len(self.layer_names), 'layer')}, "
            f"{sum(self.pool_num_blocks):,} blocks in {bytes_text(self.budget or self.size)}, "
            f"grouping {self.grouping}, requests of at most {counted(self.max_model_len, 'token')}"
        )

    def __str__(self) -> str:
        return text.layout(self)

    def _repr_html_(self) -> str:
        return text.html_table(self)
