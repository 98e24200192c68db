"""pfl-research: ``FederatedAveraging`` on its ``SimulatedBackend``.

As in its own CIFAR-10 benchmark: central SGD with rate 1, the same weight for each
user, and users as arrays that are sliced into batches in the same order each time: no
shuffling, and no indexing. Several processes: torchrun.
"""

from __future__ import annotations

from typing import Any

import torch
from peers.work import CNN, Clock, Job, accuracy, contend, load_data, make_model
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn


class Model(CNN):
    """The CNN with the two methods that pfl-research asks for."""

    def loss(self, inputs: Tensor, targets: Tensor, eval: bool = False) -> Tensor:
        """Return the mean loss."""
        self.train(not eval)
        return nn.functional.cross_entropy(self(inputs), targets)

    def metrics(
        self, inputs: Tensor, targets: Tensor, eval: bool = True
    ) -> dict[str, Any]:
        """Return no metrics: clients are not evaluated."""
        return {}


class Lap(TrainingProcessCallback):  # type: ignore[misc]
    """Notes the end of each round."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Go on, without metrics of our own."""
        self.clock.lap()
        return False, Metrics()


def main(job: Job, clock: Clock) -> float:
    """Do the rounds."""
    setting, data = job.work, load_data(job.data, job.work.dataset)

    def user(index: int) -> Dataset:
        return Dataset(list(data.client(index, setting.examples)), user_id=str(index))

    users = FederatedDataset(
        user, get_user_sampler("minimize_reuse", range(setting.clients))
    )
    module = Model()
    module.load_state_dict(make_model(setting.model).state_dict())
    model = PyTorchModel(
        module, torch.optim.SGD, torch.optim.SGD(module.parameters(), 1.0)
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=job.rounds + 1,
            evaluation_frequency=10**9,
            train_cohort_size=setting.a_round,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(
            training_data=users, val_data=users, postprocessors=[WeightByUser()]
        ),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=setting.learning_rate,
            local_num_epochs=1,
            local_batch_size=setting.batch,
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Lap(clock)],
    )
    return accuracy(module, data)


if __name__ == "__main__":
    from peers import pfl_research

    contend(pfl_research.main, "pfl")
