"""Checks of the keys of a config.

They check the value of each key, names, conflicts between keys, and keys without effect.
``check_run.py`` has the checks that need the registries, the user's data or the methods.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from fedbn_flwr.errors import FedBNError, unknown_name
from fedbn_flwr.lab.config.fields import (
    PARAMS,
    Fields,
    config_fields,
    methods_with,
    only_if_of,
)
from fedbn_flwr.lab.config.values import CENTRALIZED, allowed, read_decays, split
from fedbn_flwr.privacy.protection_settings import MASKED_UPDATES, DPSettings
from fedbn_flwr.problems import Known, Problem, found_problems
from fedbn_flwr.server.methods.method import ROLES
from fedbn_flwr.server.methods.params import EVALUATIONS, TEST_BN, of_pydantic, unmet
from fedbn_flwr.strategies import METHODS


def of_error(error: FedBNError, key: str = "") -> Problem:
    """Return an error about a value of the config as a problem of its key."""
    return Problem(error.code, str(error), key)


def of_name(key: str, name: str, allowed: Collection[str]) -> list[Problem]:
    """Return the problem of a name that is not allowed, or [] if it is allowed."""
    if name in allowed:
        return []
    return [of_error(unknown_name(key, name, allowed), key)]


def _unknown(key: str, keys: Collection[str]) -> Problem:
    """Return the problem of an unknown key, with the nearest keys.

    These are the keys with its initials or with its word, or else a similar key.
    """
    hint = " No key has a similar name."
    near = []
    for known in keys:
        words = known.split("-")
        if key in (*words, "".join(word[0] for word in words)):
            near.append(known)
    near = near or difflib.get_close_matches(key, keys, n=1)
    if near:
        hint = f" Did you mean {' or '.join(map(repr, near))}?"
    return Problem("unknown-key", f"unknown key {key!r}.{hint}", key)


F = TypeVar("F", bound=Fields)

# Keys that need clients. The reference run strategy=centralized has no clients and
# cannot use them.
_OF_A_FEDERATION = (
    *(
        "fraction-train",
        "cohort-rounds",
        "fraction-evaluate",
        "min-replies",
        "round-timeout",
        "variance",
    ),
    *(
        "momentum-scope",
        "agc",
        "recalibrate",
        "class-moments",
        *ROLES,
        "state-dir",
        "series",
    ),
    *("layers", "personal", "fine-tune", "loop"),
)


def checked(kind: type[F], settings: Mapping[str, Any]) -> tuple[F, list[Problem]]:
    """Return the valid settings, and a problem for each invalid setting.

    Args:
        kind: the class to return.
        settings: under their new names, see ``values.new_names``.
    """
    fields = {field.alias or name: field for name, field in kind.model_fields.items()}
    try:
        return kind.model_validate(dict(settings)), []
    except ValidationError as error:
        problems = of_pydantic(error, fields)
    problems = [
        problem if problem.key in fields else _unknown(problem.key, fields)
        for problem in problems
    ]
    wrong = {problem.key for problem in problems}
    valid = {name: value for name, value in settings.items() if str(name) not in wrong}
    return kind.model_validate(valid), problems


def defaults_of(kind: type[Fields]) -> dict[str, Any]:
    """Return the default of each key."""
    fields = kind.model_fields.items()
    return {field.alias or name: field.default for name, field in fields}


def problems_together(config: Fields) -> list[Problem]:
    """Return the problems of names, and of keys that do not fit each other."""
    checks = (_of_names, _of_rounds, _of_tests, _of_privacy)
    return [problem for check_of in checks for problem in check_of(config)]


def _of_names(config: Fields) -> Iterator[Problem]:
    """Yield a problem for each unknown name and each method that is named twice."""
    yield from of_name("strategy", config.strategy, [*METHODS, CENTRALIZED])
    for role in ROLES:
        of_role = [name for name, method in METHODS.items() if method.role == role]
        for name in split(getattr(config, role.replace("-", "_"))):
            yield from of_name(role, name, of_role)
    names = config.method_names
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        yield Problem(
            "method-named-twice",
            f"{', '.join(twice)}: strategy, local-part, client-hooks and server-step name"
            " this method twice; name it once",
            "strategy",
        )
    yield from of_name("norm", config.norm, allowed("norm"))
    # A name with a colon is own data, such as npz:PATH, and not a registered data set.
    if ":" not in config.dataset:
        yield from of_name("dataset", config.dataset, allowed("dataset"))
    if config.partition:
        yield from of_name("partition", config.partition, allowed("partition"))
    if config.task:
        yield from of_name("task", config.task, allowed("task"))
    for name in split(config.eval_on):
        yield from of_name("eval-on", name, EVALUATIONS)


def _of_rounds(config: Fields) -> Iterator[Problem]:
    """Yield the problems of rounds, steps and the learning rate."""
    stopping = f"early-stopping={config.early_stopping}"
    if config.early_stopping and not config.validation_share:
        yield Problem(
            "early-stopping-without-validation",
            f"{stopping} needs validation-share above 0: the score comes from"
            " examples that no client trains on",
            "early-stopping",
        )
    if config.early_stopping and not config.checkpoint_every:
        yield Problem(
            "early-stopping-without-checkpoint",
            f"{stopping} goes back to the checkpoint of the best round: set"
            " checkpoint-every above 0",
            "early-stopping",
        )
    if config.early_stopping and config.class_moments:
        yield Problem(
            "early-stopping-with-class-moments",
            f"{stopping} goes back to the best round, but class-moments=true measures the"
            " model of the last round: leave one of them out",
            "class-moments early-stopping",
        )
    if not config.local_steps and not config.local_epochs:
        yield Problem(
            "no-local-step",
            "local-steps and local-epochs are both 0: nothing to train; set one of them"
            " above 0",
            "local-steps",
        )
    try:
        read_decays(config.lr_decay_at, config.lr_decay_factor)
    except FedBNError as error:
        yield of_error(error, "lr-decay-at")


def _of_tests(config: Fields) -> Iterator[Problem]:
    """Yield the problems of the tests in ``eval-on``."""
    tests = split(config.eval_on)
    if tests[:1] == ["personal-domains"]:
        yield Problem(
            "no-main-metric",
            "the first test of eval-on gives the run's main metric, but"
            " personal-domains has no mean: name another test before it",
            "eval-on",
        )
    adapted = ",".join(name for name in tests if name.endswith(TEST_BN))
    if adapted and not config.test_bn:
        yield Problem(
            "test-without-test-bn",
            f"eval-on={adapted} needs test-bn: set test-bn to batch or mix",
            "test-bn",
        )


def _of_privacy(config: Fields) -> Iterator[Problem]:
    """Yield the conflicts between the keys of the protections."""
    if config.protected and config.strategy == CENTRALIZED:
        yield Problem(
            "protection-without-clients",
            "strategy=centralized has no clients to protect: leave dp and masked-sums"
            " out",
            "dp masked-sums",
        )
    if config.masked_sums and config.num_clients == 1:
        yield Problem(
            "masked-sum-of-one",
            "masked-sums=true needs at least 2 clients, but num-clients=1: a sum over"
            " one client is this client's update",
            "masked-sums",
        )
    # These rows are in the module of the settings, so this check imports no code of the
    # protections.
    rows = [*DPSettings.rows, *([MASKED_UPDATES] if config.masked_sums else [])]
    for problem in found_problems(rows, config, Known()):
        if problem.effect == "refuse":
            yield problem.spelled("-")
    if config.dp == "off":
        return
    # Noise covers only the model. Whether a round has a result, and which round is the
    # best, must therefore not depend on the clients' data.
    if config.min_replies > 1:
        yield Problem(
            "dp-counts-replies",
            f"min-replies={config.min_replies} conflicts with dp, because a round with"
            " noise has a result even without replies; leave min-replies out",
            "min-replies",
        )
    if config.early_stopping:
        yield Problem(
            "dp-stops-early",
            f"early-stopping={config.early_stopping} chooses a round by the clients'"
            " validation examples, which epsilon does not cover; leave early-stopping"
            " out",
            "early-stopping",
        )


# --- keys without effect --------------------------------------------------------------
def has_no_effect(config: Fields) -> dict[str, str]:
    """Return the keys that are set without effect in this run, with the reason."""
    unused: dict[str, str] = {}
    values, defaults = values_of(config), defaults_of(type(config))

    # Collect the settings of the run's methods. If the name of a method is misspelt,
    # some of these settings are unknown.
    of_run: set[str] = set()
    misspelt = False
    for method in config.method_names:
        if method in PARAMS:
            of_run |= config_fields(PARAMS[method]).keys()
        elif method != CENTRALIZED:
            misspelt = True

    # For each key, list the methods that have it, unless a method of this run has it.
    others = {}
    for key in values:
        name = key.replace("-", "_")
        others[key] = [] if name in of_run else methods_with(name)
    ours = {key: value for key, value in values.items() if not others[key]}

    # A key with its default value counts as not set, so it needs no reason.
    for key, value in values.items():
        if value == defaults[key]:
            continue
        reason = unmet(only_if_of(type(config), key), ours, defaults)
        if key in _OF_A_FEDERATION and config.strategy == CENTRALIZED:
            reason = "strategy=centralized has no clients"
        elif others[key]:
            reason = "" if misspelt else f"it is for {', '.join(others[key])}"
        if reason:
            unused[key] = reason
    for problem in found_problems(DPSettings.rows, config, Known()):
        if problem.effect == "no-effect":
            unused[problem.key.replace("_", "-")] = problem.text
    return unused


def values_of(config: Fields) -> dict[str, Any]:
    """Return the value of each key."""
    fields = type(config).model_fields.items()
    return {field.alias or name: getattr(config, name) for name, field in fields}
