"""All measurements of one diagnosis, and the known facts about the training."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedbn_flwr.doctor.by_batch import Distance
from fedbn_flwr.doctor.clients import ClientExamples
from fedbn_flwr.doctor.mismatch import Mismatch
from fedbn_flwr.doctor.sites import SiteRow
from fedbn_flwr.doctor.state import Missed


@dataclass(frozen=True)
class Training:
    """Facts about the training and the tests of the model.

    Attributes:
        local_steps: the number E of local steps in a round; 0 means unknown.
        batch_size: examples in a step; 0 means the batch size of the loaders.
        method: name of the method, for texts.
        handled: ids of the findings that the method already remedies. They become
            notes.
        tested_by_batch: whether the first test of a run uses statistics of the test
            batch.
        protected: whether the run protects its clients. They are then not compared.
        initial: the state before the training. It shows which layers did not train.
    """

    local_steps: int = 0
    batch_size: int = 0
    method: str = ""
    handled: frozenset[str] = frozenset()
    tested_by_batch: bool = False
    protected: bool = False
    initial: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass
class Measurements:
    """All measurements. None and empty values mean not measured.

    Attributes:
        training: how the model is trained.
        clients: the examples of the clients.
        counters: see ``state.averaged_counters``.
        unusable: see ``state.unusable_statistics``.
        diverged: whether a weight is not finite.
        extremes: see ``state.variance_extremes``.
        unmoved: see ``state.unmoved``.
        momenta: momentum of the layers that training updates, by path; None means an
            average over all batches.
        missed: see ``state.missed_entries``.
        in_eval: BatchNorm layers that stay in eval mode even in training. The rules for
            batches and clients leave them out.
        moving: frozen BatchNorm layers whose statistics move.
        trained: the words of ``train_only`` that select the parameters that train.
        training_layers: BatchNorm layers that were in train mode when the model was
            passed.
        untracked: BatchNorm layers without running statistics.
        num_layers: number of BatchNorm layers.
        first_layer: path of the first BatchNorm layer in the state.
        noise: noise of a batch by layer, averaged over the clients.
        sites: the table of the clients.
        gap: the mismatch of training and test.
        running: by layer, the distance of the running statistics from the statistics of
            all clients' batches.
    """

    training: Training = field(default_factory=Training)
    clients: Sequence[ClientExamples] = ()
    counters: Mapping[str, str] = field(default_factory=dict)
    unusable: Mapping[str, str] = field(default_factory=dict)
    diverged: bool = False
    extremes: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    unmoved: Mapping[str, int] = field(default_factory=dict)
    momenta: Mapping[str, float | None] = field(default_factory=dict)
    missed: Missed | None = None
    in_eval: Collection[str] = ()
    moving: Sequence[str] = ()
    trained: str = ""
    training_layers: Sequence[str] = ()
    untracked: Sequence[str] = ()
    num_layers: int = 0
    first_layer: str = ""
    noise: dict[str, float] = field(default_factory=dict)
    sites: Sequence[SiteRow] = ()
    gap: Mismatch | None = None
    running: dict[str, Distance] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """Return the entry ``measures`` of the JSON."""
        words = ("label_difference", "labels_in_words", "inputs_in_words")
        sites = [
            vars(site) | {word: getattr(site, word) for word in words}
            for site in self.sites
        ]
        running = {path: far._asdict() for path, far in self.running.items()}
        found: dict[str, Any] = {
            "clients": [client.name for client in self.clients],
            "batch-noise": self.noise,
            "running": running,
        }
        if sites:
            found["sites"] = sites
        if self.gap is not None:
            found["train-test-mismatch"] = vars(self.gap)
        return found
