"""The masks of a round cancel in sums, hide each vector and never repeat.

A client follows the protocol.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedbn_flwr.batchnorm.averaging import Array
from fedbn_flwr.errors import MaskingError
from fedbn_flwr.privacy.masks import (
    Party,
    PublicKeys,
    add_pair_mask,
    recovered_key,
    recovered_seed,
    seed_mask,
)

THRESHOLD = 3


def parties_of(
    size: int, threshold: int = THRESHOLD, server_round: int = 1
) -> tuple[list[Party], list[dict[int, bytes]]]:
    """Return clients with keys and shares, and their encrypted shares."""
    parties = [Party.new(server_round) for _ in range(size)]
    keys = keys_of(parties)
    encrypted = [
        party.shares(number, keys, threshold) for number, party in enumerate(parties)
    ]
    for number, party in enumerate(parties):
        party.set_present(set(range(size)) - {number})
    return parties, encrypted


def keys_of(parties: list[Party]) -> dict[int, PublicKeys]:
    return {number: PublicKeys(*party.publics) for number, party in enumerate(parties)}


def for_(receiver: int, encrypted: list[dict[int, bytes]]) -> dict[int, bytes]:
    return {
        sender: own[receiver]
        for sender, own in enumerate(encrypted)
        if sender != receiver
    }


def unmasked(
    parties: list[Party],
    encrypted: list[dict[int, bytes]],
    vectors: Mapping[int, Array],
    threshold: int = THRESHOLD,
) -> Array:
    """Do the server's work: collect shares, rebuild secrets, remove the masks."""
    answered, lost = sorted(vectors), sorted(set(range(len(parties))) - set(vectors))
    shares: dict[int, list[bytes]] = {number: [] for number in range(len(parties))}
    for number in answered:
        for owner, share in (
            parties[number].reveal(answered, lost, for_(number, encrypted)).items()
        ):
            shares[owner].append(share)
    total = np.sum(list(vectors.values()), axis=0, dtype=np.int64)
    keys = keys_of(parties)
    for number in answered:
        total -= seed_mask(recovered_seed(shares[number][:threshold]), 1, total.size)
    for number in lost:
        secret = recovered_key(shares[number][:threshold], keys[number].masks)
        for other in answered:
            add_pair_mask(total, number, other, secret, keys[other].masks, 1)
    return total


@settings(deadline=None, max_examples=8)
@given(
    size=st.integers(3, 5),
    lost=st.integers(0, 2),
    length=st.integers(1, 40),
    seed=st.integers(0, 2**32),
)
def test_the_masks_cancel_whoever_is_lost(
    size: int, lost: int, length: int, seed: int
) -> None:
    threshold = size // 2 + 1
    lost = min(lost, size - threshold)
    parties, encrypted = parties_of(size, threshold)
    generator = np.random.default_rng(seed)
    plain = generator.integers(-(2**61), 2**61, (size, length))
    masked = {
        number: party.masked(plain[number]) for number, party in enumerate(parties)
    }
    for number in generator.choice(size, lost, replace=False):
        del masked[int(number)]
    found = unmasked(parties, encrypted, masked, threshold)
    assert np.array_equal(
        found, np.sum([plain[number] for number in masked], axis=0, dtype=np.int64)
    )


def test_the_masks_of_an_exchange_cancel() -> None:
    parties, _ = parties_of(4)
    plain = np.random.default_rng(0).integers(-(2**61), 2**61, (4, 9))
    for tag in ("mean/0", "variance/0"):
        sent = [
            party.exchange(tag, own) for party, own in zip(parties, plain, strict=True)
        ]
        assert np.array_equal(
            np.sum(sent, axis=0, dtype=np.int64), np.sum(plain, axis=0, dtype=np.int64)
        )
        assert not np.array_equal(
            np.sum(sent[:3], axis=0, dtype=np.int64),
            np.sum(plain[:3], axis=0, dtype=np.int64),
        )


def test_a_masked_vector_is_uniform_and_no_stream_comes_twice() -> None:
    """The bytes of a masked zero are uniform.

    The streams of two rounds and of all exchanges have no word in common.
    """
    size = 4096
    zero = np.zeros(size, np.int64)
    streams = []
    for server_round in (1, 2):
        parties, _ = parties_of(3, 2, server_round)
        streams += [
            parties[0].exchange(tag, zero) for tag in ("mean/0", "mean/1", "variance/0")
        ]
        streams += [party.masked(zero) for party in parties]
    for stream in streams:
        counts = np.bincount(stream.view(np.uint8), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-6
    for one, other in combinations(streams, 2):
        assert not np.isin(one, other).any()
        assert not np.isin(one, -other).any()


def test_a_client_survives_between_two_messages() -> None:
    parties, encrypted = parties_of(3, 2)
    plain = np.arange(6).reshape(3, 2)
    kept = [Party.load(party.dump()) for party in parties]
    tensors = [
        Party.load(party.dump()).exchange("mean/0", own)
        for party, own in zip(kept, plain, strict=True)
    ]
    assert np.sum(tensors, axis=0).tolist() == [6, 9]
    masked = {number: party.masked(plain[number]) for number, party in enumerate(kept)}
    kept = [Party.load(party.dump()) for party in kept]
    assert unmasked(kept, encrypted, masked, 2).tolist() == [6, 9]


def test_fewer_shares_than_the_threshold_give_no_secret() -> None:
    parties, encrypted = parties_of(4)
    for party in parties:
        party.masked(np.zeros(1, np.int64))
    shares = [
        party.reveal(range(4), [], for_(number, encrypted))[0]
        for number, party in enumerate(parties)
    ]
    seeds = [recovered_seed(list(some)) for some in combinations(shares, 3)]
    assert len(set(seeds)) == 1
    for two in combinations(shares, 2):
        try:
            assert recovered_seed(list(two)) != seeds[0]
        except MaskingError:
            continue


def test_a_share_of_another_key_is_noticed() -> None:
    parties, encrypted = parties_of(4)
    for party in parties:
        party.masked(np.zeros(1, np.int64))
    shares = [
        parties[n].reveal([0, 1, 2], [3], for_(n, encrypted))[3] for n in (0, 1, 2)
    ]
    assert recovered_key(shares, parties[3].publics[0])
    with pytest.raises(MaskingError, match="do not belong to its key"):
        recovered_key(shares, parties[2].publics[0])


REFUSED = {
    "a threshold of half": (4, 2, {}, "a threshold of 2 of 4 shares is not allowed"),
    "a threshold of one": (1, 1, {}, "a threshold of 1 of 1 shares is not allowed"),
    "fewer clients than shares needed": (
        3,
        4,
        {},
        "a threshold of 4 of 3 shares is not allowed",
    ),
    "its own key is another one": (
        4,
        3,
        {0: 1},
        "public keys of the round are not the keys that its clients sent",
    ),
    "a key comes twice": (
        4,
        3,
        {2: 1},
        "public keys of the round are not the keys that its clients sent",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_client_refuses_to_share_its_secrets(case: str) -> None:
    size, threshold, swapped, message = REFUSED[case]
    parties = [Party.new(1) for _ in range(size)]
    keys = keys_of(parties)
    keys |= {number: keys[other] for number, other in swapped.items()}
    with pytest.raises(MaskingError, match=message):
        parties[0].shares(0, keys, threshold)


@pytest.mark.parametrize(
    ("answered", "lost", "message"),
    [
        ([0, 1, 2, 3], [3], "not exactly the clients with which"),
        ([0, 1, 1], [2, 3], "not exactly the clients with which"),
        ([0, 1, 2], [], "not exactly the clients with which"),
        ([0, 1, 2], [3, 4], "not exactly the clients with which"),
        ([1, 2, 3], [0], "not exactly the clients with which"),
        (
            [0, 1],
            [2, 3],
            "2 of the clients answered, fewer than the required 3: nothing is revealed",
        ),
    ],
)
def test_a_client_refuses_to_reveal(
    answered: Collection[int], lost: Collection[int], message: str
) -> None:
    parties, encrypted = parties_of(4)
    parties[0].masked(np.zeros(1, np.int64))
    with pytest.raises(MaskingError, match=message):
        parties[0].reveal(answered, lost, for_(0, encrypted))


def test_a_client_does_each_step_once() -> None:
    """Repeating a step would unmask the first vector.

    The repetition is a second vector under the same masks, or a second answer with
    other lists.
    """
    parties, encrypted = parties_of(3, 2)
    zero, everyone = np.zeros(1, np.int64), keys_of(parties)
    with pytest.raises(
        MaskingError, match="step 'shares' of a masked sum follows 'keys'"
    ):
        parties[0].shares(0, everyone, 2)
    with pytest.raises(
        MaskingError, match="step 'revealed' of a masked sum follows 'masked'"
    ):
        parties[1].reveal([0, 1, 2], [], for_(1, encrypted))
    parties[0].masked(zero)
    with pytest.raises(
        MaskingError, match=r"step 'shares' of .* this client has done 'masked'"
    ):
        parties[0].set_present([1, 2])
    with pytest.raises(
        MaskingError, match="step 'masked' of a masked sum follows 'shares'"
    ):
        parties[0].masked(zero)
    parties[0].reveal([0, 1], [2], for_(0, encrypted))
    with pytest.raises(
        MaskingError, match="step 'revealed' of a masked sum follows 'masked'"
    ):
        parties[0].reveal([0, 1, 2], [], for_(0, encrypted))


def test_a_client_refuses_other_or_too_few_members() -> None:
    parties, _ = parties_of(4)
    with pytest.raises(
        MaskingError, match="2 clients are left, fewer than the required 3"
    ):
        parties[0].set_present([1])
    with pytest.raises(
        MaskingError, match="names a client twice, or a client without keys"
    ):
        parties[0].set_present([1, 2, 7])
    with pytest.raises(
        MaskingError,
        match="members of the round, or the information about the sum, have changed",
    ):
        parties[0].set_present([1, 2])
    with pytest.raises(
        MaskingError,
        match="members of the round, or the information about the sum, have changed",
    ):
        parties[0].set_present([1, 2, 3], "other range")
    with pytest.raises(
        MaskingError, match="names a client twice, or a client without keys"
    ):
        parties[0].set_present([1, 1])


def test_masks_of_clients_that_were_told_different_things_do_not_cancel() -> None:
    """A range that only one client gets would reveal its numbers in the sum."""
    parties = [Party.new(1) for _ in range(3)]
    for number, party in enumerate(parties):
        party.shares(number, keys_of(parties), 2)
    for same in (True, False):
        for number, party in enumerate(parties):
            party._present = None
            party.set_present(
                {0, 1, 2} - {number}, "same" if same else f"about {number}"
            )
        zero = np.zeros(50, np.int64)
        total = np.sum(
            [party.exchange(f"{same}", zero) for party in parties],
            axis=0,
            dtype=np.int64,
        )
        assert (total == 0).all() == same


@pytest.mark.parametrize("shares", [[1, 2, 3], ["ab", "cd", "ef"], [b"", b"", b""]])
def test_shares_that_are_none_are_an_error_of_the_masks(shares: list[Any]) -> None:
    for recover in (recovered_seed, lambda own: recovered_key(own, b"")):
        with pytest.raises(MaskingError):
            recover(shares)


def test_shares_that_were_sent_to_another_client_are_refused() -> None:
    parties, encrypted = parties_of(3, 2)
    for party in parties:
        party.masked(np.zeros(1, np.int64))
    with pytest.raises(MaskingError, match="the shares of client 1 cannot be read"):
        parties[0].reveal([0, 1, 2], [], {1: encrypted[1][2], 2: encrypted[2][0]})
