"""How far engines stay above the floor: a small model of a step's time, fitted to published figures.

The time of a step is a sum of physical terms. Each kind of bytes is read at a share of the bandwidth,
each product is made at a share of the peak; every layer costs a fixed time that depends on the engine;
all-reduces cost a latency and bytes over the link; the engine costs a time a step and a time a request;
prompts that are computed in the same steps cost their operations. On top, a figure is corrected by what
the model misses on figures like it (kernel ridge regression on the logarithm), which fades out with the
distance to all that was measured.

The constants are stored in data/published/efficiency.json with the errors they reach on figures that
were held out; ``python -m decodebench.forecast.efficiency`` fits them anew.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from decodebench.forecast.bound import Prepared
from decodebench.forecast.published import FOLDER, Figure, for_fit
from decodebench.shipped import shipped

if TYPE_CHECKING:
    import numpy as np

ENGINES = ("vllm", "sglang", "trtllm")
#: constant → where the fit begins, and what it is drawn to where figures say little (shares have no unit, the
#: others are seconds)
START: dict[str, float] = {
    "weights": 0.8,
    "experts": 0.7,
    "cache": 0.7,
    "states": 0.6,
    "products": 0.6,
    "link": 0.3,
    "prompt products": 0.5,
    "prompt attention": 0.3,
    "all-reduce": 7e-6,
    "layer with experts": 3e-5,
    "layer with latent attention": 1e-5,
    "layer with a state": 1e-5,
    "bandwidth, newer chips": 0.9,
    "layer, newer chips": 0.7,
    "peak, newer chips": 0.7,
    "overlap": 2.0,
    "prompt": 3e-3,
    "progress a year": 1.3,
    **{f"layer, {engine}": 1e-5 for engine in ENGINES},
    **{f"step, {engine}": 4e-4 for engine in ENGINES},
    **{f"request, {engine}": 9e-6 for engine in ENGINES},
    **{f"prompt products, {engine}": 1.0 for engine in ENGINES},
    **{f"experts, {engine}": 1.0 for engine in ENGINES},
}
#: how strongly constants are drawn to their start, in units of a figure's logarithmic error
DRAW = 0.2
#: logarithmic error beyond which a figure loses weight
ROBUST = 0.1
#: squared lengths over which two figures stop being alike, by what they differ in; and the correction's
#: variance and noise
ALIKE = {
    "numbers": 0.5,
    "engine": 2.0,
    "model": 2.0,
    "machine": 0.5,
    "version": 1.0,
    "variance": 0.05,
    "noise": 0.01,
}
#: chips for whose kernels newer constants hold
NEWER = ("blackwell", "blackwell-consumer")
#: the year that progress is counted from
YEAR = 2026.0


@dataclass(frozen=True)
class Step:
    """What the model knows of one step: seconds at full rates by kind, and counts.

    ``prompt_tokens`` are those computed a step on average, all data parallel replicas apart;
    ``requests`` one replica's.
    """

    model: str
    machine: str
    engine: str
    version: str
    year: float
    weights: float
    weight_products: float
    experts: float
    expert_products: float
    cache: float
    cache_products: float
    states: float
    sent: float
    #: pairs of a mixer and a feed-forward block
    layers: float
    with_experts: bool
    latent: bool
    with_states: bool
    reduces: int
    ranks: int
    expert_ranks: int
    newer: bool
    requests: float
    prompt_tokens: float
    prompts: float
    prompt_products: float
    prompt_attention: float
    bits: float
    input_tokens: float
    output_tokens: float
    dense_bytes: float
    expert_bytes: float
    cache_bytes: float
    bandwidth: float


def step(
    deployment: Prepared,
    concurrency: float,
    context: float,
    *,
    engine: str,
    version: str = "",
    year: float | None = None,
    input_tokens: float = 0,
    output_tokens: float = 0,
    serving: bool = True,
) -> Step:
    """A step of a deployment as the model sees it.

    ``serving``: requests that end are replaced by new ones, whose prompts of ``input_tokens`` are
    computed in the same steps; else the step decodes alone.
    """
    bound = deployment.at(concurrency, max(1, round(context)))
    machine = deployment.machine
    loads = {load.part: load for load in bound.loads}
    products = {part: load.operations / machine.peak_of(load.dtype) for part, load in loads.items()}
    weights = [part for part in loads if part in WEIGHTS]
    caches = [part for part in loads if "cache" in part or "indexer" in part]
    local = concurrency / deployment.data_parallel_size
    tokens = (
        sum(products[part] for part in (*weights, "experts") if part in products and part != "head") / local
    )
    turnover = local / output_tokens if serving and output_tokens else 0.0
    attention = deployment.prompt_attention(max(1.0, input_tokens))
    expert = loads.get("experts")
    seconds = 1 / machine.bandwidth
    return Step(
        model=deployment.model.name,
        machine=machine.name,
        engine=engine,
        version=version,
        year=YEAR if year is None else year,
        weights=sum(loads[part].bytes for part in weights) * seconds,
        weight_products=sum(products[part] for part in weights),
        experts=expert.bytes * seconds if expert else 0.0,
        expert_products=products.get("experts", 0.0),
        cache=sum(loads[part].bytes for part in caches) * seconds,
        cache_products=sum(products[part] for part in caches),
        states=loads["states"].bytes * seconds if "states" in loads else 0.0,
        sent=sum(load.sent for load in bound.loads) / machine.link,
        layers=deployment.blocks / 2,
        with_experts=expert is not None,
        latent="latent" in loads,
        with_states="states" in loads,
        reduces=deployment.reduces if deployment.tensor_parallel_size > 1 else 0,
        ranks=deployment.tensor_parallel_size,
        expert_ranks=deployment.expert_parallel_size,
        newer=machine.generation in NEWER,
        requests=local,
        prompt_tokens=turnover * input_tokens,
        prompts=turnover,
        prompt_products=tokens,
        prompt_attention=attention,
        bits=deployment.formats["experts" if expert else "mlp"].bits,
        input_tokens=input_tokens or context,
        output_tokens=output_tokens or 1024,
        dense_bytes=sum(loads[part].bytes for part in weights),
        expert_bytes=expert.bytes if expert else 0.0,
        cache_bytes=sum(loads[part].bytes for part in caches),
        bandwidth=machine.bandwidth,
    )


#: parts that every token's products use whole
WEIGHTS = ("embedding", "attention", "latent", "mixer", "mlp", "shared_experts", "router", "norm", "head")


def step_of(figure: Figure) -> Step:
    """A published figure's step."""
    return step(
        figure.deployment(),
        figure.concurrency,
        figure.context,
        engine=figure.engine,
        version=figure.version,
        year=figure.date,
        input_tokens=figure.input_tokens,
        output_tokens=figure.output_tokens,
        serving=figure.kind == "serving",
    )


def columns(steps: Sequence[Step]) -> dict[str, np.ndarray]:
    """The numbers of many steps, an array a field."""
    import numpy as np

    names = [name for name, value in vars(steps[0]).items() if not isinstance(value, str)]
    return {name: np.array([float(getattr(s, name)) for s in steps]) for name in names} | {
        "engine": np.array([[s.engine == engine for engine in ENGINES] for s in steps], dtype=float)
    }


def terms(constants: Mapping[str, float], c: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The seconds of each term, by its name."""
    import numpy as np

    k = constants

    def of_engine(what: str) -> np.ndarray:
        known = c["engine"] @ np.array([k[f"{what}, {engine}"] for engine in ENGINES])
        # an engine without figures: the mean of those that have some
        return np.where(c["engine"].sum(1) > 0, known, np.mean([k[f"{what}, {e}"] for e in ENGINES]))

    newer = c["newer"] > 0
    rate = np.where(newer, k["bandwidth, newer chips"], 1.0)
    peak = np.where(newer, k["peak, newer chips"], 1.0)
    sharp = 1 + k["overlap"]

    def both(read: np.ndarray, products: np.ndarray) -> np.ndarray:
        return (read**sharp + products**sharp) ** (1 / sharp)

    fixed = of_engine("layer") + k["layer with experts"] * c["with_experts"]
    fixed = (
        fixed + k["layer with latent attention"] * c["latent"] + k["layer with a state"] * c["with_states"]
    )
    fixed = c["layers"] * fixed * np.where(newer, k["layer, newer chips"], 1.0)
    progress = np.exp(-(k["progress a year"] - 1) * (c["year"] - YEAR))
    engine = (of_engine("step") + of_engine("request") * c["requests"]) * progress
    prompt = c["prompt_products"] / (k["prompt products"] * peak * of_engine("prompt products"))
    return {
        "weights": both(c["weights"] / (rate * k["weights"]), c["weight_products"] / (k["products"] * peak)),
        "experts": both(
            c["experts"] / (rate * k["experts"] * of_engine("experts")),
            c["expert_products"] / (k["products"] * peak),
        ),
        "cache": both(c["cache"] / (rate * k["cache"]), c["cache_products"] / k["products"]),
        "states": c["states"] / (rate * k["states"]),
        "layers": fixed * progress,
        "all-reduce": c["reduces"] * k["all-reduce"] * np.log2(np.maximum(c["ranks"], 2))
        + c["sent"] / k["link"],
        "engine": engine,
        "prompts": c["prompt_tokens"] * (prompt + c["prompt_attention"] / k["prompt attention"])
        + c["prompts"] * k["prompt"],
    }


def seconds(constants: Mapping[str, float], c: Mapping[str, np.ndarray]) -> np.ndarray:
    """The time of each step, without the correction."""
    import numpy as np

    return np.sum(list(terms(constants, c).values()), axis=0)


def fit(steps: Sequence[Step], measured: Sequence[float], rounds: int = 25) -> dict[str, float]:
    """Constants that explain the measured seconds, by Gauss-Newton on logarithms.

    Every series of figures (model, machine, engine) weighs as much as the root of its size; errors
    beyond ``ROBUST`` count less (soft L1); constants are drawn to ``START``.
    """
    import numpy as np

    c, target = columns(steps), np.log(np.asarray(measured))
    series = [(s.model, s.machine, s.engine) for s in steps]
    sizes = {key: series.count(key) for key in set(series)}
    weight = np.array([1 / math.sqrt(sizes[key]) for key in series])
    weight /= weight.mean()
    names = list(START)
    start = np.log([START[name] for name in names])
    draw = len(steps) * DRAW**2

    def residual(x: np.ndarray) -> np.ndarray:
        return weight * (np.log(seconds(dict(zip(names, np.exp(x))), c)) - target)

    def cost(x: np.ndarray, r: np.ndarray) -> float:
        soft = ROBUST**2 * 2 * (np.sqrt(1 + (r / ROBUST) ** 2) - 1)
        return float(soft.sum() + draw * ((x - start) ** 2).sum())

    x, damping = start.copy(), 1.0
    r = residual(x)
    best = cost(x, r)
    for _ in range(rounds):
        slope = np.stack([(residual(x + 1e-4 * unit) - r) / 1e-4 for unit in np.eye(len(x))], axis=1)
        trust = 1 / np.sqrt(1 + (r / ROBUST) ** 2)
        left = slope.T @ (slope * trust[:, None]) + draw * np.eye(len(x))
        right = slope.T @ (trust * r) + draw * (x - start)
        while damping < 1e9:
            moved = x - np.linalg.solve(left + damping * np.diag(np.diag(left)), right)
            moved_r = residual(moved)
            moved_cost = cost(moved, moved_r)
            if moved_cost < best:
                break
            damping *= 4
        else:
            break
        gain, best, x, r, damping = best - moved_cost, moved_cost, moved, moved_r, damping / 4
        if gain < 1e-6 * best:
            break
    return {name: float(value) for name, value in zip(names, np.exp(x))}


# -- the correction ----------------------------------------------------------------------------------


def traits(steps: Sequence[Step]) -> np.ndarray:
    """Numbers by which two figures are alike, scaled so that a difference of about 1 matters."""
    import numpy as np

    return np.array(
        [
            (
                math.log2(s.requests) / 2,
                math.log2(s.input_tokens) / 2,
                math.log2(s.output_tokens) / 2,
                math.log2(s.ranks),
                math.log2(max(1, s.expert_ranks)),
                2.0 * (s.bits < 6),
                1.0 * (s.bits >= 16),
                2 * (s.year - YEAR),
                math.log2(s.dense_bytes) / 1.5,
                math.log2(s.expert_bytes + 1e8) / 2,
                math.log2(s.cache_bytes + 1) / 3,
                2 * math.log2(s.layers),
                float(s.newer),
                2 * math.log2(s.bandwidth),
            )
            for s in steps
        ]
    )


def alike(
    a: Sequence[Step],
    b: Sequence[Step],
    numbers_a: np.ndarray | None = None,
    numbers_b: np.ndarray | None = None,
) -> np.ndarray:
    """Covariance of what the model misses on the steps ``a`` and ``b``."""
    import numpy as np

    x = traits(a) if numbers_a is None else numbers_a
    y = traits(b) if numbers_b is None else numbers_b
    far = ALIKE["numbers"] * ((x[:, None, :] - y[None, :, :]) ** 2).sum(2)
    for name, weight in (
        ("engine", "engine"),
        ("model", "model"),
        ("machine", "machine"),
        ("version", "version"),
    ):
        left = np.array([_label(s, name) for s in a], dtype=object)
        right = np.array([_label(s, name) for s in b], dtype=object)
        far += ALIKE[weight] * (left[:, None] != right[None, :])
    return ALIKE["variance"] * np.exp(-far / 2)


def _label(s: Step, name: str) -> str:
    return s.engine + s.version if name == "version" else getattr(s, name)


@dataclass(frozen=True)
class Efficiency:
    """A fitted model: constants, and the correction's weights on the steps it was fitted to."""

    constants: Mapping[str, float]
    steps: tuple[Step, ...]
    weights: tuple[float, ...]

    def seconds(self, steps: Sequence[Step]) -> np.ndarray:
        """The estimated time of each step."""
        import numpy as np

        plain = seconds(self.constants, columns(steps))
        return plain * np.exp(alike(steps, self.steps) @ np.asarray(self.weights))

    def terms(self, one: Step) -> dict[str, float]:
        """The seconds of each term of one step, and of the correction."""
        found = {name: float(value[0]) for name, value in terms(self.constants, columns([one])).items()}
        total = float(self.seconds([one])[0])
        return found | {"correction": total - sum(found.values())}


def train(steps: Sequence[Step], measured: Sequence[float]) -> Efficiency:
    """Fit the constants, then the correction to what they miss."""
    import numpy as np

    constants = fit(steps, measured)
    missed = np.log(np.asarray(measured)) - np.log(seconds(constants, columns(steps)))
    covariance = alike(steps, steps)
    covariance[np.diag_indices(len(steps))] += ALIKE["noise"]
    weights = np.linalg.solve(covariance, np.clip(missed, -0.8, 0.8))
    return Efficiency(constants, tuple(steps), tuple(map(float, weights)))


# -- errors on figures that were held out --------------------------------------------------------------


def folds(steps: Sequence[Step], by: str, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """(train, test) positions: ``random`` holds out three in ten, ``machine`` and ``model`` one at a time."""
    if by == "random":
        import random

        order = list(range(len(steps)))
        random.Random(seed).shuffle(order)
        cut = round(0.7 * len(order))
        return [(sorted(order[:cut]), sorted(order[cut:]))]
    return [
        (
            [i for i, s in enumerate(steps) if getattr(s, by) != value],
            [i for i, s in enumerate(steps) if getattr(s, by) == value],
        )
        for value in sorted({getattr(s, by) for s in steps})
    ]


def held_out(steps: Sequence[Step], measured: Sequence[float], by: str) -> list[dict]:
    """Every held-out figure's prediction by a model that has not seen it: rows with position, fold, seconds."""
    rows = []
    for trained, tested in folds(steps, by):
        model = train([steps[i] for i in trained], [measured[i] for i in trained])
        for i, predicted in zip(tested, model.seconds([steps[i] for i in tested])):
            fold = "random" if by == "random" else getattr(steps[i], by)
            rows.append(
                {
                    "figure": i,
                    "held_out": by,
                    "fold": fold,
                    "measured_s": measured[i],
                    "predicted_s": float(predicted),
                }
            )
    return rows


def errors(rows: Sequence[Mapping]) -> dict[str, float]:
    """Median and 90th percentile of the relative error, and how many figures."""
    found = sorted(abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows)
    return {
        "median": found[len(found) // 2],
        "p90": found[min(len(found) - 1, round(0.9 * len(found)))],
        "figures": len(found),
    }


# -- stored ------------------------------------------------------------------------------------------


@cache
def stored() -> dict:
    """The fitted constants, correction weights and errors of data/published/efficiency.json."""
    return json.loads(shipped(f"{FOLDER}/efficiency.json").read_text())


@cache
def efficiency() -> Efficiency:
    """The stored model."""
    values = stored()
    steps = tuple(Step(**dict(zip(values["fields"], row))) for row in values["steps"])
    return Efficiency(values["constants"], steps, tuple(values["weights"]))


def main() -> None:
    """Fit to all figures, measure the errors on those held out, and store both."""
    figures = for_fit()
    steps = [step_of(f) for f in figures]
    measured = [f.seconds for f in figures]
    table = {by: errors(held_out(steps, measured, by)) for by in ("random", "machine", "model")}
    model = train(steps, measured)
    fields = list(vars(steps[0]))
    values = {
        "figures": len(figures),
        "errors": table,
        "constants": model.constants,
        "fields": fields,
        "steps": [[_short(getattr(s, name)) for name in fields] for s in model.steps],
        "weights": [float(f"{w:.4g}") for w in model.weights],
    }
    path = shipped(FOLDER) / "efficiency.json"
    path.write_text(json.dumps(values, separators=(",", ":")).replace("],[", "],\n[") + "\n")
    print(json.dumps(table, indent=1))


def _short(value):
    return float(f"{value:.5g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
