"""The mapping of the transports: what a setting allows, and what each says of itself."""

from __future__ import annotations

import typing

import pytest

from fedbn_flwr.server.methods.method_params import FedTANParams
from fedbn_flwr.strategies import FedTAN
from fedbn_flwr.transport.transports import TRANSPORTS


def test_the_setting_allows_the_names_of_the_mapping() -> None:
    allowed = FedTANParams.model_fields["fedtan_transport"].annotation
    assert typing.get_args(allowed) == tuple(TRANSPORTS)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_method_says_of_its_transport_what_the_mapping_says(name: str) -> None:
    whole = FedTAN(fedtan_transport=name).methods.whole
    assert whole.needs_all_at_once is TRANSPORTS[name].all_at_once
