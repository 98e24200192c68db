"""With masked sums over a network, no server gets a single client's number.

This applies to the SuperLink and the ServerApp.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apps.local_federation import LocalFederation
from fedbn_flwr.batchnorm.parts import split_state
from fedbn_flwr.engines.flower_run import flower_run
from fedbn_flwr.privacy.coordinates import Coordinates
from fedbn_flwr.privacy.ring import FixedPoint

pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.xdist_group("network")]
ROOT = Path(__file__).parents[3]
APP = ROOT / "tests" / "support" / "masked_app"
POINT = FixedPoint(34.0)


@contextmanager
def watched(folder: Path) -> Iterator[dict[bytes, None]]:
    """Yield the distinct pages of the SuperLink's files during the block.

    They are in the order of their appearance.
    """
    pages: dict[bytes, None] = {}
    over = threading.Event()

    def watch() -> None:
        while True:
            done = over.is_set()
            for path in folder.glob("superlink.db*"):
                if path.is_file():
                    data = path.read_bytes()
                    pages.update(
                        dict.fromkeys(
                            data[i : i + 4096] for i in range(0, len(data), 4096)
                        )
                    )
            if done:
                return
            over.wait(0.1)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield pages
    finally:
        over.set()
        thread.join()


def forms(spy: Path) -> Iterator[bytes]:
    """Yield pieces of 40 bytes of each number that a client computed.

    The numbers are floats, and in fixed point without masks.
    """
    for path in spy.glob("client-*.npz"):
        kept: dict[str, Any] = dict(np.load(path))
        after, before = _named(kept, "after "), _named(kept, "before ")
        numbers = [after]
        if before:
            coordinates = Coordinates(before, split_state(before), scale=1.0)
            numbers.append(coordinates.update(after))
            numbers.append({name: after[name] - before[name] for name in after})
        for own in numbers:
            for array in own.values():
                if array.dtype.kind == "f" and array.size > 9:
                    yield from _pieces(array, float(kept["weight"]))


def _named(kept: dict[str, Any], word: str) -> dict[str, Any]:
    return {n.removeprefix(word): a for n, a in kept.items() if n.startswith(word)}


def _pieces(array: Any, weight: float) -> Iterator[bytes]:
    """Yield a piece from the start and the middle of each form, unless mostly zeros."""
    for numbers in (
        array.astype(np.float32),
        array.astype(np.float64),
        POINT.vector({"x": array}, weight),
    ):
        data = numbers.tobytes()
        for at in (0, len(data) // 2 // 8 * 8 - 40):
            piece = data[at : at + 40]
            if len(piece.strip(b"\0")) > 20:
                yield piece


def test_neither_superlink_nor_server_see_a_clients_numbers(
    federation: LocalFederation, tmp_path: Path
) -> None:
    """The same search finds the numbers of a run without masks.

    That run is the second, because its pages stay in the database.
    """
    found = {}
    for masked in (True, False):
        spy = tmp_path / str(masked)
        spy.mkdir()
        with watched(federation.folder) as pages:
            federation.run({"masked": masked, "spy-dir": str(spy)}, app=APP)
        assert (spy / "participants").read_text() == "[0, 1, 2]"
        pieces = set(forms(spy))
        database, received = b"".join(pages), (spy / "received").read_bytes()
        assert len(database) > 10**5
        found[masked] = [
            sum(piece in database for piece in pieces),
            sum(piece in received for piece in pieces),
        ]
    assert min(found[False]) > 20
    assert found[True] == [0, 0]


@pytest.mark.parametrize("engine", ["network", "ray"])
def test_a_lost_client_is_recovered_and_too_many_end_the_round(
    engine: str, federation: LocalFederation, tmp_path: Path
) -> None:
    def run(name: str, lost: str, masked: bool) -> Path:
        spy = tmp_path / name
        spy.mkdir()
        config = {
            "masked": masked,
            "spy-dir": str(spy),
            "method": "fedavg",
            "lost": lost,
        }
        if engine == "network":
            federation.run(config, app=APP)
        else:
            nodes = {
                "num-supernodes": 3,
                "client-resources-num-cpus": 2,
                "init-args-num-cpus": 2,
            }
            flower_run(APP, run_config=config, federation_config=nodes)
        return spy

    for lost, left in (("", [0, 1, 2]), ("1", [0, 2])):
        ours = run(f"{lost}-True", lost, True)
        plain = run(f"{lost}-False", lost, False)
        assert [
            json.loads((spy / "participants").read_text()) for spy in (ours, plain)
        ] == [left, left]
        one = dict(np.load(ours / "final.npz"))
        other = dict(np.load(plain / "final.npz"))
        for entry in (entry for entry in one if "num_batches" not in entry):
            np.testing.assert_allclose(
                one[entry], other[entry], rtol=2e-6, atol=2e-7, err_msg=entry
            )
        received, pieces = (ours / "received").read_bytes(), set(forms(ours))
        assert len(pieces) > 20
        assert not any(piece in received for piece in pieces)
    spoilt = run("too many", "0,1", True)
    assert (
        "1 of the clients answered, fewer than the required 2"
        in (spoilt / "error").read_text()
    )
