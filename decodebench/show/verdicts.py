"""What the numbers of a notebook say, in one line for a reader in a hurry.

Every function takes the rows that are shown and returns the sentence with its colour: True where all is as
it should be, False where it is not, None for an answer that is neither. A sentence claims nothing that
its rows can contradict; cases that were refused are counted in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from decodebench.coverage.trial import Trial
from decodebench.forecast.weights import weights_text
from decodebench.layout.layout import Layout
from decodebench.words import bytes_text, counted, plain_number, share_text, short, some

if TYPE_CHECKING:
    import pandas as pd

Answer = tuple[str, bool | None]


def measured(table: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The rows that were measured, and a clause that counts the others with the first reason."""
    good = table[table["status"] == "ok"]
    bad = table[table["status"] != "ok"]
    if bad.empty:
        return good, ""
    reason = bad["reason"].iloc[0]
    reason = reason if len(reason) <= 140 else f"{reason[:137]}…"
    first = f"{short(bad['model'].iloc[0])}" + (
        f" {bad['grouping'].iloc[0]}" if bad["grouping"].nunique() + good["grouping"].nunique() > 2 else ""
    )
    return good, f" Not measured: {len(bad)} of {counted(len(table), 'case')}, such as {first}: {reason}."


def _ended(text: str) -> str:
    return text if text.endswith((".", "…")) else f"{text}."


# -- 01, 02, 09: fills and audits --------------------------------------------------------------------


def story(before: Trial, after: Trial, faults: pd.DataFrame) -> Answer:
    """What a fill by group 0's ids leaves decode to read, and how many faults of the gallery are caught."""
    groups = len(after.audit.layout.groups)
    caught = int(faults["caught"].sum())
    told = f"{caught} of {len(faults)} historic faults are caught."
    ok = bool(after.audit.ok and caught == len(faults))
    full, part = share_text(after.audit.coverage), share_text(before.audit.coverage)
    if groups == 1:
        return (
            f"This model has one group, so group 0's blocks are everybody's: {part} of what decode reads was "
            f"filled with the fault, {full} without it. {told}"
        ), ok
    return (
        f"At group 0's blocks for all layers, {part} of what decode reads was filled; group by group, {full}. "
        f"{told}"
    ), ok


def difference(before: Trial, after: Trial) -> str:
    """A title for the two side by side: whether the fault changed what decode reads."""
    if before.audit.coverage < after.audit.coverage:
        return "With one map for all groups, decode reads memory that was not filled for it"
    if len(after.audit.layout.groups) == 1:
        return "With one map for all groups, nothing changes here: this model has one group"
    return "With one map for all groups, this batch is covered all the same"


def model(layout: Layout, context: int, with_fault: float, without: float) -> Answer:
    """A model's layout, and what a fill by group 0's table and one by each group's own table cover."""
    assert layout.model is not None, "planned from a config"
    length = min(context, layout.max_model_len)
    fits = layout.capacity(length)
    groups = len(layout.groups)
    if groups == 1:
        filled = f"one group, so group 0's table is the right one: it covers {share_text(with_fault)}"
    else:
        filled = (
            f"of what decode reads, a fill by group 0's table covers {share_text(with_fault)}, one by each "
            f"group's own table {share_text(without)}"
        )
    return (
        f"{short(layout.model.name)}: {counted(groups, 'group')}, {fits.concurrency:,.1f} requests of "
        f"{counted(length, 'token')} in {bytes_text(layout.budget)} of KV cache, beside weights of "
        f"{weights_text(layout.model)}; {filled}."
        + (f" Note: {layout.model.reading}." if layout.model.reading else "")
    ), without == 1


# -- 03: block sizes ---------------------------------------------------------------------------------


def block_ratio(table: pd.DataFrame) -> Answer:
    """What one global block size misses where block sizes differ, and what the grouped connector does."""
    rows, left_out = measured(table)
    good, bad = rows[rows["fault"].isna()], rows[rows["fault"].notna()]
    if good.empty:
        return f"No case could be measured.{left_out}", None
    lowest = float(good["coverage"].min())
    text = f"Dividing by each group's own block size fills {share_text(lowest)} of what decode reads; "
    differ = bad[bad["block_size_ratio"] > 1]
    if bad.empty:
        text += "one size for all groups was not measured."
    elif differ.empty:
        text += (
            f"block sizes are equal in every case measured, so one size for all groups is the right "
            f"one: the worst group is at {share_text(float(bad['worst_group_coverage'].min()))}."
        )
    else:
        worst = differ.loc[differ["worst_group_coverage"].astype(float).idxmin()]
        share, ratio = float(worst["worst_group_coverage"]), plain_number(worst["block_size_ratio"])
        verb = "leaves a group at" if share < 1 else "still fills every group, at least"
        text += f"one size for all groups {verb} {share_text(share)} where sizes differ by {ratio}x."
    return _ended(text) + left_out, lowest == 1


# -- 04: groupings -----------------------------------------------------------------------------------


def groupings(table: pd.DataFrame, own: str = "hybrid") -> Answer:
    """How far the other groupings are from vLLM's own, by model and length, and what was refused."""
    said = []
    for (name, length), asked in table.groupby(["model", "context"], sort=False):
        rows = asked[asked["status"] == "ok"]
        where = (
            f"{short(name)} at {length} tokens"
            if "x" in str(length)
            else f"{short(name)} at {int(length):,} tokens"
        )
        fits = rows.drop_duplicates("grouping").set_index("grouping")["concurrency"].astype(float)
        refused = [g for g in asked["grouping"] if g not in fits.index]
        if own not in fits:
            lost = "was refused" if own in set(asked["grouping"]) else "was not asked for"
            said.append(f"{where}: {own} {lost}, so nothing to compare with")
            continue
        others = fits.drop(own)
        if others.empty:
            text = f"{own} alone, {fits[own]:,.2f} requests"
        else:
            change = others / fits[own] - 1
            best, worst = change.idxmax(), change.idxmin()
            text = f"{best} fits {_percent(change[best])}" if change[best] > 0.0005 else "no other fits more"
            text += f", {worst} {_percent(change[worst])}" if change[worst] < -0.0005 else ""
        said.append(f"{where}: {text}" + (f" (refused: {some(dict.fromkeys(refused))})" if refused else ""))
    if not said:
        return "No grouping was asked for.", None
    return f"Requests that fit, against vLLM's {own} grouping. {'; '.join(said)}.", None


def _percent(change: float) -> str:
    """A change as people say it: ``8 % more``, ``less than 1 % fewer``."""
    size = abs(change)
    number = "less than 1 %" if size < 0.01 else f"{100 * size:.0f} %"
    return f"{number} {'more' if change > 0 else 'fewer'}"


def order(table: pd.DataFrame) -> str:
    """A title: whether short requests rank the groupings as long ones do."""
    rows = table[table["status"] == "ok"]
    lengths = sorted(rows["longest_context"].dropna().unique())
    if len(lengths) < 2:
        return "Requests that fit, by grouping"
    changed = []
    for name, part in rows.groupby("model", sort=False):
        ranks = []
        for length in (lengths[0], lengths[-1]):
            fits = part[part["longest_context"] == length].set_index("grouping")["concurrency"].astype(float)
            ranks.append(fits.round(2))
        both = ranks[0].index.intersection(ranks[1].index)
        if list(ranks[0][both].rank(method="min")) != list(ranks[1][both].rank(method="min")):
            changed.append(str(name))
    if changed:
        return f"Short requests rank the groupings otherwise on {some(changed)}"
    return "Short requests rank the groupings as long ones do"


# -- 05: what fits -----------------------------------------------------------------------------------


def capacity(table: pd.DataFrame) -> Answer:
    """What a request costs to start and what a further token costs, from the dearest to the cheapest model."""
    rows, left_out = measured(table)
    if rows.empty:
        return f"No case could be measured.{left_out}", None
    longest = rows.loc[rows.groupby("model", sort=False)["longest_context"].idxmax()]
    lengths = sorted({int(v) for v in longest["longest_context"]})
    at = " or ".join(f"{length:,}" for length in lengths)
    start, slope = longest["start_bytes"].astype(float), longest["slope_bytes"].astype(float)
    if len(longest) == 1:
        row = longest.iloc[0]
        return (
            f"KV cache of {short(row['model'])}: a request of one token reserves "
            f"{bytes_text(float(row['start_bytes']))}, one of {at} tokens "
            f"{bytes_text(float(row['request_bytes']))}, and there a further token "
            f"{bytes_text(float(row['slope_bytes']))}; its weights lie beside it: {_weights(longest)}.{left_out}"
        ), None

    def ends(values: pd.Series) -> str:
        dear, cheap = longest.loc[values.idxmax()], longest.loc[values.idxmin()]
        high, low = bytes_text(float(values.max())), bytes_text(float(values.min()))
        if values.max() == values.min():
            return f"the same on all models ({high})"
        return f"most on {short(dear['model'])} ({high}) and least on {short(cheap['model'])} ({low})"

    return (
        f"KV cache only: a request of one token reserves {ends(start)}; at {at} tokens a further token costs "
        f"{ends(slope)}. Weights lie beside it: {_weights(longest)}.{left_out}"
    ), None


def _weights(rows: pd.DataFrame) -> str:
    """What weights take, from the smallest model of the rows to the largest."""
    known = rows.dropna(subset=["weight_bytes"])
    if known.empty:
        return "how many is not known"
    small, large = known.loc[known["weight_bytes"].idxmin()], known.loc[known["weight_bytes"].idxmax()]
    text = bytes_text(float(small["weight_bytes"]))
    if len(known) == 1:
        return text
    return f"{text} ({short(small['model'])}) to {bytes_text(float(large['weight_bytes']))} ({short(large['model'])})"


def gain(table: pd.DataFrame, small: str) -> str:
    """A title: what another cache type gives over the model's own, from the least to the most."""
    rows = table[table["status"] == "ok"]
    wide = rows.pivot_table(
        index=["model", "longest_context"], columns="kv_cache_dtype", values="concurrency"
    )
    if not {small, "auto"} <= set(wide):
        return f"What {small} gives was not measured"
    ratio = (wide[small] / wide["auto"]).dropna().astype(float)
    low, high = ratio.min(), ratio.max()
    if ratio.empty or max(abs(high - 1), abs(low - 1)) < 0.005:
        return f"With {small} keys and values as many requests fit as without"
    if high - low < 0.01:
        return f"With {small} keys and values {high:.2f} times as many requests fit"
    return f"With {small} keys and values {low:.2f} to {high:.2f} times as many requests fit"


def growth(table: pd.DataFrame) -> str:
    """A title: from which to which block size the types of cache and state lead."""
    sizes = table.loc[table["status"] == "ok", "block_in_use"].dropna().astype(int)
    if sizes.empty:
        return "No combination of types could be planned"
    if sizes.min() == sizes.max():
        return f"Blocks cover {sizes.min():,} tokens whatever the types"
    return f"Blocks cover {sizes.min():,} to {sizes.max():,} tokens, by the types of cache and state"


def short_prompt(table: pd.DataFrame, tokens: int) -> str:
    """A caption: what a short prompt holds, in words that its rows bear out."""
    rows = table[table["status"] == "ok"]
    if rows.empty:
        return f"No combination could be planned for a request of {counted(tokens, 'token')}"
    share = (rows["blocks_per_request"].astype(float) / rows["num_blocks"].astype(float)).max()
    most = share_text(float(share))
    return f"What a request of {counted(tokens, 'token')} holds: at most {most} of all blocks here"


# -- 06: fill ----------------------------------------------------------------------------------------


def fill(costs: pd.DataFrame) -> Answer:
    """Ours next to memset and to the naive loop, with the cases at both ends."""
    said = []
    for values, rows in costs.groupby("values", sort=False):
        share, times = rows["of_memset"].astype(float), rows["vs_naive"].astype(float).dropna()
        slow, fast = rows.loc[share.idxmin()], rows.loc[share.idxmax()]
        text = f"{values} values at {share_text(float(share.min()))} of memset's speed ({slow['case']}"
        text += f", {bytes_text(float(slow['bytes']))})"
        if len(rows) > 1:
            text += f" to {float(share.max()):.0%} ({fast['case']}, {bytes_text(float(fast['bytes']))})"
        if len(times):
            low, high = times.min(), times.max()
            text += f", {low:.1f}" + (f" to {high:.1f}" if len(times) > 1 else "") + " times the naive loop's"
        said.append(text)
    return f"Filling {'; '.join(said)}.", None


def history(table: pd.DataFrame) -> str:
    """A title: how many of the historic ways leave decode something else to read."""
    rows = table[(table["status"] == "ok") & table["fault"].notna()]
    missing = int((rows["coverage"].astype(float) < 1).sum())
    return f"{missing} of {counted(len(rows), 'historic way')} of filling leave decode with something else to read"


# -- 07: latency -------------------------------------------------------------------------------------


def latency(table: pd.DataFrame, again: pd.DataFrame, device: str) -> Answer:
    """Which block sizes can be told apart, and how near the limit a step comes, by model.

    ``again``: the same cases measured a second time. Two block sizes differ only where their quartiles do
    not overlap in either run.
    """
    rows, left_out = measured(table)
    said, busy = [], False
    for name, part in rows.groupby("model", sort=False):
        part = part.drop_duplicates("block_in_use").dropna(subset=["median_s"])
        if part.empty:
            continue
        second = again[(again["model"] == name) & (again["status"] == "ok")].drop_duplicates("block_in_use")
        fast, slow = part.loc[part["median_s"].idxmin()], part.loc[part["median_s"].idxmax()]
        share = part["limit_share"].astype(float)
        busy |= bool(share.max() > 1.1)
        if len(part) == 1:
            text = f"one block size, {int(fast['block_in_use']):,} tokens"
        elif separated(part, second, fast["block_in_use"], slow["block_in_use"]):
            ratio = float(slow["median_s"]) / float(fast["median_s"])
            text = (
                f"blocks of {int(fast['block_in_use']):,} tokens are fastest, {ratio:.2f}x as fast as "
                f"{int(slow['block_in_use']):,}, in both runs"
            )
        else:
            text = f"{counted(len(part), 'block size')} that two runs cannot tell apart"
        said.append(f"{short(name)}: {text}, at most {share.max():.0%} of this machine's limit")
    if not said:
        return f"No step could be measured.{left_out}", None
    text = f"On this {device}: {'; '.join(said)}."
    if busy and any("in L2" in str(note) for note in rows["notes"]):
        text += (
            " Beyond the limit are steps that the card's L2 could hold: a model's whole cache it could not."
        )
    elif busy:
        text += (
            " The memory was slower while its limit was measured than during the steps: other work ran too."
        )
    return text + left_out, None


def noted(table: pd.DataFrame) -> str:
    """What was noted of a table's measurements, for the end of a subtitle; empty where nothing was."""
    notes = table["notes"].dropna().astype(str) if "notes" in table else []
    each = [note for text in notes for note in text.split("; ") if note]
    return "".join(f"; {counted(each.count(note), 'row')}: {note}" for note in dict.fromkeys(each))


def separated(first: pd.DataFrame, second: pd.DataFrame, fast: int, slow: int) -> bool:
    """Whether the quartiles of two block sizes leave each other out, and in the same order, in both runs."""

    def apart(rows: pd.DataFrame) -> bool:
        a, b = rows[rows["block_in_use"] == fast], rows[rows["block_in_use"] == slow]
        return bool(len(a) and len(b) and float(a["q3_s"].iloc[0]) < float(b["q1_s"].iloc[0]))

    return fast != slow and apart(first) and apart(second)


def layers_timed(table: pd.DataFrame) -> str:
    """How many layers of each model a step held, for a subtitle: ``llama-3.1-8b 1 of 32 layers``."""
    rows = table[(table["status"] == "ok") & table["layers_timed"].notna()].drop_duplicates("model")
    said = [
        f"{short(row['model'])} {int(row['layers_timed'])} of {counted(int(row['layers']), 'layer')}"
        for row in rows.to_dict("records")
    ]
    return "; ".join(said) or "no layer was timed"


# -- 08: the real engine -----------------------------------------------------------------------------


def engine(table: pd.DataFrame) -> Answer:
    """Coverage of each connector in each setting of the stored engines; settings are never pooled."""
    said = []
    for setting, part in table.groupby("setting", sort=False):
        shares = []
        for connector, rows in part.groupby("connector", sort=False):
            share = (rows["filled"].sum() + rows["zeroed"].sum()) / rows["required"].sum()
            shares.append(f"{connector} {share_text(float(share))}")
        said.append(f"{setting} ({counted(part['model'].nunique(), 'model')}): {', '.join(shares)}")
    return (
        f"Pages that the first decode step reads and that hold what was asked for. {'; '.join(said)}.",
        None,
    )


# -- 10: published figures and floors ----------------------------------------------------------------


def published(table: pd.DataFrame, errors: pd.DataFrame) -> Answer:
    """How far published figures stand above their floors, and how well they are estimated."""
    used, all_times = table[table["left_out"] == ""], table["times"].dropna()
    if used.empty or errors.empty:
        return (
            f"Of {counted(len(table), 'published figure')} none is used in the fit: nothing to judge by.",
            None,
        )
    times = used["times"]
    below = int((all_times < 1).sum())
    worst = errors.sort_values("median_error_share").iloc[-1]
    half, most = worst["median_error_share"], worst["p90_error_share"]
    return (
        f"The {counted(len(used), 'published figure')} of the fit take {times.median():.1f} times their floor in "
        f"the median, one in a hundred less than {times.quantile(0.01):.1f}; of all {len(all_times):,} with a floor "
        f"{below} are below it, and impossible as recorded. With {worst['held out']} held out, half of the estimates "
        f"are within {half:.0%}, nine in ten within {most:.0%}."
    ), None


def middle_half(table: pd.DataFrame) -> str:
    """A title: between which multiples of their floors half of the figures lie."""
    times = table["times"].dropna()
    if times.empty:
        return "No published figure with a floor was asked for"
    low, high = times.quantile(0.25), times.quantile(0.75)
    return f"Half of these published decode figures take {low:.1f} to {high:.1f} times their floor"


def overtakes(floors: pd.DataFrame) -> str:
    """A title: from which of the lengths shown a step reads more cache than weights, by model."""
    said = []
    for name, part in floors.groupby("model", sort=False):
        part = part.assign(length=part["context"].astype(int)).sort_values("length")
        past = part[part["cache_s"] > part["weights_s"]]
        where = f"from {int(past['length'].iloc[0]):,} tokens" if len(past) else "at none of these lengths"
        said.append(f"of {short(str(name))} {where}")
    return f"A step spends more on cache than on weights: {'; '.join(said)}"


#: columns of a floor's parts → what they are called
PARTS = {
    "weights_ms": "weights",
    "experts_ms": "routed experts",
    "cache_ms": "the cache",
    "messages_ms": "messages",
}


def largest_parts(table: pd.DataFrame) -> str:
    """A title: which part is the largest of how many of the floors."""
    largest = table[list(PARTS)].astype(float).idxmax(axis=1).value_counts(sort=False)
    said = [f"{name} in {largest[column]}" for column, name in PARTS.items() if largest.get(column)]
    return f"The largest part of {counted(len(table), 'floor')}: {', '.join(said)}"
