"""Which settings serve given traffic best: a search that says why at every step.

    found = db.recommend("nemotron-h-8b", "h100", traffic, memory="10GiB", ttft=2.0, tpot=0.05)
    print(found)

It starts from vLLM's defaults, simulates every change of one setting, keeps the best one where it is better
beyond noise, and goes on from there. What vLLM refuses is in the table with vLLM's reason and is never
recommended; groupings that no engine offers are tried and marked, and are never recommended either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from decodebench.errors import DecodebenchError
from decodebench.forecast.machines import Machine
from decodebench.forecast.simulate import Settings, Simulation, compare_simulations, simulate
from decodebench.forecast.step_costs import step_floor
from decodebench.forecast.traffic import Traffic
from decodebench.layout.plan import parse_memory, plan
from decodebench.models.load import load_model
from decodebench.models.model import Model
from decodebench.words import seconds_text

if TYPE_CHECKING:
    import pandas as pd

#: groupings that vLLM makes by itself
OFFERED = ("auto",)

NO_LIMIT = float("inf")

#: a change is worth a setting where goodput or mean latency differ by this share
WORTH = 0.01


class RecommendError(DecodebenchError):
    """A search that cannot be made: says which argument, or why nothing can be served."""


@dataclass(frozen=True)
class Choice:
    """One way to serve; names are vLLM's. None and ``auto``: vLLM's own choice."""

    block_size: int | None = None
    grouping: str = "auto"
    kv_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    max_num_seqs: int = 256
    enable_prefix_caching: bool = True

    @property
    def offered(self) -> bool:
        """Whether vLLM can be told to do this."""
        return self.grouping in OFFERED

    def flags(self, memory: int, max_model_len: int) -> str:
        """Arguments of ``vllm serve``."""
        found = [f"--kv-cache-memory-bytes {memory}", f"--max-model-len {max_model_len}"]
        if self.block_size is not None:
            found.append(f"--block-size {self.block_size}")
        for name in ("kv_cache_dtype", "mamba_ssm_cache_dtype"):
            if getattr(self, name) != "auto":
                found.append(f"--{name.replace('_', '-')} {getattr(self, name)}")
        found.append(f"--max-num-seqs {self.max_num_seqs}")
        found.append(
            "--enable-prefix-caching" if self.enable_prefix_caching else "--no-enable-prefix-caching"
        )
        return " ".join(found)


#: setting → what is tried; the layer kinds of the model decide which of them mean something
AXES: dict[str, Sequence] = {
    "kv_cache_dtype": ("auto", "fp8"),
    "mamba_ssm_cache_dtype": ("auto", "bfloat16", "float32"),
    "block_size": (None, 16, 32, 64, 128),
    "max_num_seqs": (64, 256, 1024),
    "enable_prefix_caching": (True, False),
    "grouping": ("auto", "fixed(2)", "fixed(4)", "fixed(8)", "per_layer"),
}


@dataclass(frozen=True)
class Tried:
    """One choice, simulated or refused."""

    choice: Choice
    facts: Mapping[str, float] = field(default_factory=dict)
    simulation: Simulation | None = field(default=None, repr=False)
    refused: str | None = None


@dataclass(frozen=True)
class Recommendation:
    """What was tried, the way from the defaults to ``best``, and why each step was taken.

    ``steps``: sentences, one a setting that was changed; ``noise``: what looked better and is not told apart
    from the one chosen.
    """

    model: str
    machine: str
    traffic: str
    limits: tuple[float, float]
    memory: int
    start: Tried
    best: Tried
    tried: tuple[Tried, ...]
    steps: tuple[str, ...]
    noise: tuple[str, ...]
    unoffered: tuple[str, ...]

    @property
    def flags(self) -> str:
        """Arguments of ``vllm serve`` for the best choice."""
        return self.best.choice.flags(self.memory, self.best.simulation.layout.max_model_len)

    def table(self) -> pd.DataFrame:
        """All choices, the best first; refused ones last, with their reason."""
        import pandas as pd

        rows = [
            vars(tried.choice)
            | {"offered": tried.choice.offered, "reason": tried.refused}
            | dict(tried.facts)
            for tried in self.tried
        ]
        table = pd.DataFrame(rows)
        order = table.sort_values(["goodput", "latency_mean_s"], ascending=[False, True], na_position="last")
        return order.reset_index(drop=True)

    def __str__(self) -> str:
        ttft, tpot = self.limits
        limits = [f"first token within {seconds_text(ttft)}"] if ttft < NO_LIMIT else []
        limits += [f"further tokens within {seconds_text(tpot)} each"] if tpot < NO_LIMIT else []
        lines = [
            f"{self.model} on {self.machine}, {self.traffic}"
            + (f"; good: {', '.join(limits)}" if limits else ""),
            f"vLLM's defaults: {_in_short(self.start.facts)}",
            *(f"  {i}. {step}" for i, step in enumerate(self.steps, 1)),
        ]
        if not self.steps:
            lines.append("  nothing that was tried is better beyond noise")
        else:
            lines.append(f"Recommended:     {_in_short(self.best.facts)}")
        lines += [f"  within noise: {text}" for text in self.noise]
        lines += [f"  no engine offers: {text}" for text in self.unoffered]
        return "\n".join([*lines, f"vllm serve … {self.flags}"])


def recommend(
    model: Model | str | Mapping,
    machine: Machine | str,
    traffic: Traffic,
    memory: int | str = "8GiB",
    *,
    ttft: float = NO_LIMIT,
    tpot: float = NO_LIMIT,
    efficiency: float = 1.0,
    launch: float = 0.0,
    max_model_len: int | str = "auto",
    max_num_batched_tokens: int = 8192,
    tensor_parallel_size: int = 1,
    axes: Mapping[str, Sequence] | None = None,
    rounds: int = 4,
    progress: bool | None = None,
) -> Recommendation:
    """Search settings for ``traffic`` in ``memory`` bytes of cache.

    Better means: more requests a second that meet the limits ``ttft`` and ``tpot`` (seconds); where these do
    not differ beyond noise, a shorter mean latency. ``efficiency``, ``launch``: see ``step_floor``.
    ``axes``: values to try instead of ``AXES``. ``rounds``: settings changed at most. Raises
    ``RecommendError`` where vLLM's defaults serve nothing, or an axis is unknown.
    """
    from tqdm import tqdm

    model = load_model(model)
    budget = parse_memory(memory)
    tables = dict(AXES if axes is None else axes)
    unknown = set(tables) - set(AXES)
    if unknown:
        raise RecommendError(f"unknown setting {sorted(unknown)[0]!r}; known are {', '.join(AXES)}")

    def attempt(choice: Choice) -> Tried:
        options = {
            "kv_cache_dtype": choice.kv_cache_dtype,
            "mamba_ssm_cache_dtype": choice.mamba_ssm_cache_dtype,
            "tensor_parallel_size": tensor_parallel_size,
        }
        try:
            layout = plan(
                model,
                budget,
                choice.block_size,
                choice.grouping,
                max_model_len=max_model_len,
                max_num_batched_tokens=max_num_batched_tokens,
                enable_prefix_caching=choice.enable_prefix_caching,
                **options,
            )
            found = simulate(
                layout,
                traffic,
                step_floor(model, machine, efficiency, launch, **options),
                Settings(choice.max_num_seqs, max(max_num_batched_tokens, choice.max_num_seqs)),
                progress=False,
                prefix_caching=None if choice.enable_prefix_caching else False,
            )
        except DecodebenchError as error:
            return Tried(choice, refused=str(error))
        if found.interrupted:
            raise KeyboardInterrupt
        return Tried(choice, _facts(found, ttft, tpot), found)

    start = best = attempt(Choice())
    if start.refused:
        raise RecommendError(f"vLLM's defaults serve nothing here: {start.refused}")
    tried: dict[Choice, Tried] = {start.choice: start}
    steps: list[str] = []
    noise: list[str] = []
    hidden = None if progress is None else not progress
    with tqdm(unit="choice", disable=hidden, leave=False) as bar:
        for _ in range(rounds):
            better: list[tuple[float, float, Tried]] = []
            noise = []
            for choice in _neighbours(best.choice, tables):
                bar.set_postfix_str(_difference(best.choice, choice), refresh=False)
                if choice not in tried:
                    tried[choice] = attempt(choice)
                    bar.update()
                one = tried[choice]
                if one.refused or one.simulation is None or _alike(best, one):
                    continue
                gain = _gain(best, one, ttft, tpot)
                if gain is None:
                    if one.facts["goodput"] > (1 + WORTH / 2) * best.facts["goodput"] and choice.offered:
                        noise.append(f"{_difference(best.choice, choice)} ({_in_short(one.facts)})")
                elif choice.offered:
                    better.append((*gain, one))
            if not better:
                break
            chosen = max(better, key=lambda entry: entry[:2])[2]
            steps.append(f"{_difference(best.choice, chosen.choice)}: {_reason(best.facts, chosen.facts)}")
            best = chosen
    unoffered = [
        f"{_difference(best.choice, one.choice)} would give {_in_short(one.facts)}"
        for one in tried.values()
        if not one.choice.offered
        and one.simulation is not None
        and replace(one.choice, grouping="auto") == best.choice
        and _gain(best, one, ttft, tpot) is not None
    ]
    return Recommendation(
        model.name,
        machine if isinstance(machine, str) else machine.name,
        traffic.name,
        (ttft, tpot),
        budget,
        start,
        best,
        tuple(tried.values()),
        tuple(steps),
        tuple(noise),
        tuple(unoffered),
    )


def _neighbours(choice: Choice, axes: Mapping[str, Sequence]) -> Iterator[Choice]:
    """Every choice that differs in one setting."""
    for name, values in axes.items():
        for value in values:
            if value != getattr(choice, name):
                yield replace(choice, **{name: value})


def _alike(a: Tried, b: Tried) -> bool:
    """Whether two choices come to the same thing: a setting that means nothing to this model."""
    return all(
        a.facts[name] == b.facts[name] for name in ("goodput", "latency_mean_s", "preemptions", "steps")
    )


def _gain(a: Tried, b: Tried, ttft: float, tpot: float) -> tuple[float, float] | None:
    """(more good requests a second, seconds less of mean latency) where ``b`` is better beyond noise, and by
    so much that it is worth a setting.
    """
    table = compare_simulations(a.simulation, b.simulation, ttft, tpot).set_index("metric")
    good, latency = table.loc["good"], table.loc["latency_s"]
    more = b.facts["goodput"] - a.facts["goodput"]
    if good["distinguishable"] and abs(more) > WORTH * a.facts["goodput"]:
        return (more, -latency["difference"]) if more > 0 else None
    if more < -WORTH * a.facts["goodput"]:
        return None
    if latency["distinguishable"] and -latency["difference"] > WORTH * a.facts["latency_mean_s"]:
        return max(more, 0.0), -latency["difference"]
    return None


def _facts(found: Simulation, ttft: float, tpot: float) -> dict[str, float]:
    """A simulation as the search sees it: its facts, and shares of the memory in use by cause."""
    over = found.over_time()
    causes = over[["content_bytes", "last_block_bytes", "padding_bytes"]].sum()
    held = max(float(causes.sum()), 1.0)
    return found.facts(ttft, tpot) | {
        "latency_mean_s": float(found.latencies["latency"].mean()),
        "padding": float(causes["padding_bytes"]) / held,
        "last_block": float(causes["last_block_bytes"]) / held,
        "num_blocks": float(sum(found.layout.pool_num_blocks)),
    }


def _difference(a: Choice, b: Choice) -> str:
    """``block_size 32 instead of 16``, for every setting that differs."""
    return ", ".join(
        f"{name} {_value(getattr(b, name))} instead of {_value(getattr(a, name))}"
        for name in AXES
        if getattr(a, name) != getattr(b, name)
    )


def _value(value: object) -> str:
    if value is None:
        return "auto"
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _in_short(facts: Mapping[str, float]) -> str:
    return (
        f"{facts['goodput']:.2f} good requests a second, {facts['preemptions']:,} preemptions, "
        f"mean latency {seconds_text(facts['latency_mean_s'])}"
    )


#: facts that explain a difference: (name, how the sentence reads, the better direction, the least that counts)
CAUSES = (
    ("preemptions", "preemptions fall from {} to {}", -1, 1.0),
    ("running", "requests that run at once rise from {} to {}", 1, 0.5),
    ("waiting", "requests that wait fall from {} to {}", -1, 0.5),
    ("prefix_hit_rate", "prefix hits rise from {} to {}", 1, 0.005),
    ("padding", "padding falls from {} to {} of the memory in use", -1, 0.005),
    ("last_block", "unused slots fall from {} to {} of the memory in use", -1, 0.005),
    ("tpot_p50_s", "the time of a further token falls from {} to {}", -1, 1e-6),
)
SHARES = ("prefix_hit_rate", "padding", "last_block")


def _reason(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """What became better, and the figures that moved most with it."""
    moved = []
    for name, sentence, better, least in CAUSES:
        a, b = before[name] or 0.0, after[name] or 0.0
        size = (b - a) * better / max(abs(a), abs(b), 1e-12)
        if size > 0.05 and (b - a) * better >= least:
            moved.append((size, sentence.format(_figure(name, a), _figure(name, b))))
    moved.sort(reverse=True)
    because = ", because " + " and ".join(text for _, text in moved[:2]) if moved else ""
    good = f"{before['goodput']:.2f} → {after['goodput']:.2f} good requests a second"
    if abs(after["goodput"] - before["goodput"]) < 0.01 * max(before["goodput"], 1e-9):
        good = (
            f"mean latency {seconds_text(before['latency_mean_s'])} → {seconds_text(after['latency_mean_s'])}"
        )
    return good + because


def _figure(name: str, value: float) -> str:
    if name in SHARES:
        return f"{value:.0%}"
    if name.endswith("_s"):
        return seconds_text(value)
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"
