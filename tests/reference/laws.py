"""Any number of draws with new seeds, and the pairs of values that no draw had.

    make laws DRAWS=10000

A block of draws has its number as the seed. Finished blocks are lines of a file: the
same command with more draws continues after them. A block that fails prints its
smallest case, ready for ``@example``.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import logging
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, assume, given, seed, settings

from fedbn_flwr.compat.flower import identify_process
from tests.reference.compare import check
from tests.reference.draws import Case, cases

BLOCK = 100


def run_block(number: int) -> dict:
    """Do the draws of a block and shrink a failing case."""
    logging.disable(logging.CRITICAL)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    identify_process(1)
    equal = []  # hypothesis repeats cases
    failing = []

    @seed(number)
    @settings(
        max_examples=BLOCK,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(cases())
    def draws(case: Case) -> None:
        assume(repr(case) not in equal)
        try:
            check(case)
        except Exception as error:
            failing.append(f"{case!r}\n{type(error).__name__}: {error}")
            raise
        equal.append(repr(case))

    try:
        draws()
    except Exception as error:  # even hypothesis' own errors are reported
        failing = failing or [repr(error)]
    smallest = min(failing, key=len, default="")
    return {"block": number, "cases": equal, "failing": smallest}


def axes(case: Case) -> list[tuple[str, str]]:
    """Return the choices of a case by axis, with each method as an axis."""
    chosen = [("methods", name) for name in case.methods or ("fedavg",)]
    for field in dataclasses.fields(Case):
        if field.name not in ("methods", "seed", "hidden", "faults"):
            chosen.append((field.name, str(getattr(case, field.name))))
    chosen.append(("hidden", str(bool(case.hidden))))
    kinds = {kind for _, _, kind in case.faults} or {"none"}
    chosen += [("faults", kind) for kind in kinds]
    return sorted(chosen)


def pairs_never_drawn(drawn: list[Case]) -> list[str]:
    """Return the pairs of choices of two axes that no case had."""
    single = set()
    seen = Counter()
    for case in drawn:
        chosen = axes(case)
        single.update(chosen)
        seen.update(itertools.combinations(chosen, 2))
    missing = []
    for one, other in itertools.combinations(sorted(single), 2):
        apart = one[0] != other[0] or one[0] == "methods"
        if apart and not seen[one, other]:
            missing.append(f"{one[0]}={one[1]} with {other[0]}={other[1]}")
    return missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=1000, help="number of draws")
    parser.add_argument("--processes", type=int, default=2, help="draws at a time")
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first block"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/laws.jsonl"), help="finished blocks"
    )
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    done = {}
    if options.out.exists():
        for line in options.out.read_text().splitlines():
            done[json.loads(line)["block"]] = json.loads(line)
    first, count = options.first, -(-options.draws // BLOCK)
    todo = [number for number in range(first, first + count) if number not in done]
    with ProcessPoolExecutor(options.processes) as pool, options.out.open("a") as file:
        for block in pool.map(run_block, todo):
            file.write(json.dumps(block) + "\n")
            file.flush()
            done[block["block"]] = block
            state = "differs" if block["failing"] else "ok"
            print(f"block {block['block']}: {len(block['cases'])} draws, {state}")
            if block["failing"]:
                print(block["failing"], flush=True)
    blocks = [done[number] for number in range(first, first + count)]
    drawn = [eval(text, {"Case": Case}) for block in blocks for text in block["cases"]]
    failing = [block["failing"] for block in blocks if block["failing"]]
    missing = pairs_never_drawn(drawn)
    print(f"{len(drawn)} draws, {len(failing)} blocks differ")
    print(f"{len(missing)} pairs of values were never drawn together:")
    print("\n".join(missing))
    raise SystemExit(bool(failing))


if __name__ == "__main__":
    main()
