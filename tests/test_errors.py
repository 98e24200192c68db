"""Error messages and the base class."""

from __future__ import annotations

import pickle

import pytest

from fedbn_flwr import errors


def test_unknown_name_suggests_the_nearest() -> None:
    for kind, name, known, said in (
        (
            "strategy",
            "fixbm",
            ["fedavg", "fixbn"],
            "'fixbm'. Did you mean 'fixbn'? Allowed: fedavg, fixbn.",
        ),
        (
            "strategy",
            "fedbm",
            ["fedavg", "fedbs", "fedbn"],
            "'fedbm'. Did you mean 'fedbs' or 'fedbn'? Allowed: fedavg, fedbn, fedbs.",
        ),
        ("strategy", 3, iter(["b", "a"]), "3. Allowed: a, b."),
        (
            "client",
            "west",
            ["west", "east"],
            "'west'. Did you mean 'east'? Allowed: east, west.",
        ),
    ):
        error = errors.unknown_name(kind, name, known)
        assert str(error) == f"unknown {kind} {said}"


def test_a_config_error_of_a_client_is_found_in_the_texts_of_all_engines() -> None:
    """In process and Ray name Flower's exception, a SuperNode the app's."""

    @errors.NamedConfigErrors()
    def client() -> None:
        raise errors.ConfigError("agc=-1")

    with (
        pytest.raises(errors.ConfigError, match=r"^\[clients-config\] agc=-1$"),
        errors.NamedConfigErrors(),
    ):
        client()
    flower = (
        "<class 'ClientAppException'>:<'\nException ClientAppException occurred."
        " Message: "
    )
    ray = "ray::run() (pid={})\nfedbn_flwr.errors.ConfigError: [clients-config] agc=-1"
    ray += "\n\nThe above exception was the direct cause"
    for reasons in (
        [f"{flower}[clients-config] agc=-1'>"] * 2,
        [
            "<class 'fedbn_flwr.errors.ConfigError'>:<'agc=-1'>",
            "<class 'a.ConfigError'>:<'[clients-config] agc=-1'>",
        ],
        [ray.format(1), ray.format(2)],
    ):
        with pytest.raises(errors.ConfigError, match=r"^agc=-1\n\(All 2 clients"):
            errors.raise_shared_config_error(reasons, 2)
        errors.raise_shared_config_error(reasons, 3)
        errors.raise_shared_config_error([*reasons[:1], "[clients-config] agc=-2"], 2)
    said = r"^agc=-1\n\(The client that was asked raised this error\.\)$"
    with pytest.raises(errors.ConfigError, match=said):
        errors.raise_shared_config_error(["[clients-config] agc=-1"], 1)
    errors.raise_shared_config_error(["disk full"] * 2, 2)
    errors.raise_shared_config_error([], 0)


def test_each_class_has_a_code_of_its_own_and_an_error_may_have_a_finer_one() -> None:
    """Each can be caught by the base class."""
    codes = []
    for name in errors.__all__:
        if name.endswith("Error"):
            kind = getattr(errors, name)
            assert issubclass(kind, errors.FedBNError), name
            codes.append(kind.code)
    assert len({*codes}) == len(codes)
    assert errors.ConfigError("lr=-1").code == "config"
    assert errors.unknown_name("strategy", "x", ["a"]).code == "unknown-name"
    diverged = pickle.loads(pickle.dumps(errors.DivergedError("nan", 3)))
    assert (diverged.code, diverged.diverged_at) == ("diverged", 3)


def test_a_code_on_which_the_server_acts_is_found_in_the_reason_of_a_reply() -> None:
    holds_nan = errors.ReplyError("entry 'x' holds nan", code=errors.NOT_FINITE)
    assert str(holds_nan) == "entry 'x' holds nan"
    assert errors.code_of(holds_nan.reason) == errors.NOT_FINITE
    around = errors.StateError(f"app error:<'{holds_nan.reason}'>")
    assert around.code == errors.NOT_FINITE
    assert pickle.loads(pickle.dumps(holds_nan)).reason == holds_nan.reason
    code, text = errors.split_code(f"node 1: {holds_nan.reason}")
    assert code == errors.NOT_FINITE
    assert text == "node 1: entry 'x' holds nan"
    finer = errors.ConfigError("agc=-1", code="agc-range")
    assert (finer.reason, errors.code_of("a [list] of things")) == ("agc=-1", None)
