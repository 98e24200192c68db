r"""Re-estimation: BN statistics from the clients' data under global weights.

The weights are the current global weights. The literature calls this "precise BN". The
server uses no data of its own, and training does not use the result.

## Algorithm

The server asks every client with data for the count, the mean and the sum of squared
deviations $(n_i, m_i, M_i)$ per layer and channel (`batchnorm/reestimation.py`). It
merges the answers, in the order of partition ids, as in [StaticBN](staticbn.md).

## What travels

- sent down: the whole state (without the statistics if the method keeps them local)
- sent up: $m_i$ and $M_i$ of each BN layer, as many floats as its running statistics;
  an int64 count
- cost: $F$ floats down (one broadcast), $S$ up per client, in one exchange before each
  test; $S$ is the number of floats of the running statistics

## Class moments

With `class-moments=true`, the server sends the last model once more, and every client
with data answers with $K$ counts of its classes and $K S$ float64 sums
(`batchnorm/class_moments.py`); the cost is in the last round's numbers of the tests.

**What they reveal.** The counts are the class mix of the site. Each sum is the mean
activation of the examples of a class, times their number: with few examples of a class
it describes these examples, and with one it describes a single person. The server sees
the sums of each site, and `class_moments.npz` has only the sums over all sites. Differential
privacy does not cover them, so it refuses the option.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from fedbn_flwr.batchnorm.array_types import Array, State
from fedbn_flwr.batchnorm.averaging import fits
from fedbn_flwr.batchnorm.class_moments import ClassMoments, pool_class_moments
from fedbn_flwr.batchnorm.parts import Parts
from fedbn_flwr.batchnorm.reestimation import Moments, merge
from fedbn_flwr.compat.flower import is_app_error, lacks_function
from fedbn_flwr.errors import ClientPartError, split_code
from fedbn_flwr.messages.moment_record import decode_moments, decode_moments_of_classes
from fedbn_flwr.messages.protocol import (
    CLASS_MOMENTS,
    NUM_EXAMPLES,
    STATISTICS_QUERY,
)
from fedbn_flwr.messages.records import Traffic, views
from fedbn_flwr.server.methods.method import Node
from fedbn_flwr.server.rounds.dispatch import (
    address,
    in_order,
    raise_shared_test_error,
    resent,
)
from fedbn_flwr.server.rounds.replies import (
    Refused,
    Usable,
    error_text,
    read_arrays,
    read_metrics,
    read_replies,
)
from fedbn_flwr.server.runs.run_state import Run

logger = logging.getLogger("flwr")

Answer = TypeVar("Answer")


def reestimate_before_tests(run: Run, arrays: ArrayRecord, grid: Grid) -> None:
    """Re-estimate the statistics of ``arrays``, the model after this round.

    Raises:
        ClientPartError: no app can answer.
        ConfigError: all asked clients raised it, and none has worked before.
    """
    if not any(run.parts.moments()):
        return
    nodes = _nodes_with_data(run, grid)
    known = run.known_statistics  # statistics of the same weights
    same_data = run.measured == [node.label for node in nodes]
    if not (known and same_data):
        # If too few clients answer, keep the known statistics.
        known = _ask(run, nodes, arrays, grid) or known
    run.reestimated = known


def _nodes_with_data(run: Run, grid: Grid) -> list[Node]:
    present = run.present(grid, max(run.flower_args.min_available_nodes, 1))
    return [node for node in present if node.num_examples != 0]


def _ask(
    run: Run, nodes: Sequence[Node], arrays: ArrayRecord, grid: Grid
) -> dict[str, Any]:
    """Return the running statistics of ``arrays`` on the nodes' data.

    The result is empty with fewer than ``min_replies`` usable answers, or if no layer
    has finite statistics.
    """
    report, before = run.report, views(arrays)
    # Statistics for the method count as training traffic, others as test traffic.
    traffic = report.train if run.methods.reestimates else report.evaluate

    def decode(state: State) -> Mapping[str, Moments]:
        return decode_moments(state, before, run.parts)

    good, refused = _answers(run, nodes, arrays, grid, traffic, decode)
    if not good:
        _refuse_apps_without_answer(run, refused, len(nodes))

    # Merge the moments in the order of partition ids.
    moments = [reply.value for reply in good]
    if len(moments) < run.methods.params.min_replies:
        moments = []
    statistics = _pooled_statistics(run.parts, moments, before)
    if not statistics:
        logger.warning(
            "round %d: no statistics are re-estimated, because too few replies are"
            " usable or no layer has finite statistics (usable replies: %d,"
            " min-replies=%d)",
            report.server_round,
            len(good),
            run.methods.params.min_replies,
        )
        return {}
    if not run.round.statistics_at_start:  # warn only the first time
        left_out = _unmeasured(run.parts, moments)
        if left_out:
            logger.warning("round %d: %s", report.server_round, left_out)
    run.measured = [reply.node.label for reply in good]
    return {
        name: array.astype(before[name].dtype) for name, array in statistics.items()
    }


def _pooled_statistics(
    parts: Parts, sent: Sequence[Mapping[str, Moments]], like: State
) -> dict[str, Array]:
    """Return the running statistics of all clients' data, by entry, in float64.

    A layer is left out if it has fewer than two values, or if its statistics are not
    finite in the type of ``like``. Counters are left out because they count training
    batches.
    """
    entries: dict[str, Array] = {}
    for layer in parts.layers:
        # A client that did not call a layer has no moments of the layer.
        moments = [own[layer.path] for own in sent if layer.path in own]
        if not moments:
            continue
        total = merge(moments)
        mean, variance = layer.entries["running_mean"], layer.entries["running_var"]
        own = {mean: total.mean.numpy(), variance: total.variance.numpy()}
        # Skip values that do not fit. torch's variance has the factor n / (n - 1), so
        # the variance of a single value is not finite. In float16, the square of 256 is
        # infinite.
        if all(fits(values, like[name].dtype) for name, values in own.items()):
            entries |= own
    return entries


def _unmeasured(parts: Parts, sent: Sequence[Mapping[str, Moments]]) -> str:
    """Return a text that names the layers without moments from any client.

    The text is empty if there are no such layers, or if no client sent moments.
    """
    measured = {path for moments in sent for path in moments}
    tracking = [layer.path for layer in parts.layers if "running_mean" in layer.entries]
    paths = [path for path in tracking if path not in measured]
    if not measured or not paths:
        return ""
    return (
        f"no reply has moments of the inputs of {', '.join(paths)}, which keep their"
        " present statistics, mean 0 and variance 1 in a new model: these layers ran"
        " under no_grad or not at all. If the training reaches them but the model's"
        " forward does not, pass forward=f to answer_statistics(...), with a function"
        " f(model, inputs) that calls all of them."
    )


def _answers(
    run: Run,
    nodes: Sequence[Node],
    arrays: ArrayRecord,
    grid: Grid,
    traffic: Traffic,
    decode: Callable[[State], Answer],
    asks: Mapping[str, Any] | None = None,
) -> tuple[list[Usable[Answer]], list[Refused]]:
    """Send a query of statistics, and return the usable and the refused answers.

    They are in the order of partition ids. Answers that cannot be decoded are refused,
    because a single bad answer must not spoil the sum.

    Args:
        run: the run.
        nodes: the nodes to ask.
        arrays: the model.
        grid: all nodes.
        traffic: the counter of the bytes.
        decode: returns the answer in the arrays of a reply.
        asks: further entries of the query's config.
    """
    config = {**run.config(run.report.server_round), **(asks or {})}
    before = views(arrays)
    sent = address(run, nodes, STATISTICS_QUERY, arrays, config, traffic)
    replies = grid.send_and_receive(sent.messages, timeout=run.start.timeout)

    def read(node: Node, message: Message) -> Answer:
        # This refuses a reply without a count, even if counts do not weight the models.
        read_metrics(message, NUM_EXAMPLES)
        key = run.flower_args.arrayrecord_key
        state, _, sizes = read_arrays(message, key, like=before)
        answer = decode(state)
        for size in sizes:
            traffic.count_up(size)
        return answer

    received = in_order(run, sent, resent(run, sent, replies, grid))
    good, refused = read_replies(received, read, run.report, "statistics")
    raise_shared_test_error(run, sent, refused)
    return good, refused


def collect_class_moments(run: Run, arrays: ArrayRecord, grid: Grid) -> None:
    """Ask every client with data for its class moments, and note the pooled sums.

    Nothing is noted with fewer than ``min_replies`` usable answers.

    Args:
        run: the run, after its last round.
        arrays: the last global model.
        grid: the nodes.
    """
    nodes = _nodes_with_data(run, grid)
    report, before = run.report, views(arrays)

    def decode(state: State) -> ClassMoments:
        return decode_moments_of_classes(state, before)

    asks: dict[str, Any] = {CLASS_MOMENTS: True}
    good, _ = _answers(run, nodes, arrays, grid, report.evaluate, decode, asks)
    moments = [reply.value for reply in good]
    # Clients with another number of classes have another model.
    same = len({len(one.counts) for one in moments}) == 1
    if same and len(moments) >= run.methods.params.min_replies:
        run.class_moments = pool_class_moments(moments)
        return
    logger.warning(
        "round %d: there are no class moments, because too few answers are usable (%d,"
        " min-replies=%d), or their numbers of classes differ",
        report.server_round,
        len(good),
        run.methods.params.min_replies,
    )


def _refuse_apps_without_answer(
    run: Run, refused: Sequence[Refused], num_asked: int
) -> None:
    """Raise ClientPartError if no app can answer and the method needs the statistics.

    Otherwise the method would use the initial statistics.
    """
    failed = [one.message for one in refused if is_app_error(one.message)]
    if not run.methods.reestimates or not failed or len(failed) < num_asked:
        return
    if not run.may_end_by(num_asked):
        return
    if lacks_function(failed[0], STATISTICS_QUERY):
        raise ClientPartError(
            "the clients' app does not answer the query"
            f" {STATISTICS_QUERY.partition('.')[2]!r}, but strategy"
            f" {run.methods.name!r} needs it to re-estimate statistics. Add to the app"
            " a function with @app.query('statistics') that returns"
            " answer_statistics(msg, context, Net(), trainloader)."
        )
    raise ClientPartError(
        "no client could measure its statistics:"
        f" {split_code(error_text(failed[0]))[1]}"
    )
