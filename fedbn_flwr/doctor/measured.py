"""All measurements of one diagnosis, and the known facts about the training."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fedbn_flwr.doctor.by_batch import Distance
from fedbn_flwr.doctor.differences import ClassSkew, Shift
from fedbn_flwr.doctor.mismatch import Mismatch
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
    """

    local_steps: int = 0
    batch_size: int = 0
    method: str = ""
    handled: frozenset[str] = frozenset()
    tested_by_batch: bool = False


@dataclass
class Measurements:
    """All measurements. None and empty values mean not measured.

    Attributes:
        training: how the model is trained.
        names: names of the clients.
        examples: number of examples that were read from each client.
        batch_sizes: examples in a batch of each client.
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
        training_layers: BatchNorm layers that are in train mode in the model as it was
            passed.
        untracked: BatchNorm layers without running statistics.
        num_layers: number of BatchNorm layers.
        first_layer: path of the first BatchNorm layer in the state.
        noise: noise of a batch by layer, averaged over the clients.
        skew: differences in classes.
        shift: differences in the inputs of BatchNorm.
        gap: the mismatch of training and test.
        running: by layer, the distance of the running statistics from the statistics of
            all clients' batches.
    """

    training: Training = field(default_factory=Training)
    names: Sequence[str] = ()
    examples: Sequence[int] = ()
    batch_sizes: Sequence[int] = ()
    counters: Mapping[str, str] = field(default_factory=dict)
    unusable: Mapping[str, str] = field(default_factory=dict)
    diverged: bool = False
    extremes: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    unmoved: Mapping[str, int] = field(default_factory=dict)
    momenta: Mapping[str, float | None] = field(default_factory=dict)
    missed: Missed | None = None
    in_eval: Collection[str] = ()
    training_layers: Sequence[str] = ()
    untracked: Sequence[str] = ()
    num_layers: int = 0
    first_layer: str = ""
    noise: dict[str, float] = field(default_factory=dict)
    skew: ClassSkew | None = None
    shift: Shift | None = None
    gap: Mismatch | None = None
    running: dict[str, Distance] = field(default_factory=dict)
