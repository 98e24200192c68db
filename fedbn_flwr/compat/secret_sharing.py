"""The parts of Flower that masked sums use.

They are key agreement, secret sharing and encryption. No other module imports them. If
a new version of Flower changes them, ``tests/compat/test_secret_sharing.py`` names the
fault. Flower's stream of masks (``pseudo_rand_gen``) is not used, because it folds the
agreed key to 32 bits.
"""

from __future__ import annotations

from cryptography.fernet import InvalidToken
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP384R1,
    EllipticCurvePrivateKey,
    derive_private_key,
)
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import (
    decrypt,
    encrypt,
    generate_shared_key,
)
from flwr.supercore.primitives.asymmetric import (
    bytes_to_public_key,
    generate_key_pairs,
    public_key_to_bytes,
)

__all__ = [
    "InvalidToken",
    "agreed",
    "combine_shares",
    "create_shares",
    "decrypt",
    "encrypt",
    "new_pair",
    "public_of",
]

_BYTES = 48  # length of a secret key on the curve P-384


def new_pair() -> tuple[bytes, bytes]:
    """Return a new secret key of 48 bytes and its public key."""
    secret, public = generate_key_pairs()
    number = secret.private_numbers().private_value
    return number.to_bytes(_BYTES, "big"), public_key_to_bytes(public)


def public_of(secret: bytes) -> bytes:
    """Return the public key of a secret key, or raise ValueError."""
    return public_key_to_bytes(_private(secret).public_key())


def agreed(secret: bytes, public: bytes) -> bytes:
    """Return the key that two owners agree on, as 32 bytes in URL-safe base64.

    Raises:
        ValueError: a key is invalid.
    """
    return generate_shared_key(_private(secret), bytes_to_public_key(public))


def _private(secret: bytes) -> EllipticCurvePrivateKey:
    return derive_private_key(int.from_bytes(secret, "big"), SECP384R1())
