r"""Pairwise masks that cancel in a sum, and secrets that remove the others.

Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine
Learning", Figure 4.

## Algorithm

Client $i$ of a round has two fresh key pairs. The first pair, $s_i$, gives the masks of
the model; its secret key is shared. The second pair, $c_i$, encrypts messages between
clients and gives the masks of a synchronised step's exchanges; its secret key never
leaves the client. $b_i$ is a random seed, $P$ the clients that are still present.

$$y_i = x_i + G(b_i) + \sum_{j \in P, j > i} G(s_{ij}) - \sum_{j \in P, j < i} G(s_{ij}) \mod 2^{64}$$

The sum of all $y_i$ contains only the masks of the seeds. Each other client has a share
of $b_i$ and a share of $s_i$. It gives the server only one of them: the share of $b_i$
if $y_i$ has arrived, and the share of $s_i$ otherwise. $t$ shares give the secret.
Because $t$ is above half of the clients, the server cannot have both secrets of a
client.

An exchange has no mask of a seed. Pair masks of $c$ are never revealed, so the server
gets the sum over all clients or nothing.

$G$ is ChaCha20 with the key HKDF-SHA256(secret, purpose). A stream is used once. The
key includes the server's information about the sum, which is its weights. Therefore
masks do not cancel if the server gives clients different information.
"""

from __future__ import annotations

import ast
import json
import os
from base64 import urlsafe_b64encode
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedbn_flwr.batchnorm.averaging import Array
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
from fedbn_flwr.errors import MaskingError
from fedbn_flwr.privacy.noise import keystream


class PublicKeys(NamedTuple):
    """A client's public keys, s for the model's masks and c for messages."""

    masks: bytes
    channel: bytes


@dataclass
class Party:
    """A client in one round of masked sums, with its secrets and rules for their use.

    ``Party.new`` makes the keys. Call the following methods in the order of the file.
    ``shares``, ``masked``, ``reveal`` and each exchange work only once. All raise
    MaskingError if the server asks for something that the protocol does not allow.

    Attributes:
        server_round: the round.
        publics: its public keys.
        number: its number in the round, from 0.
        threshold: t, the number of shares that give a secret.
    """

    server_round: int
    publics: list[bytes]
    _secrets: list[bytes]
    _stage: str = "keys"
    number: int = 0
    threshold: int = 0
    _others: dict[int, list[bytes]] = field(default_factory=dict)
    _channels: dict[int, bytes] = field(default_factory=dict)
    _seed: bytes = b""
    _own_shares: list[bytes] = field(default_factory=list)
    _present: list[int] | None = None
    _about: str = ""
    _exchanged: list[str] = field(default_factory=list)

    @classmethod
    def new(cls, server_round: int) -> Party:
        """Return a client with fresh keys."""
        (masks, public_masks), (channel, public_channel) = new_pair(), new_pair()
        return cls(server_round, [public_masks, public_channel], [masks, channel])

    def shares(
        self, number: int, keys: Mapping[int, PublicKeys], threshold: int
    ) -> dict[int, bytes]:
        """Return the encrypted shares of this client's secrets, by receiver.

        Args:
            number: this client's number.
            keys: the public keys of all clients of the round, by number.
            threshold: t.
        """
        self._go("keys", "shares")
        size = len(keys)
        if not 2 <= threshold <= size < 2 * threshold:
            raise MaskingError(
                f"a threshold of {threshold} of {size} shares is not allowed: it must be"
                " at least 2, more than half of all shares, and at most all of them. A"
                " lower threshold would give the server a secret of this client"
            )
        # Refuse a key that occurs twice, because two pairs of clients would then have
        # the same masks.
        distinct = {key for pair in keys.values() for key in pair}
        if list(keys.get(number, ())) != self.publics or len(distinct) < 2 * size:
            raise MaskingError(
                "the public keys of the round are not the keys that its clients sent,"
                " or two clients have the same key"
            )
        self.number, self.threshold = number, threshold
        self._others = {
            other: list(pair) for other, pair in keys.items() if other != number
        }

        # Share two secrets: the seed b, and the secret key s whose public key is for
        # the masks.
        self._seed = os.urandom(32)
        of_seed = create_shares(self._seed, threshold, size)
        of_key = create_shares(self._secrets[0], threshold, size)
        pairs = dict(zip(sorted(keys), zip(of_seed, of_key, strict=True), strict=True))
        self._own_shares = list(pairs.pop(number))

        for other, (_, channel) in self._others.items():
            self._channels[other] = _agreed(self._secrets[1], channel)
        return {other: self._encrypted(other, pair) for other, pair in pairs.items()}

    def set_present(self, present: Collection[int], about: str = "") -> None:
        """Note the other clients that are still present.

        Call it for each training message.

        Args:
            present: numbers of the other clients.
            about: the server's information about the sum, equal for all clients.
        """
        self._go("shares", "shares")
        if not set(present) <= self._others.keys() or len(set(present)) < len(present):
            raise MaskingError(
                "the server names a client twice, or a client without keys"
            )
        if len(present) + 1 < self.threshold:
            raise MaskingError(
                f"{len(present) + 1} clients are left, fewer than the required"
                f" {self.threshold}: the sum would reveal too much about each"
            )
        # The masks depend on the members and on this information, so masks with
        # different values would not cancel.
        told, before = (sorted(present), about), (self._present, self._about)
        if self._present is not None and told != before:
            raise MaskingError(
                "the members of the round, or the information about the sum, have"
                " changed within the round"
            )
        self._present, self._about = told

    def exchange(self, tag: str, vector: Array) -> Array:
        """Return the vector of an exchange, int64, with its masks."""
        # Refuse a second vector, because the server would learn the difference of two
        # vectors with the same mask.
        if tag in self._exchanged:
            raise MaskingError(f"exchange '{tag}' was asked for twice")
        self._exchanged.append(tag)
        masked = vector.copy()
        purpose = f"exchange|{self.server_round}|{self._about}|{tag}"
        for other in self._present_others():
            stream = _stream(self._channels[other], purpose, vector.size)
            _add(masked, self.number, other, stream)
        return masked

    def masked(self, vector: Array) -> Array:
        """Return the vector of the model, int64, with its masks."""
        present = self._present_others()
        self._go("shares", "masked")
        masked = vector + seed_mask(self._seed, self.server_round, vector.size)
        secret, told = self._secrets[0], self._about
        for other in present:
            public = self._others[other][0]
            add_pair_mask(
                masked, self.number, other, secret, public, self.server_round, told
            )
        return masked

    def reveal(
        self,
        answered: Collection[int],
        lost: Collection[int],
        encrypted: Mapping[int, bytes],
    ) -> dict[int, bytes]:
        """Return this client's share of each member's secret.

        For a member that answered, it is the share of the seed b. For a lost member, it
        is the share of the key s.

        Args:
            answered: numbers of the clients whose vector has arrived, including this
                client.
            lost: numbers of the other clients.
            encrypted: the shares that each other client has encrypted for this client.
        """
        self._go("masked", "revealed")
        # Reveal one share of each client: both shares of one client would unmask it.
        members = sorted([self.number, *self._present_others()])
        if sorted([*answered, *lost]) != members or self.number not in answered:
            raise MaskingError(
                "the clients that the server names as answered or lost are not exactly"
                " the clients with which this client masked its vector"
            )
        if len(answered) < self.threshold:
            raise MaskingError(
                f"{len(answered)} of the clients answered, fewer than the required"
                f" {self.threshold}: nothing is revealed"
            )
        revealed = {}
        for other in members:
            if other == self.number:
                of_seed, of_key = self._own_shares
            else:
                of_seed, of_key = self._decrypted(other, encrypted)
            revealed[other] = of_seed if other in answered else of_key
        # Delete the secrets. They are not needed any more, and deleted secrets cannot
        # be read.
        self._secrets, self._seed, self._own_shares, self._channels = [], b"", [], {}
        return revealed

    def dump(self) -> bytes:
        """Return this client as bytes, to be stored until its next message."""
        return repr(asdict(self)).encode()

    @classmethod
    def load(cls, data: bytes) -> Party:
        """Return the stored client."""
        return cls(**ast.literal_eval(data.decode()))

    def _go(self, expected: str, stage: str) -> None:
        if self._stage != expected:
            raise MaskingError(
                f"step '{stage}' of a masked sum follows '{expected}', but this client"
                f" has done '{self._stage}' in round {self.server_round}"
            )
        self._stage = stage

    def _present_others(self) -> Sequence[int]:
        if self._present is None:
            raise MaskingError("the members of the round are not known yet")
        return self._present

    def _encrypted(self, other: int, shares: Sequence[bytes]) -> bytes:
        text = json.dumps([self.number] + [share.hex() for share in shares])
        return encrypt(self._envelope(other), text.encode())

    def _decrypted(self, other: int, encrypted: Mapping[int, bytes]) -> list[bytes]:
        try:
            text = decrypt(self._envelope(other), encrypted[other])
            sender, *shares = json.loads(text)
        except (KeyError, InvalidToken, ValueError) as error:
            raise MaskingError(
                f"the shares of client {other} cannot be read: {type(error).__name__}"
            ) from error
        # Check the sender. If two clients had the same key, these shares could be this
        # client's own.
        if sender != other:
            raise MaskingError(
                f"client {sender}'s shares were delivered as shares of client {other}"
            )
        return [bytes.fromhex(share) for share in shares]

    def _envelope(self, other: int) -> bytes:
        """Return the key for messages between two clients, in Fernet's format."""
        key = _derived(self._channels[other], f"shares|{self.server_round}")
        return urlsafe_b64encode(key)


def about(total: float, equal: bool) -> str:
    """Return the information about a sum, its weights, as a text."""
    return f"{total!r}|{'equal' if equal else 'examples'}"


def seed_mask(seed: bytes, server_round: int, size: int) -> Array:
    """Return G(b), a vector of ``size`` integers, uniform over the ring."""
    return _stream(seed, f"seed|{server_round}", size)


def add_pair_mask(
    total: Array,
    number: int,
    other: int,
    secret: bytes,
    public: bytes,
    server_round: int,
    about: str = "",
) -> None:
    """Add G(s_ij) to ``total``, with the sign for client ``number``.

    Args:
        total: int64 vector, changed in place.
        number: the client that adds the mask.
        other: the client that shares the mask.
        secret: the secret key of one of the two clients.
        public: the public key of the other client.
        server_round: the round.
        about: the information about the sum for the clients.
    """
    purpose = f"pair|{server_round}|{about}"
    _add(total, number, other, _stream(_agreed(secret, public), purpose, total.size))


def recovered_seed(shares: Sequence[bytes]) -> bytes:
    """Return b, given t shares.

    Raises:
        MaskingError: the shares do not belong to one secret.
    """
    try:
        return combine_shares(list(shares))
    except (ValueError, IndexError, TypeError) as error:
        raise MaskingError(
            f"the shares of a client's secret do not fit: {error}"
        ) from error


def recovered_key(shares: Sequence[bytes], public: bytes) -> bytes:
    """Return the secret key s, given t shares and the public key.

    Raises:
        MaskingError: the shares do not belong to this key.
    """
    secret = recovered_seed(shares)
    try:
        fits = public_of(secret) == public
    except ValueError:
        # The secret is not a key.
        fits = False
    if not fits:
        raise MaskingError("the shares of a lost client do not belong to its key")
    return secret


def _agreed(secret: bytes, public: bytes) -> bytes:
    try:
        return agreed(secret, public)
    except (ValueError, TypeError) as error:
        raise MaskingError(f"a public key cannot be read: {error}") from error


def _add(total: Array, number: int, other: int, stream: Array) -> None:
    """Add a pair's mask in place for the lower number, subtract it for the other."""
    if number < other:
        np.add(total, stream, out=total)
    else:
        np.subtract(total, stream, out=total)


def _derived(secret: bytes, purpose: str) -> bytes:
    """Return a key for one purpose, independent of keys for other purposes."""
    return HKDF(SHA256(), 32, None, f"fedbn-flwr|{purpose}".encode()).derive(secret)


def _stream(secret: bytes, purpose: str, size: int) -> Array:
    return np.frombuffer(keystream(_derived(secret, purpose), 8 * size), "<i8")
