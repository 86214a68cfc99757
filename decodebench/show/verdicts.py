"""What the numbers of a notebook say, in one line for a reader in a hurry. Every function takes a table."""

from __future__ import annotations

from decodebench.words import bytes_text, share_text


def block_ratio(table) -> str:
    """What one global block size misses at the largest ratio of block sizes, and what the grouped connector
    does.
    """
    good, bad = table[table["fault"].isna()], table[table["fault"].notna()]
    worst = bad.loc[bad["worst_group_coverage"].astype(float).idxmin()]
    return (
        f"Dividing by each group's own block size fills {share_text(float(good['coverage'].min()))} of what "
        f"decode reads; one size "
        f"for all groups leaves a group at {share_text(float(worst['worst_group_coverage']))} where sizes "
        f"differ by "
        f"{worst['block_size_ratio']:.3g}x."
    )


def groupings(table, own: str = "hybrid") -> str:
    """How far the best other grouping is from vLLM's own, by model."""
    said = []
    for model, rows in table[table["status"] == "ok"].groupby("model", sort=False):
        fits = rows.set_index("grouping")["concurrency"].astype(float)
        if own not in fits:
            continue
        best, worst = fits.idxmax(), fits.idxmin()
        gain = fits[best] / fits[own] - 1
        best_text = f"{best} fits {gain:.0%} more" if gain > 0.005 else "no other fits more"
        worst_text = (
            f", {worst} {1 - fits[worst] / fits[own]:.0%} fewer" if fits[worst] < 0.995 * fits[own] else ""
        )
        said.append(f"{model}: {best_text}{worst_text}")
    return f"Against vLLM's {own} grouping, " + "; ".join(said) + "."


def capacity(table) -> str:
    """The dearest start and the dearest token among the models of a sweep."""
    rows = table[table["status"] == "ok"].drop_duplicates("model", keep="last")
    start = rows.loc[rows["intercept_bytes"].astype(float).idxmax()]
    token = rows.loc[rows["slope_bytes"].astype(float).idxmax()]
    return (
        f"A request costs most to start on {start['model']} ({bytes_text(float(start['intercept_bytes']))} "
        f"whatever its length) "
        f"and most for each token on {token['model']} ({bytes_text(float(token['slope_bytes']))})."
    )


def model(layout, context: int, with_fault: float) -> str:
    """A model's layout and what a group-0 fill would miss, in one line."""
    length = min(context, layout.max_model_len)
    fits = layout.capacity(length)
    groups = len(layout.groups)
    missed = "a fill by group 0's table "
    if groups == 1:
        missed += "misses nothing, there is one group"
    else:
        missed += (
            f"covers {share_text(with_fault)} of what decode reads, one by each group's own table all of it"
        )
    return (
        f"{layout.model.name}: {groups} group{'s' if groups > 1 else ''}, {fits.concurrency:,.1f} requests "
        f"of {length:,} tokens in "
        f"{bytes_text(layout.budget)}; {missed}."
    )


def fill(costs) -> str:
    """Ours next to memset and to the naive loop, from the slowest to the fastest case."""
    said = []
    for values, rows in costs.groupby("values", sort=False):
        share, times = rows["of_memset"].astype(float), rows["vs_naive"].astype(float).dropna()
        low, high = share_text(float(share.min())), f"{float(share.max()):.0%}"
        text = f"{values} values at {low} to {high} of memset's speed"
        said.append(
            text + (f", {times.min():.1f} to {times.max():.0f} times the naive loop" if len(times) else "")
        )
    return f"Filling {'; '.join(said)}."


def latency(table, device: str) -> str:
    """How much the block size matters, and how near the limit a step comes, by model."""
    said, busy = [], False
    for name, rows in table[table["status"] == "ok"].groupby("model", sort=False):
        times, share = rows["median_s"].astype(float), rows["limit_share"].astype(float)
        busy |= bool(share.max() > 1.1)
        spread = f"{times.max() / times.min():.1f}x from best to worst block size"
        said.append(f"{name} {spread}, at most {share.max():.0%} of the limit")
    text = f"On this {device}: {'; '.join(said)}."
    if busy:
        text += (
            " The memory was slower while its limit was measured than during the steps: other work ran too."
        )
    return text


def engine(table) -> str:
    """Coverage of each connector over all stored engines."""
    said = []
    for connector, rows in table.groupby("connector", sort=False):
        share = (rows["filled"].sum() + rows["zeroed"].sum()) / rows["required"].sum()
        said.append(f"{connector} {share_text(float(share))}")
    models = table["model"].nunique()
    return (
        f"Pages of the first decode step filled as asked, over {models} models in a running vLLM: "
        f"{', '.join(said)}."
    )


def published(table, errors) -> str:
    """How far published figures stand above their floors, and how well they are estimated."""
    used = table[table["left_out"] == ""]
    times = used["times"]
    below = int((table["times"] < 1).sum())
    worst = errors.sort_values("median_error_share").iloc[-1]
    half, most = worst["median_error_share"], worst["p90_error_share"]
    return (
        f"A typical published figure takes {times.median():.1f} times its floor, one in a hundred less than "
        f"{times.quantile(0.01):.1f}; {below} of {len(table):,} are below it, and impossible as recorded. With "
        f"{worst['held out']} held out, half of the estimates are within {half:.0%}, nine in ten within {most:.0%}."
    )
