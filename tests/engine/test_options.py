"""Options and versions: what is unknown is refused with what is known, before anything is allocated."""

import pytest

from decodebench.cache.values import Constant, Normal
from decodebench.vllm import compat
from decodebench.vllm.compat import TESTED, IncompatibleVersion, UntestedVersion, check_version
from decodebench.vllm.options import OptionRefused, parse


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


def test_untested_versions_are_refused_where_strict():
    assert all(check_version(release + "+cpu", strict=True) is None for release in TESTED)
    with pytest.raises(UntestedVersion, match=r"vLLM 0\.99\.0 was never tested.*tested: 0\.30\.0, "):
        check_version("0.99.0", strict=True)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("mean=1", "kv_connector_extra_config='mean=1': give a dictionary"),
        ([1], "give a dictionary of options, mean"),
        ({"std": 10**400}, "option std=1000.*at most 64 bits"),
        ({"seed": 2**64}, "option seed=18446744073709551616.*at most 64 bits"),
        ({"seed": -1}, "option seed=-1: expected a whole number of 0 or more"),
        ({"audit_file": ""}, "option audit_file='': expected the path of a file"),
        ({"audit_file": "a\0b"}, "expected the path of a file"),
        ({"mean": "a" * 100_000}, "option mean='aaaa"),
    ],
)
def test_values_of_the_wrong_kind_or_size_are_refused_in_a_short_line(config, words):
    with pytest.raises(OptionRefused, match=words) as error:
        parse(config)
    assert len(str(error.value)) < 300 and "\n" not in str(error.value)


def test_an_untested_version_starts_with_a_warning_if_the_protocol_is_the_same(monkeypatch):
    monkeypatch.setattr(compat, "self_test", lambda: [])
    assert "passed the self-test" in check_version("0.99.0", strict=False)
    monkeypatch.setattr(compat, "self_test", lambda: ["MambaSpec has no shapes", "Request has no num_tokens"])
    with pytest.raises(
        IncompatibleVersion, match=r"MambaSpec has no shapes; Request has no num_tokens; use one of"
    ):
        check_version("0.99.0", strict=False)
