"""The problems of a run's declared values, as checks, and the facts that checks read.

A check is an object of the class ``Problem`` and decides about declared values. It is next
to its subject: a method has its checks at the end of its file, a setting has its
conditions in ``only_if``, and a protection has its checks at its settings. Other modules
decide the rest:

- ``server``: refusals that follow from the declarations of methods, in
  ``methods.together`` and ``runs.protection``.
- ``lab``: a config in ``config.check_config``, the machine and the built model in
  ``runs.check_start``, and a study in ``studies.check_study``.

A fault that appears in data, bytes or objects of a user during the work is an exception
at the place that finds it: a reply in ``server.rounds.replies``, the values and shapes
of its arrays in ``batchnorm.averaging``, a client's own training loop in
``client.bn_rules``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fedbn_flwr.errors import ConfigError, FedBNError

logger = logging.getLogger("flwr")

Stage = Literal["settings", "run", "model", "start", "sending", "replies", "diverged"]
Effect = Literal["refuse", "no-effect", "warn", "end", "cause", "remedy"]
BEFORE_A_RUN: Sequence[Stage] = ("settings", "run", "model")
"""The stages before the first round: settings, run and model."""


@dataclass(frozen=True)
class Known:
    """The facts that a check reads.

    An unknown fact is None. The server of a Flower project has no information on the
    clients' training.

    Attributes:
        num_rounds: R, the number of rounds.
        norm: the normalisation of the model.
        optimizer: the clients' optimizer.
        sgd_momentum: momentum of the clients' SGD.
        its_momentum: a text for this setting in messages.
        maximizes: whether a group of the optimizer maximises.
        local_steps: the clients' steps in a round; None if clients differ.
        tests: the tests of ``eval-on`` (``tests_in``), or their default.
        recorded: whether the laboratory's recorder does the tests.
        weighted_by_key: the metric that gives the weights of replies.
        parts: the split of the model's state (``Parts``).
        shapes: the shapes of the model's entries.
        moved: whether running statistics of the initial model are not 0 and 1.
        model: a text for the model in messages.
        has: a text for the model's normalisation in messages, if it has no BatchNorm.
        untrained: a text for the model's BatchNorm in messages, if it is not trained.
        number: the number of the round.
        state: the method's state before the round; after it for "diverged".
        facts: the facts of the round; None if it has diverged.
        replies: the usable replies.
    """

    num_rounds: int | None = None
    norm: str | None = None
    optimizer: str | None = None
    sgd_momentum: float | None = None
    its_momentum: str = "sgd-momentum"
    maximizes: bool | None = None
    local_steps: int | None = None
    tests: tuple[str, ...] | None = None
    recorded: bool | None = None
    weighted_by_key: str | None = None
    parts: Any = None
    shapes: Mapping[str, tuple[int, ...]] | None = None
    moved: bool | None = None
    model: str = "the model"
    has: str = "none"
    untrained: str = ""
    number: int = 0
    state: Any = None
    facts: Any = None
    replies: Sequence[Any] = ()


@dataclass(frozen=True)
class Problem:
    """A fault of declared values, or an effect that a user may not expect.

    The texts of a check are templates with the names ``method`` (its subject), ``params``
    (the subject's settings), ``known`` and ``found`` (the result of ``when``).

    Attributes:
        code: its name, for programs.
        text: a sentence with the names of the config keys. For a setting without
            effect, it is the reason.
        keys: the names of settings with ``_``, separated by spaces; the first name
            is the subject.
        stage: when it is checked: with the settings, the run, the model or the start;
            before a round's messages are sent or its replies are used; after a loss
            that is not finite.
        effect: "refuse" refuses the run. "no-effect" refuses a setting that was set but
            has no effect; the code of the problem is then "no-effect". "warn" is a
            warning, "end" ends the run, "cause" is the likely cause of a loss that is
            not finite, and "remedy" is a further remedy.
        remedy: the value, model or method to use instead.
        error: the class of the error.
        needs: the facts that must be known, separated by spaces; otherwise the check is
            skipped.
        when: a function of the subject and a ``Known``; a true result means that they
            have the problem.
        reason: only the reason, if ``text`` also names a setting without effect.
    """

    code: str
    text: str
    keys: str = ""
    stage: Stage = "run"
    effect: Effect = "refuse"
    remedy: str = ""
    error: type[FedBNError] = ConfigError
    needs: str = ""
    when: Callable[[Any, Known], object] | None = None
    reason: str = ""

    def __str__(self) -> str:
        """Return the text with the remedy."""
        return f"{self.text}. Use {self.remedy}." if self.remedy else self.text

    @property
    def key(self) -> str:
        """The key that is the subject, or "" if the subject is the whole run."""
        return self.keys.partition(" ")[0]

    def with_value(self, value: Any) -> Problem:
        """Return the refusal of a setting that has this value but no effect.

        The ``text`` of this problem is only the reason. The result has the whole
        sentence.
        """
        key = self.key.replace("_", "-")
        text = f"{key}={value!r} has no effect: {self.text}"
        return replace(self, code="no-effect", text=text, reason=self.text)

    def spelled(self, mark: str) -> Problem:
        """Return the problem with ``mark``, "-" or "_", in all names of its keys."""
        text, remedy = self.text, self.remedy
        for key in self.keys.replace("_", "-").split():
            text = text.replace(key, key.replace("-", mark))
            remedy = remedy.replace(key, key.replace("-", mark))
        keys = self.keys.replace("_", mark).replace("-", mark)
        return replace(self, text=text, remedy=remedy, keys=keys)


def found_problems(
    checks: Iterable[Problem],
    subject: Any,
    known: Known,
    stages: Collection[str] = BEFORE_A_RUN,
) -> Iterator[Problem]:
    """Yield the checks whose problem the subject has, with their texts filled in.

    Checks of other stages, and checks that need an unknown fact, are skipped.
    """
    for check in checks:
        unknown = any(getattr(known, need) is None for need in check.needs.split())
        if check.when is None or check.stage not in stages or unknown:
            continue
        found = check.when(subject, known)
        if not found:
            continue
        params = getattr(subject, "params", subject)
        names = {"method": subject, "params": params, "known": known, "found": found}
        yield replace(
            check,
            text=check.text.format(**names),
            remedy=check.remedy.format(**names),
            when=None,
        )


def raise_or_warn(problems: Iterable[Problem], mark: str = "_", hint: str = "") -> None:
    """Raise the refusals as one error, or log the warnings if nothing is refused.

    If the model does not fit, the error has only the problems of stage "model".

    Args:
        problems: the problems.
        mark: see ``Problem.spelled``; "" does not change the names.
        hint: a further line of the error.

    Raises:
        FedBNError: there is a refusal; the error has all refusals in ``problems``.
    """
    told = list(problems)
    if mark:
        told = [problem.spelled(mark) for problem in told]
    if not told:
        return
    refused = [problem for problem in told if problem.effect != "warn"]
    # If the model does not fit, report only this problem, because no setting repairs
    # it.
    misfits = [problem for problem in refused if problem.stage == "model"]
    refused = misfits or refused
    if refused:
        lines = [*(f"{problem} [{problem.code}]" for problem in refused), hint]
        text = "\n".join(filter(None, lines))
        error = refused[0].error(text)
        error.code, error.problems = refused[0].code, tuple(refused)
        raise error
    for problem in told:
        logger.warning("%s", problem)
