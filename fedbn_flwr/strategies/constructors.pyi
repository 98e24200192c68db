# Made by `make generate` from the settings of the methods. Do not edit.

from collections.abc import Sequence
from typing import Literal

from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.server.methods.together import Methods
from fedbn_flwr.server.runs.run_state import OnReplies, OnRoundEnd
from fedbn_flwr.server.strategy import AggregateMetrics
from fedbn_flwr.strategies.ditto import Ditto as _Ditto
from fedbn_flwr.strategies.fedavg import FedAvg as _FedAvg
from fedbn_flwr.strategies.fedavgm import FedAvgM as _FedAvgM
from fedbn_flwr.strategies.fedbn import FedBN as _FedBN
from fedbn_flwr.strategies.fedbs import FedBS as _FedBS
from fedbn_flwr.strategies.feddna import FedDNA as _FedDNA
from fedbn_flwr.strategies.fednova import FedNova as _FedNova
from fedbn_flwr.strategies.fedopt import FedAdagrad as _FedAdagrad
from fedbn_flwr.strategies.fedopt import FedAdam as _FedAdam
from fedbn_flwr.strategies.fedopt import FedYogi as _FedYogi
from fedbn_flwr.strategies.fedprox import FedProx as _FedProx
from fedbn_flwr.strategies.fedrep import FedRep as _FedRep
from fedbn_flwr.strategies.fedtan import FedTAN as _FedTAN
from fedbn_flwr.strategies.fedtan2 import FedTAN2 as _FedTAN2
from fedbn_flwr.strategies.fedwon import FedWon as _FedWon
from fedbn_flwr.strategies.fixbn import FixBN as _FixBN
from fedbn_flwr.strategies.hbn import HBN as _HBN
from fedbn_flwr.strategies.mtfl import MTFL as _MTFL
from fedbn_flwr.strategies.scaffold import Scaffold as _Scaffold
from fedbn_flwr.strategies.silobn import SiloBN as _SiloBN
from fedbn_flwr.strategies.standalone import Standalone as _Standalone
from fedbn_flwr.strategies.staticbn import StaticBN as _StaticBN

class Ditto(_Ditto):
    """FedAvg with an additional personal model for each client.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import Ditto
        >>> strategy = Ditto(proximal_mu=0.1)
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> result.evaluate_metrics_clientapp[2]["examples-tested"]  # own models
        48
    """

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: AggregateMetrics | None = None,
        evaluate_metrics_aggr_fn: AggregateMetrics | None = None,
        *,
        proximal_mu: float = 0.01,
        layers: str | Sequence[str] = "",
        personal: str | Sequence[str] = "",
        train_only: str | Sequence[str] = "",
        variance: Literal["mean", "pooled"] = "mean",
        recalibrate: bool = False,
        class_moments: bool = False,
        min_replies: int = 1,
        eval_every: int = 1,
        eval_on: str = "",
        fine_tune: int = 0,
        seed: int = 0,
        on_divergence: Literal["stop", "continue"] = "stop",
        momentum_scope: Literal["none", "local", "global"] = "none",
        agc: float = 0.0,
        parts: Parts | None = None,
        on_round_end: OnRoundEnd | None = None,
        on_replies: OnReplies | None = None,
        completes_tests: bool = True,
        num_partitions: int | None = None,
        methods: Methods | None = None,
    ) -> None: ...

class FedAvg(_FedAvg):
    """Federated averaging.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import FedAvg
        >>> strategy = FedAvg(fraction_train=0.7, variance="pooled")
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> result.train_metrics_clientapp[2]["examples-processed"]  # of two sites
        32
    """

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: AggregateMetrics | None = None,
        evaluate_metrics_aggr_fn: AggregateMetrics | None = None,
        *,
        layers: str | Sequence[str] = "",
        personal: str | Sequence[str] = "",
        train_only: str | Sequence[str] = "",
        variance: Literal["mean", "pooled"] = "mean",
        recalibrate: bool = False,
        class_moments: bool = False,
        min_replies: int = 1,
        eval_every: int = 1,
        eval_on: str = "",
        fine_tune: int = 0,
        seed: int = 0,
        on_divergence: Literal["stop", "continue"] = "stop",
        momentum_scope: Literal["none", "local", "global"] = "none",
        agc: float = 0.0,
        parts: Parts | None = None,
        on_round_end: OnRoundEnd | None = None,
        on_replies: OnReplies | None = None,
        completes_tests: bool = True,
        num_partitions: int | None = None,
        methods: Methods | None = None,
    ) -> None: ...

class FedAvgM(_FedAvgM):
    """FedAvg with momentum on the server.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import FedAvgM
        >>> strategy = FedAvgM(server_momentum=0.9)
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> int(result.arrays["1.num_batches_tracked"].numpy())  # no step
        4
    """

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: AggregateMetrics | None = None,
        evaluate_metrics_aggr_fn: AggregateMetrics | None = None,
        *,
        server_learning_rate: float = 1.0,
        server_momentum: float = 0.0,
        layers: str | Sequence[str] = "",
        personal: str | Sequence[str] = "",
        train_only: str | Sequence[str] = "",
        variance: Literal["mean", "pooled"] = "mean",
        recalibrate: bool = False,
        class_moments: bool = False,
        min_replies: int = 1,
        eval_every: int = 1,
        eval_on: str = "",
        fine_tune: int = 0,
        seed: int = 0,
        on_divergence: Literal["stop", "continue"] = "stop",
        momentum_scope: Literal["none", "local", "global"] = "none",
        agc: float = 0.0,
        parts: Parts | None = None,
        on_round_end: OnRoundEnd | None = None,
        on_replies: OnReplies | None = None,
        completes_tests: bool = True,
        num_partitions: int | None = None,
        methods: Methods | None = None,
    ) -> None: ...

class FedBN(_FedBN):
    """FedAvg that keeps the whole of BN on the client.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import FedBN
        >>> strategy = FedBN(eval_on="averaged-bn")
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> int(result.arrays["1.num_batches_tracked"].numpy())  # the average
        4
    """

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: AggregateMetrics | None = None,
        evaluate_metrics_aggr_fn: AggregateMetrics | None = None,
        *,
        layers: str | Sequence[str] = "",
        personal: str | Sequence[str] = "",
        train_only: str | Sequence[str] = "",
        variance: Literal["mean", "pooled"] = "mean",
        recalibrate: bool = False,
        class_moments: bool = False,
        min_replies: int = 1,
        eval_every: int = 1,
        eval_on: str = "",
        fine_tune: int = 0,
        seed: int = 0,
        on_divergence: Literal["stop", "continue"] = "stop",
        momentum_scope: Literal["none", "local", "global"] = "none",
        agc: float = 0.0,
        parts: Parts | None = None,
        on_round_end: OnRoundEnd | None = None,
        on_replies: OnReplies | None = None,
        completes_tests: bool = True,
        num_partitions: int | None = None,
        methods: Methods | None = None,
    ) -> None: ...

class FedBS(_FedBS):
    """FedAvg weighted by losses until they agree (``switched_after``), then FedProx.

    ``loss_key`` is the name of the metric F_k in the clients' replies. For
    "validation-loss", a ``TorchClient`` reports the loss on its test set "validation".

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import FedBS
        >>> strategy = FedBS(fedbs_rounds=3)
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> strategy.reports[1].train.down  # bytes of the model, as in FedAvg
        360
    """

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: AggregateMetrics | None = None,
        evaluate_metrics_aggr_fn: AggregateMetrics | None = None,
        *,
        proximal_mu: float = 0.01,
        fedbs_eps: float = 0.1,
        fedbs_rounds: int = 5,
        loss_key: str = "train-loss",
        layers: str | Sequence[str] = "",
        personal: str | Sequence[str] = "",
        train_only: str | Sequence[str] = "",
        variance: Literal["mean", "pooled"] = "mean",
        recalibrate: bool = False,
        class_moments: bool = False,
        min_replies: int = 1,
        eval_every: int = 1,
        eval_on: str = "",
        fine_tune: int = 0,
        seed: int = 0,
        on_divergence: Literal["stop", "continue"] = "stop",
        momentum_scope: Literal["none", "local", "global"] = "none",
        agc: float = 0.0,
        parts: Parts | None = None,
        on_round_end: OnRoundEnd | None = None,
        on_replies: OnReplies | None = None,
        completes_tests: bool = True,
        num_partitions: int | None = None,
        methods: Methods | None = None,
    ) -> None: ...

class FedDNA(_FedDNA):
    """FedTAN without the exchange of gradients.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import FedDNA
        >>> strategy = FedDNA()
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> strategy.reports[1].train.exchanges  # 2L + 1, and L = 1 layer
        3
    """

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: AggregateMetrics | None = None,
        evaluate_metrics_aggr_fn: AggregateMetrics | None = None,
        *,
        fedtan_exchanges: Literal["3L+1", "2L+1"] = "3L+1",
        fedtan_transport: Literal["messages", "channel"] = "messages",
        fedtan_timeout: float = 120.0,
        fedtan_bind: str = "127.0.0.1:0",
        fedtan_address: str = "",
        fedtan_tls_dir: str = "",
        layers: str | Sequence[str] = "",
        personal: str | Sequence[str] = "",
        train_only: str | Sequence[str] = "",
        variance: Literal["mean", "pooled"] = "mean",
        recalibrate: bool = False,
        class_moments: bool = False,
        min_replies: int = 1,
        eval_every: int = 1,
        eval_on: str = "",
        fine_tune: int = 0,
        seed: int = 0,
        on_divergence: Literal["stop", "continue"] = "stop",
        momentum_scope: Literal["none", "local", "global"] = "none",
        agc: float = 0.0,
        parts: Parts | None = None,
        on_round_end: OnRoundEnd | None = None,
        on_replies: OnReplies | None = None,
        completes_tests: bool = True,
        num_partitions: int | None = None,
        methods: Methods | None = None,
    ) -> None: ...

class FedNova(_FedNova):
    """FedAvg of the clients' changes, each divided by its tau_i.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import FedNova
        >>> strategy = FedNova()
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> result.train_metrics_clientapp[2]["fednova-tau"]  # 2 steps of 0.1
        0.2
    """

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: AggregateMetrics | None = None,
        evaluate_metrics_aggr_fn: AggregateMetrics | None = None,
        *,
        layers: str | Sequence[str] = "",
        personal: str | Sequence[str] = "",
        train_only: str | Sequence[str] = "",
        variance: Literal["mean", "pooled"] = "mean",
        recalibrate: bool = False,
        class_moments: bool = False,
        min_replies: int = 1,
        eval_every: int = 1,
        eval_on: str = "",
        fine_tune: int = 0,
        seed: int = 0,
        on_divergence: Literal["stop", "continue"] = "stop",
        momentum_scope: Literal["none", "local", "global"] = "none",
        agc: float = 0.0,
        parts: Parts | None = None,
        on_round_end: OnRoundEnd | None = None,
        on_replies: OnReplies | None = None,
        completes_tests: bool = True,
        num_partitions: int | None = None,
        methods: Methods | None = None,
    ) -> None: ...

class FedAdagrad(_FedAdagrad):
    """Adaptive server step whose second moment only grows, by Delta^2.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import FedAdagrad
        >>> strategy = FedAdagrad(eta=0.03)
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> int(result.arrays["1.num_batches_tracked"].numpy())  # no step
        4
    """

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: AggregateMetrics | None = None,
        evaluate_metrics_aggr_fn: AggregateMetrics | None = None,
        *,
        eta: float = 0.1,
        tau: float = 0.001,
        layers: str | Sequence[str] = "",
        personal: str | Sequence[str] = "",
        train_only: str | Sequence[str] = "",
        variance: Literal["mean", "pooled"] = "mean",
        recalibrate: bool = False,
        class_moments: bool = False,
        min_replies: int = 1,
        eval_every: int = 1,
        eval_on: str = "",
        fine_tune: int = 0,
        seed: int = 0,
        on_divergence: Literal["stop", "continue"] = "stop",
        momentum_scope: Literal["none", "local", "global"] = "none",
        agc: float = 0.0,
        parts: Parts | None = None,
        on_round_end: OnRoundEnd | None = None,
        on_replies: OnReplies | None = None,
        completes_tests: bool = True,
        num_partitions: int | None = None,
        methods: Methods | None = None,
    ) -> None: ...

class FedAdam(_FedAdam):
    """Adam's bias-corrected server step, with v = beta_2 v + (1 - beta_2) Delta^2.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import FedAdam
        >>> strategy = FedAdam(eta=0.03)
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> int(result.arrays["1.num_batches_tracked"].numpy())  # no step
        4
    """

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: AggregateMetrics | None = None,
        evaluate_metrics_aggr_fn: AggregateMetrics | None = None,
        *,
        eta: float = 0.1,
        tau: float = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        layers: str | Sequence[str] = "",
        personal: str | Sequence[str] = "",
        train_only: str | Sequence[str] = "",
        variance: Literal["mean", "pooled"] = "mean",
        recalibrate: bool = False,
        class_moments: bool = False,
        min_replies: int = 1,
        eval_every: int = 1,
        eval_on: str = "",
        fine_tune: int = 0,
        seed: int = 0,
        on_divergence: Literal["stop", "continue"] = "stop",
        momentum_scope: Literal["none", "local", "global"] = "none",
        agc: float = 0.0,
        parts: Parts | None = None,
        on_round_end: OnRoundEnd | None = None,
        on_replies: OnReplies | None = None,
        completes_tests: bool = True,
        num_partitions: int | None = None,
        methods: Methods | None = None,
    ) -> None: ...

class FedYogi(_FedYogi):
    """Yogi's server step, with v moving by (1 - beta_2) Delta^2 towards Delta^2.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import FedYogi
        >>> strategy = FedYogi(eta=0.03)
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> int(result.arrays["1.num_batches_tracked"].numpy())  # no step
        4
    """

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: AggregateMetrics | None = None,
        evaluate_metrics_aggr_fn: AggregateMetrics | None = None,
        *,
        eta: float = 0.01,
        tau: float = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        layers: str | Sequence[str] = "",
        personal: str | Sequence[str] = "",
        train_only: str | Sequence[str] = "",
        variance: Literal["mean", "pooled"] = "mean",
        recalibrate: bool = False,
        class_moments: bool = False,
        min_replies: int = 1,
        eval_every: int = 1,
        eval_on: str = "",
        fine_tune: int = 0,
        seed: int = 0,
        on_divergence: Literal["stop", "continue"] = "stop",
        momentum_scope: Literal["none", "local", "global"] = "none",
        agc: float = 0.0,
        parts: Parts | None = None,
        on_round_end: OnRoundEnd | None = None,
        on_replies: OnReplies | None = None,
        completes_tests: bool = True,
        num_partitions: int | None = None,
        methods: Methods | None = None,
    ) -> None: ...

class FedProx(_FedProx):
    """FedAvg whose clients add a proximal term to their loss.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import FedProx
        >>> strategy = FedProx(proximal_mu=0.01)
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> result.train_metrics_clientapp[2]["steps"]  # 3 clients, 2 steps each
        6
    """

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: AggregateMetrics | None = None,
        evaluate_metrics_aggr_fn: AggregateMetrics | None = None,
        *,
        proximal_mu: float = 0.0,
        layers: str | Sequence[str] = "",
        personal: str | Sequence[str] = "",
        train_only: str | Sequence[str] = "",
        variance: Literal["mean", "pooled"] = "mean",
        recalibrate: bool = False,
        class_moments: bool = False,
        min_replies: int = 1,
        eval_every: int = 1,
        eval_on: str = "",
        fine_tune: int = 0,
        seed: int = 0,
        on_divergence: Literal["stop", "continue"] = "stop",
        momentum_scope: Literal["none", "local", "global"] = "none",
        agc: float = 0.0,
        parts: Parts | None = None,
        on_round_end: OnRoundEnd | None = None,
        on_replies: OnReplies | None = None,
        completes_tests: bool = True,
        num_partitions: int | None = None,
        methods: Methods | None = None,
    ) -> None: ...

class FedRep(_FedRep):
    """FedAvg of the body, after steps on each client's own head.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import FedRep
        >>> strategy = FedRep(head_steps=1, personal="2")  # the path of the head
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> result.arrays["2.weight"] == arrays["2.weight"]
        True
    """

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: AggregateMetrics | None = None,
        evaluate_metrics_aggr_fn: AggregateMetrics | None = None,
        *,
        head_steps: int = 1,
        layers: str | Sequence[str] = "",
        personal: str | Sequence[str] = "",
        train_only: str | Sequence[str] = "",
        variance: Literal["mean", "pooled"] = "mean",
        recalibrate: bool = False,
        class_moments: bool = False,
        min_replies: int = 1,
        eval_every: int = 1,
        eval_on: str = "",
        fine_tune: int = 0,
        seed: int = 0,
        on_divergence: Literal["stop", "continue"] = "stop",
        momentum_scope: Literal["none", "local", "global"] = "none",
        agc: float = 0.0,
        parts: Parts | None = None,
        on_round_end: OnRoundEnd | None = None,
        on_replies: OnReplies | None = None,
        completes_tests: bool = True,
        num_partitions: int | None = None,
        methods: Methods | None = None,
    ) -> None: ...

class FedTAN(_FedTAN):
    """FedAvg whose first local step is synchronised layer by layer.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import FedTAN
        >>> strategy = FedTAN()
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> strategy.reports[1].train.exchanges  # 3L + 1, and L = 1 layer
        4
    """

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: AggregateMetrics | None = None,
        evaluate_metrics_aggr_fn: AggregateMetrics | None = None,
        *,
        fedtan_exchanges: Literal["3L+1", "2L+1"] = "3L+1",
        fedtan_transport: Literal["messages", "channel"] = "messages",
        fedtan_timeout: float = 120.0,
        fedtan_bind: str = "127.0.0.1:0",
        fedtan_address: str = "",
        fedtan_tls_dir: str = "",
        layers: str | Sequence[str] = "",
        personal: str | Sequence[str] = "",
        train_only: str | Sequence[str] = "",
        variance: Literal["mean", "pooled"] = "mean",
        recalibrate: bool = False,
        class_moments: bool = False,
        min_replies: int = 1,
        eval_every: int = 1,
        eval_on: str = "",
        fine_tune: int = 0,
        seed: int = 0,
        on_divergence: Literal["stop", "continue"] = "stop",
        momentum_scope: Literal["none", "local", "global"] = "none",
        agc: float = 0.0,
        parts: Parts | None = None,
        on_round_end: OnRoundEnd | None = None,
        on_replies: OnReplies | None = None,
        completes_tests: bool = True,
        num_partitions: int | None = None,
        methods: Methods | None = None,
    ) -> None: ...

class FedTAN2(_FedTAN2):
    """FedTAN for M rounds, then frozen BN statistics (``frozen_after`` = M).

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import FedTAN2
        >>> strategy = FedTAN2(fedtan_rounds=1)
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> int(result.arrays["1.num_batches_tracked"].numpy())  # of round 1
        2
    """

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: AggregateMetrics | None = None,
        evaluate_metrics_aggr_fn: AggregateMetrics | None = None,
        *,
        fedtan_exchanges: Literal["3L+1", "2L+1"] = "3L+1",
        fedtan_transport: Literal["messages", "channel"] = "messages",
        fedtan_timeout: float = 120.0,
        fedtan_bind: str = "127.0.0.1:0",
        fedtan_address: str = "",
        fedtan_tls_dir: str = "",
        freeze_window: int = 100,
        freeze_tau: float = 0.002,
        fedtan_rounds: int | float | str = 0.1,
        layers: str | Sequence[str] = "",
        personal: str | Sequence[str] = "",
        train_only: str | Sequence[str] = "",
        variance: Literal["mean", "pooled"] = "mean",
        recalibrate: bool = False,
        class_moments: bool = False,
        min_replies: int = 1,
        eval_every: int = 1,
        eval_on: str = "",
        fine_tune: int = 0,
        seed: int = 0,
        on_divergence: Literal["stop", "continue"] = "stop",
        momentum_scope: Literal["none", "local", "global"] = "none",
        agc: float = 0.0,
        parts: Parts | None = None,
        on_round_end: OnRoundEnd | None = None,
        on_replies: OnReplies | None = None,
        completes_tests: bool = True,
        num_partitions: int | None = None,
        methods: Methods | None = None,
    ) -> None: ...

class FedWon(_FedWon):
    """FedAvg with AGC, for a model without BatchNorm.

    Example::

        >>> from torch import nn
        >>> from fedbn_flwr import replace_norm
        >>> from fedbn_flwr.strategies import FedWon
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        >>> without_norm, report = replace_norm(model, "wsconv")
        >>> strategy = FedWon(agc=0.1)
        >>> isinstance(without_norm[1], nn.BatchNorm2d)
        False
    """

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: AggregateMetrics | None = None,
        evaluate_metrics_aggr_fn: AggregateMetrics | None = None,
        *,
        layers: str | Sequence[str] = "",
        personal: str | Sequence[str] = "",
        train_only: str | Sequence[str] = "",
        variance: Literal["mean", "pooled"] = "mean",
        recalibrate: bool = False,
        class_moments: bool = False,
        min_replies: int = 1,
        eval_every: int = 1,
        eval_on: str = "",
        fine_tune: int = 0,
        seed: int = 0,
        on_divergence: Literal["stop", "continue"] = "stop",
        momentum_scope: Literal["none", "local", "global"] = "none",
        agc: float = 0.1,
        parts: Parts | None = None,
        on_round_end: OnRoundEnd | None = None,
        on_replies: OnReplies | None = None,
        completes_tests: bool = True,
        num_partitions: int | None = None,
        methods: Methods | None = None,
    ) -> None: ...

class FixBN(_FixBN):
    """FedAvg that freezes the BN statistics after round T* (``freeze_at``).

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import FixBN
        >>> strategy = FixBN(freeze_at=1)
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> int(result.arrays["1.num_batches_tracked"].numpy())  # of round 1
        2
    """

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: AggregateMetrics | None = None,
        evaluate_metrics_aggr_fn: AggregateMetrics | None = None,
        *,
        freeze_window: int = 100,
        freeze_tau: float = 0.002,
        freeze_at: int | float | str = 0.5,
        freeze_affine: bool = False,
        layers: str | Sequence[str] = "",
        personal: str | Sequence[str] = "",
        train_only: str | Sequence[str] = "",
        variance: Literal["mean", "pooled"] = "mean",
        recalibrate: bool = False,
        class_moments: bool = False,
        min_replies: int = 1,
        eval_every: int = 1,
        eval_on: str = "",
        fine_tune: int = 0,
        seed: int = 0,
        on_divergence: Literal["stop", "continue"] = "stop",
        momentum_scope: Literal["none", "local", "global"] = "none",
        agc: float = 0.0,
        parts: Parts | None = None,
        on_round_end: OnRoundEnd | None = None,
        on_replies: OnReplies | None = None,
        completes_tests: bool = True,
        num_partitions: int | None = None,
        methods: Methods | None = None,
    ) -> None: ...

class HBN(_HBN):
    """FedAvg whose BN layers mix the batch's statistics with pooled statistics.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import HBN
        >>> strategy = HBN(statistics_momentum=0.2)
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> int(result.arrays["1.num_batches_tracked"].numpy())
        0
    """

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: AggregateMetrics | None = None,
        evaluate_metrics_aggr_fn: AggregateMetrics | None = None,
        *,
        statistics_momentum: float = 0.1,
        statistics_warm_up: int = 1,
        layers: str | Sequence[str] = "",
        personal: str | Sequence[str] = "",
        train_only: str | Sequence[str] = "",
        variance: Literal["mean", "pooled"] = "mean",
        recalibrate: bool = False,
        class_moments: bool = False,
        min_replies: int = 1,
        eval_every: int = 1,
        eval_on: str = "",
        fine_tune: int = 0,
        seed: int = 0,
        on_divergence: Literal["stop", "continue"] = "stop",
        momentum_scope: Literal["none", "local", "global"] = "none",
        agc: float = 0.0,
        parts: Parts | None = None,
        on_round_end: OnRoundEnd | None = None,
        on_replies: OnReplies | None = None,
        completes_tests: bool = True,
        num_partitions: int | None = None,
        methods: Methods | None = None,
    ) -> None: ...

class MTFL(_MTFL):
    """FedAvg that keeps gamma and beta on the client.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import MTFL
        >>> strategy = MTFL()
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> result.arrays["1.weight"] == arrays["1.weight"]  # gamma
        True
    """

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: AggregateMetrics | None = None,
        evaluate_metrics_aggr_fn: AggregateMetrics | None = None,
        *,
        layers: str | Sequence[str] = "",
        personal: str | Sequence[str] = "",
        train_only: str | Sequence[str] = "",
        variance: Literal["mean", "pooled"] = "mean",
        recalibrate: bool = False,
        class_moments: bool = False,
        min_replies: int = 1,
        eval_every: int = 1,
        eval_on: str = "",
        fine_tune: int = 0,
        seed: int = 0,
        on_divergence: Literal["stop", "continue"] = "stop",
        momentum_scope: Literal["none", "local", "global"] = "none",
        agc: float = 0.0,
        parts: Parts | None = None,
        on_round_end: OnRoundEnd | None = None,
        on_replies: OnReplies | None = None,
        completes_tests: bool = True,
        num_partitions: int | None = None,
        methods: Methods | None = None,
    ) -> None: ...

class Scaffold(_Scaffold):
    """Stochastic controlled averaging, with BN statistics averaged as in FedAvg.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import Scaffold
        >>> strategy = Scaffold()
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> strategy.reports[1].train.down  # bytes: model 360, variate 296
        656
    """

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: AggregateMetrics | None = None,
        evaluate_metrics_aggr_fn: AggregateMetrics | None = None,
        *,
        server_learning_rate: float = 1.0,
        layers: str | Sequence[str] = "",
        personal: str | Sequence[str] = "",
        train_only: str | Sequence[str] = "",
        variance: Literal["mean", "pooled"] = "mean",
        recalibrate: bool = False,
        class_moments: bool = False,
        min_replies: int = 1,
        eval_every: int = 1,
        eval_on: str = "",
        fine_tune: int = 0,
        seed: int = 0,
        on_divergence: Literal["stop", "continue"] = "stop",
        momentum_scope: Literal["none", "local", "global"] = "none",
        agc: float = 0.0,
        parts: Parts | None = None,
        on_round_end: OnRoundEnd | None = None,
        on_replies: OnReplies | None = None,
        completes_tests: bool = True,
        num_partitions: int | None = None,
        methods: Methods | None = None,
    ) -> None: ...

class SiloBN(_SiloBN):
    """FedAvg that keeps running statistics and counters on the client.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import SiloBN
        >>> strategy = SiloBN()
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> result.arrays["1.running_var"] == arrays["1.running_var"]
        True
    """

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: AggregateMetrics | None = None,
        evaluate_metrics_aggr_fn: AggregateMetrics | None = None,
        *,
        layers: str | Sequence[str] = "",
        personal: str | Sequence[str] = "",
        train_only: str | Sequence[str] = "",
        variance: Literal["mean", "pooled"] = "mean",
        recalibrate: bool = False,
        class_moments: bool = False,
        min_replies: int = 1,
        eval_every: int = 1,
        eval_on: str = "",
        fine_tune: int = 0,
        seed: int = 0,
        on_divergence: Literal["stop", "continue"] = "stop",
        momentum_scope: Literal["none", "local", "global"] = "none",
        agc: float = 0.0,
        parts: Parts | None = None,
        on_round_end: OnRoundEnd | None = None,
        on_replies: OnReplies | None = None,
        completes_tests: bool = True,
        num_partitions: int | None = None,
        methods: Methods | None = None,
    ) -> None: ...

class Standalone(_Standalone):
    """FedAvg that keeps the whole state on the client.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import Standalone
        >>> strategy = Standalone()
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> result.arrays == arrays
        True
    """

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: AggregateMetrics | None = None,
        evaluate_metrics_aggr_fn: AggregateMetrics | None = None,
        *,
        layers: str | Sequence[str] = "",
        personal: str | Sequence[str] = "",
        train_only: str | Sequence[str] = "",
        variance: Literal["mean", "pooled"] = "mean",
        recalibrate: bool = False,
        class_moments: bool = False,
        min_replies: int = 1,
        eval_every: int = 1,
        eval_on: str = "",
        fine_tune: int = 0,
        seed: int = 0,
        on_divergence: Literal["stop", "continue"] = "stop",
        momentum_scope: Literal["none", "local", "global"] = "none",
        agc: float = 0.0,
        parts: Parts | None = None,
        on_round_end: OnRoundEnd | None = None,
        on_replies: OnReplies | None = None,
        completes_tests: bool = True,
        num_partitions: int | None = None,
        methods: Methods | None = None,
    ) -> None: ...

class StaticBN(_StaticBN):
    """FedAvg that trains without running statistics and re-estimates them for tests.

    Example, with ``app`` and ``arrays`` as in the example of ``InProcessGrid``::

        >>> from fedbn_flwr.strategies import StaticBN
        >>> strategy = StaticBN()
        >>> with InProcessGrid(app, num_nodes=3) as grid:
        ...     result = strategy.start(grid, arrays, num_rounds=2)
        >>> int(result.arrays["1.num_batches_tracked"].numpy())
        0
    """

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: AggregateMetrics | None = None,
        evaluate_metrics_aggr_fn: AggregateMetrics | None = None,
        *,
        layers: str | Sequence[str] = "",
        personal: str | Sequence[str] = "",
        train_only: str | Sequence[str] = "",
        variance: Literal["mean", "pooled"] = "mean",
        recalibrate: bool = False,
        class_moments: bool = False,
        min_replies: int = 1,
        eval_every: int = 1,
        eval_on: str = "",
        fine_tune: int = 0,
        seed: int = 0,
        on_divergence: Literal["stop", "continue"] = "stop",
        momentum_scope: Literal["none", "local", "global"] = "none",
        agc: float = 0.0,
        parts: Parts | None = None,
        on_round_end: OnRoundEnd | None = None,
        on_replies: OnReplies | None = None,
        completes_tests: bool = True,
        num_partitions: int | None = None,
        methods: Methods | None = None,
    ) -> None: ...
