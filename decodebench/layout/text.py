"""A layout as text and as HTML: summary, table of groups, vLLM's log lines, the waste; groupings side by side."""

from __future__ import annotations

import html
from collections.abc import Iterable

from decodebench.layout.capacity import capacity, ceilings, log_lines, waste
from decodebench.layout.grouping import KVCacheGroupSpec
from decodebench.layout.records import Placed
from decodebench.words import columns

COLUMNS = ("group", "kind", "layers", "block", "page", "padding", "blocks/request", "first layer")


def rows(layout: Placed) -> list[tuple[str, ...]]:
    """A row a group, by ``COLUMNS``."""
    blocks = capacity(layout).blocks_per_request
    return [
        (
            str(g),
            group.kv_cache_spec.label,
            str(len(group.layer_names)),
            f"{layout.tokens_per_block(g):,}",
            pages(group),
            padding(group),
            f"{blocks[g]:,}",
            group.layer_names[0],
        )
        for g, group in enumerate(layout.groups)
    ]


def pages(group: KVCacheGroupSpec) -> str:
    """Page sizes of a group in bytes, the first three where they are mixed."""
    sizes = list(dict.fromkeys(spec.page_size_bytes for spec in group.layer_specs))
    return " + ".join(f"{size:,}" for size in sizes[:3]) + (" …" if len(sizes) > 3 else "")


def padding(group: KVCacheGroupSpec) -> str:
    """What padding adds to a group's pages, as a share of their content."""
    content = sum(spec.unpadded_page_size_bytes for spec in group.layer_specs)
    return f"{group.bytes_per_block / content - 1:.2%}" if group.bytes_per_block > content else "–"


def layout(layout: Placed) -> str:
    """Summary, table of groups, vLLM's log lines and the waste."""
    lines = [summary(layout), "", *columns([COLUMNS, *rows(layout)], left=(1, 7))]
    c, w = capacity(layout), waste(layout)
    lines += ["", *notes(layout), *log_lines(layout)]
    lines.append(
        f"KV cache only, without weights: a request of one token costs {c.start_bytes:,} bytes, one of "
        f"{c.length:,} tokens {c.request_bytes:,}, and there {c.slope_bytes:,.0f} for each further token"
    )
    bounds = ceilings(layout)
    lines.append(
        f"token labels: {c.tokens:,} (vLLM since 0.20.1), {c.tokens_old:,} (before), "
        f"{bounds.tokens_blocks:,} (blocks × block size: NIM, cache_config_info)"
    )
    lines.append(str(bounds))
    lines.append(f"full memory: {w}")
    return "\n".join(lines)


def notes(layout: Placed) -> list[str]:
    """What the figures rest on, and what an engine would stumble over only when it starts its kernels."""
    r, o = layout.resolved, layout.options
    found = [f"note: {layout.model.reading}"] if layout.model and layout.model.reading else []
    if r is not None and o is not None:
        found.append(
            f"kernels and defaults of {r.device}; {o.max_num_batched_tokens:,} batched tokens, "
            f"{o.max_in_flight_tokens:,} in flight"
        )
    if r is None or r.block_size % r.kernel_block_size == 0:
        return found
    found.append(
        f"note: attention kernels work on {r.kernel_block_size} tokens at once; a block of {r.block_size} "
        "is no multiple of that, and an engine may refuse it when it starts"
    )
    return found


def summary(layout: Placed) -> str:
    """One line: model, blocks, bytes a block."""
    name = layout.model.name if layout.model else "layout by hand"
    generic = " (read generically)" if layout.model and layout.model.generic else ""
    blocks = " + ".join(f"{n:,}" for n in layout.pool_num_blocks)
    size = " + ".join(f"{layout.bytes_per_block(p):,}" for p in range(len(layout.pool_num_blocks)))
    return (
        f"{name}{generic}: {blocks} blocks of {size} bytes in {layout.budget / 2**30:.2f} GiB, "
        f"{layout.memory_order}, grouping {layout.grouping}, length {layout.max_model_len:,}"
    )


def html_table(layout: Placed) -> str:
    """The layout as notebooks show it."""

    def row(cells: Iterable[str], tag: str) -> str:
        inner = "".join(
            f'<{tag} style="text-align:{"left" if i in (1, 7) else "right"}">{html.escape(cell)}</{tag}>'
            for i, cell in enumerate(cells)
        )
        return f"<tr>{inner}</tr>"

    said = [*notes(layout), *log_lines(layout), str(ceilings(layout)), f"full memory: {waste(layout)}"]
    below = "<br>".join(html.escape(line) for line in said)
    body = "".join(row(cells, "td") for cells in rows(layout))
    return (
        f"<p><b>{html.escape(summary(layout))}</b></p><table><thead>{row(COLUMNS, 'th')}</thead>"
        f"<tbody>{body}</tbody></table><p>{below}</p>"
    )


COMPARISON = {
    "strategy": "strategy",
    "groups": "groups",
    "num_blocks": "blocks",
    "bytes_per_block": "bytes/block",
    "blocks_per_request": "blocks/request",
    "concurrency": "requests",
    "tokens": "tokens",
    "start_bytes": "bytes/1-token request",
    "request_bytes": "bytes/request",
    "slope_bytes": "bytes/token",
    "waste_padding_layers": "padding layers",
    "waste_padded_pages": "padded pages",
    "waste_unread": "unread",
    "waste_last_block": "last block",
    "waste_reserve": "in flight",
}


def comparison(name: str, budget: int, compared: list[dict]) -> str:
    """Strategies side by side, and below them why some are refused."""
    table = [list(COMPARISON.values())]
    for row in compared:
        if row["status"] == "ok":
            table.append([_cell(column, row[column]) for column in COMPARISON])
    length = next((row["length"] for row in compared if row["status"] == "ok"), 0)
    lines = [f"{name} in {budget / 2**30:.2f} GiB, requests of {length:,} tokens", "", *columns(table)]
    reading = next((row["reading"] for row in compared if row.get("reading")), None)
    lines += [f"note: {reading}"] if reading else []
    refused = [row for row in compared if row["status"] != "ok"]
    return "\n".join(
        lines + [""] * bool(refused) + [f"{row['strategy']}: refused: {row['reason']}" for row in refused]
    )


def _cell(column: str, value) -> str:
    if column.startswith("waste_"):
        return f"{value:.2%}"
    return (
        value if isinstance(value, str) else f"{value:,.2f}" if column == "concurrency" else f"{value:,.0f}"
    )
