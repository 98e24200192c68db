"""An activation of a node's key by Flower's Fleet API, to check the node.

No other module imports it. If a new version of Flower changes it,
``tests/compat/test_node_key.py`` names the fault.

In Flower 1.41, the SuperLink activates a key that is registered and not online. It
answers with the same error (2004) for keys that are not registered and keys that are
online, and then changes nothing. A node has no other way to ask about a key. An
activation that is not ended lasts two heartbeat intervals, at least 20 s each.
"""

from __future__ import annotations

from contextlib import suppress

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.common.constant import HEARTBEAT_MIN_INTERVAL
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.interceptors.http.utils import add_headers
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.client import (
    ProtobufCall,
    ProtobufClientInterceptor,
    ProtobufRequestContext,
)
from flwr.supercore.runtime_version_compatibility import RuntimeVersionMetadata
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

REFUSED = "refused"


class RefusedKey(Exception):
    """The SuperLink did not activate a key.

    Attributes:
        code: ``REFUSED`` if the key is not registered or is online; empty for another
            answer.
    """

    def __init__(self, text: str, code: str = "") -> None:
        super().__init__(text)
        self.code = code


def private_key(content: bytes) -> ec.EllipticCurvePrivateKey:
    """Return the key in the file of ``flower-supernode --auth-supernode-private-key``.

    Raises:
        ValueError: it is not an OpenSSH key on an elliptic curve, or has a password.
    """
    try:
        key = load_ssh_private_key(content, None)
    except (UnsupportedAlgorithm, TypeError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("it is not a key on an elliptic curve")
    return key


def public_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return the public key that identifies the node for the SuperLink."""
    return public_key_to_bytes(key.public_key())


def try_key(
    address: str, root_certificates: bytes | None, key: ec.EllipticCurvePrivateKey
) -> None:
    """Activate a key and end the activation immediately, without other requests.

    Args:
        address: ``host:port`` of the SuperLink.
        root_certificates: PEM, or None without TLS.
        key: the node's private key, for signing both requests.

    Raises:
        RefusedKey: the SuperLink did not activate the key.
        httpx.HTTPError: the SuperLink does not answer.
    """
    signed: list[ProtobufClientInterceptor] = [
        _Version(),
        NodeAuthHttpInterceptor(key, key.public_key()),
    ]
    insecure = root_certificates is None
    with FleetHttpClient.from_server_address(
        address, insecure, root_certificates, interceptors=signed
    ) as client:
        request = ActivateNodeRequest(
            public_key=public_bytes(key), heartbeat_interval=HEARTBEAT_MIN_INTERVAL
        )
        try:
            node_id = client.ActivateNode(request).node_id
        except httpx.HTTPStatusError as error:
            refusal = FlowerError.from_json(error.response.text)
            # An answer that is not Flower's may come from a proxy.
            if refusal is None:
                text = f"HTTP {error.response.status_code}: {error.response.text[:200]}"
                raise RefusedKey(text) from error
            refused = refusal.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED
            raise RefusedKey(refusal.message, REFUSED if refused else "") from error
        # Undo the activation. Otherwise, it would prevent the node from connecting for
        # a while. Ignore a failure, because an activation ends by itself.
        with suppress(httpx.HTTPError):
            client.DeactivateNode(DeactivateNodeRequest(node_id=node_id))


class _Version:
    """Adds the version of Flower to a request, as a SuperNode does.

    Flower's own interceptor would end the process after a refusal.
    """

    def intercept(
        self, context: ProtobufRequestContext, call_next: ProtobufCall
    ) -> httpx.Response:
        """Add the headers."""
        version = RuntimeVersionMetadata.from_local_component("SuperNode")
        add_headers(context.request, dict(version.as_metadata()))
        return call_next(context)
