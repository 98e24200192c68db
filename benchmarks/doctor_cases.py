"""The doctor on planted cases, with its first remedy tried, and on ten healthy runs, where it should find nothing.

    python benchmarks/doctor_cases.py                  # both; 6 minutes on one core
    python benchmarks/doctor_cases.py --seeds 10       # the healthy runs alone
    python benchmarks/doctor_cases.py --clients 100    # one client among many, and 100 healthy federations; 15 minutes
    python benchmarks/doctor_cases.py --clients 100 --first-seed 300    # other healthy federations

The runs are on scikit-learn's digits. A planted case is a run whose settings have one known fault; the first remedy
that the doctor names is then set in the same run. The exit code is 1 where the doctor names another fault first, or
finds something in a healthy run; with --clients where it misses a case that is not in MISSED, or accuses a healthy one.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor, nn

from fedbn_flwr import diagnose
from fedbn_flwr.doctor import Diagnosis
from fedbn_flwr.lab.config import Config
from fedbn_flwr.lab.doctor import diagnose_run
from fedbn_flwr.lab.models.mlp import MLP
from fedbn_flwr.lab.runs.run import run

HEALTHY: dict[str, Any] = {
    **{"dataset": "digits", "partition": "iid", "num-clients": 5, "model": "doctor_cases:deep", "image-size": 28},
    **{"learning-rate": 0.1, "num-server-rounds": 12, "eval-every": 12, "checkpoint-every": 0},
}
"""FedAvg on five equal clients, an epoch a round."""


def deep(num_classes: int, channels: int, size: int) -> nn.Module:
    """Return the network of three hidden layers."""
    return MLP(num_classes, channels * size * size, hidden=(64, 64, 64))


class Case(NamedTuple):
    """A planted fault: the run, what the doctor should find first, its first remedy, and that remedy as settings."""

    settings: Mapping[str, Any]
    finding: str
    remedy: str
    tried: Mapping[str, Any]


ONE_STEP = {"local-steps": 1, "num-server-rounds": 100, "eval-every": 100}
DOMAINS = {**HEALTHY, "dataset": "digits-domains", "partition": "domain", "model": "lenet"}
del DOMAINS["image-size"]
CASES = {
    "label skew, E = 1": Case(
        {**HEALTHY, "partition": "classes", **ONE_STEP}, "label-skew", "strategy=fedtan", {"strategy": "fedtan"}
    ),
    "label skew, E = 20": Case(
        {**HEALTHY, "partition": "classes", "local-steps": 20},
        "label-skew",
        "strategy=fedtan",
        {"strategy": "fedtan"},
    ),
    "feature-shifted domains": Case(
        {**DOMAINS, "eval-on": "personal-global"},
        "feature-shift",
        "strategy=fedbn",
        {"strategy": "fedbn", "eval-on": "personal-own"},
    ),
    "batch size 2": Case({**HEALTHY, "batch-size": 2}, "small-batch", "batch-size=16", {"batch-size": 16}),
}


def examined(settings: Mapping[str, Any]) -> tuple[dict[str, Any], Diagnosis]:
    """Return the summary of a run, and its diagnosis."""
    with tempfile.TemporaryDirectory() as folder:
        summary = run(Config.make(settings), Path(folder) / "run", workers=0)
        return summary, diagnose_run(Path(folder) / "run")


def score(summary: Mapping[str, Any]) -> float:
    """Return the final value of the run's headline metric."""
    return float(summary["final"][summary["headline"]])


Examples = tuple[Tensor, Tensor]


class Planted(NamedTuple):
    """A fault of some clients' examples, and the findings of which one must name exactly these clients."""

    plant: Callable[[Tensor, Tensor, torch.Generator], Examples]
    findings: tuple[str, ...]


PLANTED = {
    "permuted pixels": Planted(
        lambda x, y, g: (x[:, torch.randperm(64, generator=g)], y), ("client-inputs", "client-below")
    ),
    "reversed pixels": Planted(lambda x, y, g: (x.flip(1), y), ("client-inputs", "client-below")),
    "inputs x 255": Planted(lambda x, y, g: (255 * x, y), ("client-units",)),
    "inputs in other units": Planted(lambda x, y, g: (1.8 * x + 32, y), ("client-units",)),
    "swapped labels": Planted(lambda x, y, g: (x, torch.randperm(10, generator=g)[y]), ("client-below",)),
    "another class mix": Planted(lambda x, y, g: (x[y < 5], y[y < 5]), ("client-classes",)),
}


MISSED = {
    ("mlp", 5, "reversed pixels", 2): "two of five clients that look alike are no exception",
    ("mlp", 40, "another class mix", 2): "one of the two has 10 examples",
    ("cnn", 40, "another class mix", 2): "one of the two has 10 examples",
}
"""Cases that are missed, by network, clients, fault and number of odd clients, and why; docs/doctor.md has them."""


def dealt(clients: int, seed: int, alpha: float) -> list[Examples]:
    """Deal the digits to clients of uneven sizes, up to a factor of 5; with alpha > 0 by Dirichlet(alpha)."""
    from sklearn.datasets import load_digits

    inputs, targets = (torch.as_tensor(values) for values in load_digits(return_X_y=True))
    torch.manual_seed(seed)
    shares = torch.rand(clients).add(0.25).expand(10, clients)
    if alpha:
        shares = torch.distributions.Dirichlet(torch.full((clients,), alpha)).sample((10,))
    owner = torch.multinomial(shares[targets], 1)[:, 0]
    parts = [(inputs[owner == k].float() / 16, targets[owner == k]) for k in range(clients)]
    return [part for part in parts if len(part[1]) >= 8]


def network(kind: str, momentum: float = 0.1) -> nn.Module:
    """Return an untrained MLP or CNN with two BatchNorm layers."""
    if kind == "mlp":
        first, second, width = nn.Linear(64, 64), nn.Linear(64, 64), 64
        norms = [nn.BatchNorm1d(64, momentum=momentum) for _ in range(2)]
        return nn.Sequential(first, norms[0], nn.ReLU(), second, norms[1], nn.ReLU(), nn.Linear(width, 10))
    head = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=momentum), nn.ReLU()]
    body = [nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16, momentum=momentum), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*head, *body, nn.Linear(256, 10))


def federated(model: nn.Module, parts: list[Examples], rounds: int = 6) -> nn.Module:
    """Train by plain FedAvg, an epoch a round, statistics averaged with the weights; return the model in eval mode."""
    total = sum(len(y) for _, y in parts)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(rounds):
        mean = {name: torch.zeros_like(value) for name, value in state.items()}
        for x, y in parts:
            model.load_state_dict(state)
            model.train()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for batch in torch.randperm(len(y)).tensor_split(max(1, len(y) // 16)):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            for name, value in model.state_dict().items():
                counter = not value.is_floating_point()
                mean[name] = torch.maximum(mean[name], value) if counter else mean[name] + len(y) / total * value
        state = mean
    model.load_state_dict(state)
    return model.eval()


def diagnosed(model: nn.Module, parts: list[Examples]) -> Diagnosis:
    """Return the diagnosis, each part a client."""
    return diagnose(model, {str(k): [part] for k, part in enumerate(parts)})


def planted_clients() -> Iterator[tuple[str, bool]]:
    """Yield a line for each case of one or two odd clients, and whether the answer is as it should be, or as known."""
    for kind in ("mlp", "cnn"):
        for clients in (5, 20, 40):
            for odd in ([1], [1, 2]):
                for fault, (plant, wanted) in PLANTED.items():
                    parts = dealt(clients, clients, 0.0)
                    for k in odd:
                        parts[k] = plant(*parts[k], torch.Generator().manual_seed(k))
                    torch.manual_seed(0)
                    found = diagnosed(federated(network(kind), parts), parts)
                    about = {f.id: f.numbers["clients"] for f in found.findings if f.id.startswith("client-")}
                    named = {name for finding in wanted for name in about.get(finding, ())}
                    good = named == {str(k) for k in odd} and all(set(who) <= named for who in about.values())
                    told = "; ".join(f"{finding}: {', '.join(who)}" for finding, who in about.items()) or "-"
                    truth = ", ".join(f"{k} ({len(parts[k][1])} examples)" for k in odd)
                    known = (kind, clients, fault, len(odd)) in MISSED
                    answer = "found" if good else "missed, as known" if known else "missed"
                    yield f"| {kind} | {clients} | {fault} | {truth} | {told} | {answer} |", good or known


def planted_models() -> Iterator[tuple[str, bool]]:
    """Yield a line for each case of a momentum or a gamma, and whether its finding is there."""
    for kind in ("mlp", "cnn"):
        parts = dealt(5, 5, 0.0)
        for fault in ("momentum 0", "momentum 1", "gamma x 0.03", "gamma x 0.01", "gamma x 0.001"):
            torch.manual_seed(0)
            model = federated(network(kind, float(fault[-1]) if fault.startswith("m") else 0.1), parts)
            if fault.startswith("gamma"):
                layer = [m for m in model.modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d))][-1]
                before = diagnosed(model, parts).measures["train-test-mismatch"]["running_accuracy"]
                with torch.no_grad():
                    layer.weight.mul_(float(fault.split()[-1]))
            found = diagnosed(model, parts)
            accuracy = found.measures["train-test-mismatch"]["running_accuracy"]
            remedies = {f.id: [remedy.setting for remedy in f.remedies] for f in found.findings}
            if fault == "momentum 0":
                good = [*remedies][:1] == ["unmoved-statistics"] and "fixbn" not in str(remedies)
            elif fault == "momentum 1":  # no fault by itself: the advice must fit
                good = "bn-momentum=0.3" not in str(remedies)
            else:
                good = ("dead-layer" in remedies) == (before - accuracy >= 0.05)
            told = "; ".join(f"{finding}: `{settings[0]}`" for finding, settings in remedies.items()) or "-"
            yield f"| {kind} | {fault} | {accuracy:.3f} | {told} | {'right' if good else 'wrong'} |", good


def healthy(seeds: range) -> Iterator[tuple[str, bool]]:
    """Yield a line for each healthy federation, and whether no client was accused."""
    for seed in seeds:
        clients, alpha = (5, 7, 10, 14, 20, 30, 40)[seed % 7], (0.0, 0.5, 0.0, 0.1, 2.0)[seed % 5]
        parts, kind = dealt(clients, seed, alpha), ("mlp", "cnn")[seed % 2]
        torch.manual_seed(seed)
        found = diagnosed(federated(network(kind), parts), parts)
        about = [f"{f.id}: {', '.join(f.numbers['clients'])}" for f in found.findings if f.id.startswith("client-")]
        ids = [f.id for f in found.findings if not f.id.startswith("client-")]
        split = f"Dirichlet({alpha})" if alpha else "equal"
        yield (
            f"| {seed} | {kind} | {len(parts)} | {split} | {'; '.join(about) or '-'} | {', '.join(ids) or '-'} |",
            not about,
        )


def one_client(seeds: range) -> int:
    """Print the tables of one client among many; return the number of wrong answers that are not known."""
    torch.set_num_threads(1)
    wrong = 0
    for head, cases in (
        ("| network | clients | fault | of client | found | |", planted_clients()),
        ("| network | fault | accuracy | found | |", planted_models()),
        ("| healthy, seed | network | clients | split | of a client | of all |", healthy(seeds)),
    ):
        print(head, "|---" * (head.count("|") - 1) + "|", sep="\n")
        results = []
        for line, good in cases:
            print(line, flush=True)
            results.append(good)
        wrong += results.count(False)
        print(f"\n{len(results)} cases, {results.count(True)} as they should be, or as known\n", flush=True)
    return wrong


def main(
    seeds: Annotated[int, typer.Option(help="Healthy runs; above 0 these alone.")] = 0,
    clients: Annotated[int, typer.Option(help="Healthy federations beside planted clients; above 0 these alone.")] = 0,
    first_seed: Annotated[int, typer.Option(help="Seed of the first healthy federation.")] = 0,
) -> None:
    """Print the tables."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    if clients:
        raise typer.Exit(int(bool(one_client(range(first_seed, first_seed + clients)))))
    wrong = 0
    if not seeds:
        print("| case | found | first remedy | accuracy | with the remedy |\n|---|---|---|---|---|")
        for name, case in CASES.items():
            summary, found = examined(case.settings)
            ids, first = (
                [f.id for f in found.findings],
                found.findings[0].remedies[0].setting if found.findings else "-",
            )
            wrong += ids[:1] != [case.finding] or first != case.remedy
            after = run_score({**case.settings, **case.tried})
            print(f"| {name} | {', '.join(ids)} | `{first}` | {score(summary):.3f} | {after:.3f} |", flush=True)
        print()
    print("| healthy run, seed | accuracy | findings |\n|---|---|---|")
    for seed in range(seeds or 10):
        summary, found = examined({**HEALTHY, "seed": seed})
        wrong += bool(found.findings)
        print(f"| {seed} | {score(summary):.3f} | {', '.join(f.id for f in found.findings) or 'none'} |", flush=True)
    raise typer.Exit(int(bool(wrong)))


def run_score(settings: Mapping[str, Any]) -> float:
    """Return the final score of a run."""
    with tempfile.TemporaryDirectory() as folder:
        return score(run(Config.make(settings), Path(folder) / "run", workers=0))


if __name__ == "__main__":
    typer.run(main)
