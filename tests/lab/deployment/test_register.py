"""``docker/register.py`` registers the nodes in the SuperLink's list of its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import module_from_spec, spec_from_file_location

import flwr
import pytest

from tests.support.checkout import ROOT

if tuple(int(number) for number in flwr.__version__.split(".")[:2]) < (1, 41):
    pytest.skip("register.py serves Flower from 1.41 on", allow_module_level=True)

from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListNodesResponse,
    RegisterNodeRequest,
    RegisterNodeResponse,
    UnregisterNodeRequest,
)
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.constant import NodeStatus

SPEC = spec_from_file_location("register", ROOT / "docker/register.py")
register = module_from_spec(SPEC)
SPEC.loader.exec_module(register)


class SuperLink:
    """A Control API with a list of nodes, as in Flower 1.41."""

    def __init__(self, nodes: Mapping[bytes, str]) -> None:
        self.status = dict(nodes)

    def ListNodes(self, request: ListNodesRequest) -> ListNodesResponse:  # noqa: N802
        return ListNodesResponse(
            nodes_info=[
                NodeInfo(node_id=number, public_key=key, name="n", status=status)
                for number, (key, status) in enumerate(self.status.items(), 1)
            ]
        )

    def RegisterNode(  # noqa: N802
        self, request: RegisterNodeRequest
    ) -> RegisterNodeResponse:
        assert request.public_key not in self.status, "Flower refuses it"
        assert request.name
        self.status[request.public_key] = NodeStatus.REGISTERED
        return RegisterNodeResponse(node_id=len(self.status))

    def UnregisterNode(self, request: UnregisterNodeRequest) -> None:  # noqa: N802
        key = list(self.status)[request.node_id - 1]
        assert self.status[key] != NodeStatus.UNREGISTERED, "Flower refuses it"
        self.status[key] = NodeStatus.UNREGISTERED

    def close(self) -> None:
        self.closed = True


def test_the_superlink_has_the_nodes_of_the_folder_and_no_others(monkeypatch) -> None:
    """A key that was unregistered stays out forever without an error."""
    on, off = NodeStatus.ONLINE, NodeStatus.UNREGISTERED
    server = SuperLink({b"stays": on, b"goes": on, b"went": off, b"back": off})
    monkeypatch.setattr(register, "read_superlink_connection", str)
    monkeypatch.setattr(
        register, "init_http_client_from_connection", lambda connection: server
    )
    wanted = {"node-1": b"stays", "node-2": b"back", "node-3": b"comes"}
    for _ in range(2):
        lines = register.register_exactly("here", wanted)
        assert {key for key, status in server.status.items() if status != off} == {
            b"stays",
            b"comes",
        }
        assert [line.partition(":")[0] for line in lines][-3:] == list(wanted)
    assert server.closed


def test_an_empty_folder_unregisters_nobody(tmp_path) -> None:
    with pytest.raises(SystemExit) as refused:
        register.main("x", str(tmp_path))
    assert str(tmp_path) in str(refused.value)
