"""Options and versions: what is unknown is refused with what is known, before anything is allocated."""

import pytest

from decodebench.cache.values import Constant, Normal
from decodebench.vllm.options import TESTED, OptionRefused, UntestedVersion, check_version, parse


def test_defaults_are_the_built_in_connectors():
    options = parse(None)
    assert options.values == Constant(0.015)
    assert (options.startup_fill, options.audit, options.strict) == (False, "off", False)


def test_a_spread_makes_reproducible_normal_values():
    values = parse({"mean": 1, "std": 0.5, "seed": 7}).values
    assert isinstance(values, Normal) and (values.mean, values.std, values.seed) == (1, 0.5, 7)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"meen": 1.0}, "unknown option 'meen': known are mean, std, seed, startup_fill, audit"),
        ({"fill_mean": 0.0}, "vLLM's fill_mean is called mean here"),
        ({"audit": "on"}, "audit='on': known are off, plan, bytes"),
        ({"mean": "large"}, "mean='large'"),
        ({"startup_fill": 1}, "startup_fill=1"),
        ({"seed": True}, "seed=True"),
        ({"std": -1.0}, "std=-1.0"),
        ({"mean": float("nan")}, "mean=nan"),
    ],
)
def test_what_cannot_be_is_refused(given, message):
    with pytest.raises(OptionRefused, match=message):
        parse(given)


def test_untested_versions_warn_or_are_refused():
    assert check_version(TESTED[0] + "+cpu", strict=True) is None
    assert f"tested: {TESTED[0]}" in check_version("0.99.0", strict=False)
    with pytest.raises(UntestedVersion, match=r"vLLM 0\.99\.0 was never tested"):
        check_version("0.99.0", strict=True)
