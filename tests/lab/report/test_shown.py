"""Numbers as a report shows them."""

from __future__ import annotations

import pytest

from fedbn_flwr.lab.report.shown import form_of, with_unit


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("test-accuracy", 0.51236, "51.24 %"),
        ("personal-own-accuracy-weighted", 1.0, "100.00 %"),
        ("train-loss", 0.012346, "0.0123"),
        ("test-mae", 12.5, "12.5000"),
        ("train-loss", 12_345_678.0, "1.235e+07"),
        ("test-accuracy", None, "-"),
        ("personal-own-accuracy-clients", 3, "3"),
    ],
)
def test_two_places_in_percent_and_four_without(key: str, value: float | None, text: str) -> None:
    assert with_unit(key, value).replace("\N{NO-BREAK SPACE}", " ") == text


def test_the_sign_of_a_difference() -> None:
    assert f"{-0.5:+{form_of('train-loss')}}" == "-0.5000"
