"""Reading a folder of images that is larger than memory, beside torchvision's ImageFolder in a DataLoader.

``python benchmarks/images.py [--count 50000] [--workers 2] [--cache-gib 0.5] [--write docs/performance.md]`` makes a
folder of JPEG files of 224 pixels (smooth random fields with noise, each different, about 20 kB), in four clients of
ten classes, once, in ``--folder``. Both ways read the same files in batches of 64, with the same random resized crop
and flip by torchvision, and with as many worker processes; they take turns. The memory is that of the process and its
workers (proportional set size), while the clients read in turn for three rounds.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from measure import facts, table, write_block
from PIL import Image
from rich.progress import track
from torchvision import datasets
from torchvision.transforms import v2

from fedbn_flwr.lab.data import OwnData, Subset, load_dataset, own_info
from fedbn_flwr.lab.data.augment import Augment

SIZE, CLIENTS, CLASSES, BATCH = 224, 4, 10, 64


def make(folder: Path, count: int) -> None:
    """Write the folder ``client/class/file``; a complete one stays as it is."""
    done = folder / "complete"
    if done.is_file() and int(done.read_text()) == count:
        return
    places = [folder / f"client-{at // CLASSES}/class-{at % CLASSES}" for at in range(CLIENTS * CLASSES)]
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:
        each = [(places[at % len(places)] / f"{at:06}.jpg", at) for at in range(count)]
        list(track(pool.map(_write, each, chunksize=256), "making images", total=count))
    done.write_text(str(count))


def _write(job: tuple[Path, int]) -> None:
    path, seed = job
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (9, 9, 3)).astype(np.uint8)).resize(
        (SIZE, SIZE), Image.Resampling.BICUBIC
    )
    noise = rng.normal(0, 8, (SIZE, SIZE, 1))
    pixels = (np.asarray(coarse, np.float32) + noise).clip(0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(path, quality=85)


def ours(folder: Path, workers: int, cache_gib: float) -> dict[int, Subset]:
    """Return the clients' data."""
    augment = Augment.parse("resized-crop,flip")
    info = own_info(OwnData("folder", str(folder), test_share=0.01))
    size = int(cache_gib * 2**30)
    data = load_dataset(info, size=SIZE, max_bytes=size, originals=True, workers=workers)
    groups = data.train.groups
    if groups is None:
        raise ValueError("the folder has no clients")
    return {
        client: Subset(
            data.train, torch.nonzero(groups == client).flatten(), mean=data.mean, std=data.std, augment=augment
        )
        for client in range(CLIENTS)
    }


def read_ours(subset: Subset, count: int, seed: int) -> float:
    """Return images per second."""
    order = torch.randperm(len(subset), generator=torch.Generator().manual_seed(seed))[:count]
    start = time.perf_counter()
    for inputs, _ in subset.batches(torch.split(order, BATCH), torch.Generator().manual_seed(seed)):
        inputs.sum()
    return len(order) / (time.perf_counter() - start)


def read_torchvision(folder: Path, workers: int, count: int, seed: int) -> float:
    """Return images per second of one client's folder; the workers are started as the loader is."""
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(SIZE),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    data = datasets.ImageFolder(str(folder), transform)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:count]
    loader: Any = torch.utils.data.DataLoader(
        torch.utils.data.Subset(data, order.tolist()), BATCH, num_workers=workers, persistent_workers=True
    )
    next(iter(loader))  # the workers have started
    start = time.perf_counter()
    for inputs, _ in loader:
        inputs.sum()
    return len(order) / (time.perf_counter() - start)


def memory() -> float:
    """Return the proportional set size of this process and its children, MiB."""
    return sum(_pss(process) for process in _family(os.getpid())) / 1024


def _family(process: int) -> Iterator[int]:
    yield process
    children = Path(f"/proc/{process}/task/{process}/children")
    for child in children.read_text().split() if children.is_file() else ():
        yield from _family(int(child))


def _pss(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except (OSError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def main(
    count: Annotated[int, typer.Option(help="Images in the folder.")] = 50_000,
    workers: Annotated[int, typer.Option(help="Worker processes of both.")] = 2,
    cache_gib: Annotated[float, typer.Option(help="GiB of decoded images that are kept.")] = 0.5,
    turns: Annotated[int, typer.Option(help="Turns of each way.")] = 5,
    each: Annotated[int, typer.Option(help="Images of a turn.")] = 4000,
    folder: Annotated[Path | None, typer.Option(help="Where the images are or will be.")] = None,
    write: Annotated[Path | None, typer.Option(help="Page whose block is replaced.")] = None,
) -> None:
    """Measure images per second and memory."""
    torch.set_num_threads(1)
    folder = folder or Path(tempfile.gettempdir()) / "fedbn-flwr-images"
    make(folder, count)
    speeds: dict[str, list[float]] = {"ours": [], "ours, none kept": [], "torchvision": []}
    fresh = ours(folder, workers, 0)
    for turn in range(turns):
        client = turn % CLIENTS
        speeds["ours, none kept"].append(read_ours(fresh[client], each, turn))
        speeds["torchvision"].append(read_torchvision(folder / f"client-{client}", workers, each, turn))
    del fresh
    kept = ours(folder, workers, cache_gib)
    memories = []
    for server_round in range(3):
        for client, subset in kept.items():
            speed = read_ours(subset, each, 100 * server_round + client)
            if server_round:
                speeds["ours"].append(speed)
        memories.append(memory())
    base = statistics.median(speeds["torchvision"])
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    rows = [(name, f"{speed:.0f}", f"{speed / base:.2f}") for name, speed in medians.items()]
    lines = [
        table((f"{count:,} files, {workers} workers", "images per second", "/ torchvision"), rows),
        "",
        f"Memory after rounds 1, 2, 3 with cache-gib={cache_gib:g}: {', '.join(f'{m:.0f}' for m in memories)} MiB.",
        facts(),
    ]
    print("\n".join(lines))
    if write:
        write_block(write, "images", "\n".join(lines))


if __name__ == "__main__":
    typer.run(main)
