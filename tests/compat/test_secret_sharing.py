"""Canary: Flower's key agreement, secret sharing and encryption.

They must still do the work that masked sums need.
"""

from __future__ import annotations

import contextlib

import pytest

from fedbn_flwr.compat.secret_sharing import (
    InvalidToken,
    agreed,
    combine_shares,
    create_shares,
    decrypt,
    encrypt,
    new_pair,
    public_of,
)


def test_two_owners_of_keys_agree_on_one_that_others_do_not_have() -> None:
    (one, public_one), (other, public_other), (third, _) = (
        new_pair(),
        new_pair(),
        new_pair(),
    )
    assert (
        agreed(one, public_other)
        == agreed(other, public_one)
        != agreed(third, public_one)
    )
    assert len(agreed(one, public_other)) == 44, "32 bytes in base64"
    assert (len(one), public_of(one)) == (48, public_one)
    with pytest.raises(ValueError, match="PEM"):
        agreed(one, b"no key")


def test_shares_give_a_secret_from_the_threshold_on() -> None:
    secret = bytes(range(48))
    shares = create_shares(secret, 3, 5)
    assert combine_shares(shares[:3]) == combine_shares(shares[2:]) == secret
    with contextlib.suppress(ValueError):
        assert combine_shares(shares[:2]) != secret


def test_what_is_encrypted_only_its_key_opens() -> None:
    (one, public_one), (other, _), (third, _) = new_pair(), new_pair(), new_pair()
    sealed = encrypt(agreed(other, public_one), b"share")
    assert decrypt(agreed(one, public_of(other)), sealed) == b"share"
    assert b"share" not in sealed
    with pytest.raises(InvalidToken):
        decrypt(agreed(third, public_one), sealed)
