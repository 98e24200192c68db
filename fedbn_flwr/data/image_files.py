"""Image files as examples: decoded when they are needed, by worker processes, and kept while there is room.

``hold`` decides: what fits into ``Shape.max_bytes`` is decoded once, into memory; a larger set stays on the disk as
``FileSamples``. Both give the same bits, for any number of worker processes and any size of the cache.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from fedbn_flwr.data.augment import Augment, Draw, transform_image
from fedbn_flwr.data.samples import Examples, Samples
from fedbn_flwr.data.shapes import Shape, reshaped
from fedbn_flwr.errors import DataError
from fedbn_flwr.machine import num_cores

__all__ = ["MODES", "FileSamples", "FileSet", "ImageCache", "hold", "look_at_files"]

Bytes = npt.NDArray[np.uint8]

_CHUNK = 4096
_READ_AHEAD = 3  # batches for each worker process that are asked for before the first one is used
_MOST_AHEAD = 512 * 2**20  # bytes of decoded images that are asked for and not used yet
_HEADER = 64  # bytes; images are aligned to as many
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")
_NOT_BYTES = "its pixels are not bytes (mode {}); save it with 8 bits for each channel"


def hold(
    paths: Sequence[Path],
    labels: Sequence[int],
    parts: Sequence[int],
    shape: Shape,
    *,
    centre: bool = False,
    masks: Sequence[Path] = (),
    mask_table: Bytes | None = None,
    checked: bool = False,
) -> list[Examples]:
    """Return the images of each part, in the requested shape and in the order of ``paths``.

    Args:
        paths: image files. Every colour mode becomes RGB first; grey is computed from RGB.
        labels: class of each image; with ``masks`` its group.
        parts: lengths of the parts, which together are all files: for example training and test files.
        shape: shape of the images, and how many bytes of them are held in memory.
        centre: cut out the central square before resizing; else the whole image is resized to the shape.
        masks: files with the class of each pixel, one for each image.
        mask_table: 256 bytes, the class of each value in the masks.
        checked: the files have been looked at already, see ``look_at_files``.

    Raises:
        DataError: files are damaged; the message names them. Of a set that stays on the disk headers and ends are
            looked at, see ``look_at_files``.
    """
    files = FileSet(paths, shape, centre=centre, masks=masks, mask_table=mask_table)
    ends = np.cumsum([0, *parts])
    numbers = [torch.arange(start, end) for start, end in itertools.pairwise(ends.tolist())]
    classes = torch.tensor(labels, dtype=torch.int64)
    if files.num_bytes <= shape.max_bytes and not shape.originals:
        inputs, targets = files.read_all()
        if targets is None:
            return [Samples(inputs[own], classes[own]) for own in numbers]
        return [Samples(inputs[own], targets[own], classes[own]) for own in numbers]
    if not checked:
        files.check()
    if masks:
        return [FileSamples(files, own, None, classes[own]) for own in numbers]
    return [FileSamples(files, own, classes[own]) for own in numbers]


class FileSet:
    """Image files, decoded to bytes of one shape; with classes of pixels from mask files if there are some.

    Attributes:
        shape: (C, H, W) of the images.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        shape: Shape,
        *,
        centre: bool = False,
        masks: Sequence[Path] = (),
        mask_table: Bytes | None = None,
    ) -> None:
        """Create the set; see ``hold``. No file is read."""
        # As two arrays: a process that is forked would copy a list of names bit by bit, by counting references.
        self._paths, self._masks = _Names(paths), _Names(masks)
        self._wanted, self._centre, self._table = shape, centre, mask_table
        self.shape = (shape.channels, shape.height, shape.width)
        self._cache: ImageCache | None = None
        self._workers: tuple[int, Executor] | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._paths)

    @property
    def has_masks(self) -> bool:
        """Whether there are classes of pixels."""
        return len(self._masks) > 0

    @property
    def num_bytes(self) -> int:
        """The memory of all decoded images and classes of pixels."""
        channels, height, width = self.shape
        return len(self) * (channels + self.has_masks) * height * width

    def read(
        self, numbers: Sequence[int], each: Sequence[str] = (), seeds: Sequence[int] = ()
    ) -> tuple[Bytes, Bytes | None]:
        """Return images, uint8 (B, C, H, W), and the classes of their pixels, uint8 (B, H, W), or None.

        Args:
            numbers: of the files.
            each: transforms of single images, see ``data.augment``; with a seed for each image.
            seeds: the seeds, or () for no transform.

        Raises:
            DataError: a file is damaged; the message names it.
        """
        images = np.empty((len(numbers), *self.shape), np.uint8)
        masks = np.empty((len(numbers), *self.shape[1:]), np.uint8) if self.has_masks else None
        for at, number in enumerate(numbers):
            image, mask = self._stored(number)
            if seeds:
                image, mask = transform_image(image, mask, each, (self.shape[1], self.shape[2]), seeds[at])
            image, mask = self._fitted(image, mask)
            images[at] = image.numpy()
            if masks is not None and mask is not None:
                masks[at] = mask.numpy()
        return images, masks

    def read_all(self) -> tuple[Tensor, Tensor | None]:
        """Return all images and classes of pixels; several threads decode them.

        Raises:
            DataError: files are damaged; the message names all of them.
        """
        inputs = torch.empty(len(self), *self.shape, dtype=torch.uint8)
        targets = torch.empty(len(self), *self.shape[1:], dtype=torch.uint8) if self.has_masks else None
        damaged: dict[int, str] = {}

        def read(number: int) -> None:
            try:
                image, mask = self._fitted(*self._decoded(number))
            except DataError as error:
                damaged[number] = str(error)
                return
            inputs[number] = image
            if targets is not None and mask is not None:
                targets[number] = mask

        _for_all(len(self), read)
        _refuse_damaged(damaged)
        return inputs, targets

    def check(self) -> None:
        """Look at every file, see ``look_at_files``.

        Raises:
            DataError: files are damaged; the message names all of them.
        """
        _refuse_damaged(look_at_files([Path(self._paths[number]) for number in range(len(self))]).problems)

    def ahead(
        self, requests: Iterable[tuple[Sequence[int], Sequence[str], Sequence[int]]]
    ) -> Iterator[tuple[Bytes, Bytes | None]]:
        """Yield ``read`` of each request, in order; worker processes read some requests ahead.

        Raises:
            DataError: a file is damaged, or a worker process has ended.
        """
        count = _num_workers(self._wanted.workers)
        if not count:
            yield from (self.read(*request) for request in requests)
            return
        waiting: deque[Any] = deque()
        try:
            for request in requests:
                waiting.append(self._executor().submit(_read, *request))
                size = max(1, len(request[0])) * (self.num_bytes // max(1, len(self)))
                if len(waiting) > min(count * _READ_AHEAD, max(1, _MOST_AHEAD // size)):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            with self._lock:
                self._workers = None
            raise DataError(
                "a process that decodes images has ended, perhaps for want of memory. Use fewer data-workers, a "
                "smaller cache-gib, or data-workers=0."
            ) from error
        finally:
            for future in waiting:
                future.cancel()

    def _executor(self) -> Executor:
        with self._lock:
            if self._workers is None or self._workers[0] != os.getpid():  # a fork has none of its own
                self._keep()
                pool = _executor(self, _num_workers(self._wanted.workers))
                self._workers = os.getpid(), pool
                weakref.finalize(self, pool.shutdown, wait=False)
            return self._workers[1]

    def _keep(self) -> ImageCache:
        """Return the cache, which processes that are forked later share."""
        if self._cache is None:
            self._cache = ImageCache(len(self), self._wanted.max_bytes)
        return self._cache

    def _stored(self, number: int) -> tuple[Tensor, Tensor | None]:
        """Return what is kept of an image: as decoded if ``Shape.originals``, else in its final shape."""
        cache = self._keep()
        if (found := cache.get(number)) is not None:
            return _unpacked(found, self.has_masks)
        stored = self._decoded(number)
        if not self._wanted.originals:
            stored = self._fitted(*stored)
        cache.put(number, _packed(*stored))
        return stored

    def _decoded(self, number: int) -> tuple[Tensor, Tensor | None]:
        """Return one image as RGB bytes, (3, H, W), and the classes of its pixels, (H, W)."""
        image = _pixels(self._paths[number])
        if not self.has_masks:
            return image, None
        mask = _pixels(self._masks[number], "")
        if mask.shape[1:] != image.shape[1:]:
            raise DataError(
                f"labels {self._masks[number]} are of {mask.shape[2], mask.shape[1]} pixels, the image of "
                f"{image.shape[2], image.shape[1]}."
            )
        classes = mask[0]
        return image, classes if self._table is None else torch.from_numpy(self._table[classes.numpy()])

    def _fitted(self, image: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return an image and classes of pixels in the shape of the set; the same ones if they have it."""
        if tuple(image.shape) == self.shape:
            return image, mask
        if self._centre and tuple(image.shape[1:]) != self.shape[1:]:
            side = min(image.shape[1:])
            top, left = ((extent - side) // 2 for extent in image.shape[1:])
            image = image[:, top : top + side, left : left + side]
        image = reshaped(Samples(image[None], torch.zeros(1, dtype=torch.int64)), self._wanted).inputs[0]
        if mask is not None and tuple(mask.shape) != self.shape[1:]:
            mask = F.interpolate(mask[None, None], self.shape[1:], mode="nearest-exact")[0, 0]
        return image, mask


class FileSamples:
    """Labelled images on the disk; see ``data.samples.Examples``.

    Args:
        files: the files, shared with other samples.
        numbers: the files of these samples, int64 (N,).
        labels: class of each image, int64 (N,); None if the files have classes of pixels.
        groups: group of each image, int64 (N,), or None.
        units: unit of each image, int64 (N,), or None.
        device: of what ``take`` returns.
    """

    def __init__(
        self,
        files: FileSet,
        numbers: Tensor,
        labels: Tensor | None,
        groups: Tensor | None = None,
        units: Tensor | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self.files, self.numbers = files, numbers
        self.device = torch.device(device)
        self._labels, self.groups, self.units = (
            None if part is None else part.to(self.device) for part in (labels, groups, units)
        )

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.numbers)

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, H, W) of an image."""
        return self.files.shape

    @property
    def as_bytes(self) -> bool:
        """Images are bytes."""
        return True

    @property
    def by_pixel(self) -> bool:
        """Whether targets are the classes of pixels."""
        return self._labels is None

    @property
    def by_class(self) -> bool:
        """Whether every image has one class."""
        return self._labels is not None

    @property
    def targets(self) -> Tensor:
        """Class of each image, or of each pixel, which reads all files."""
        return self.take(torch.arange(len(self)))[1] if self._labels is None else self._labels

    @property
    def labels(self) -> Tensor:
        """The class of each image for splits over clients, int64 (N,); all 0 if targets are classes of pixels."""
        return torch.zeros(len(self), dtype=torch.int64, device=self.device) if self._labels is None else self._labels

    def regrouped(self, groups: Tensor | None, units: Tensor | None = None) -> FileSamples:
        """Return the same images with other groups and units."""
        return FileSamples(self.files, self.numbers, self._labels, groups, units, self.device)

    def to(self, device: str | torch.device) -> FileSamples:
        """Return the same samples, whose batches come on ``device``."""
        return FileSamples(self.files, self.numbers, self._labels, self.groups, self.units, device)

    def take(self, chosen: Tensor, augment: Augment | None = None, draw: Draw | None = None) -> tuple[Tensor, Tensor]:
        """Return the images at these numbers and their targets, augmented by what was drawn; this process decodes."""
        return self._batch(self.files.read(*self._request(chosen, augment, draw)), chosen, augment, draw)

    def take_each(
        self, requests: Iterable[tuple[Tensor, Draw | None]], augment: Augment | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ``take`` of each request; worker processes decode some requests ahead."""
        asked: deque[tuple[Tensor, Draw | None]] = deque()

        def each() -> Iterator[tuple[Sequence[int], Sequence[str], Sequence[int]]]:
            for request in requests:
                asked.append(request)
                yield self._request(request[0], augment, request[1])

        for read in self.files.ahead(each()):
            chosen, draw = asked.popleft()
            yield self._batch(read, chosen, augment, draw)

    def _request(
        self, chosen: Tensor, augment: Augment | None, draw: Draw | None
    ) -> tuple[Sequence[int], Sequence[str], Sequence[int]]:
        numbers = self.numbers[chosen.cpu()].tolist()
        if augment is None or draw is None or draw.seeds is None:
            return numbers, (), ()
        return numbers, augment.each, draw.seeds.tolist()

    def _batch(
        self, read: tuple[Bytes, Bytes | None], chosen: Tensor, augment: Augment | None, draw: Draw | None
    ) -> tuple[Tensor, Tensor]:
        inputs = torch.from_numpy(read[0]).to(self.device)
        if self._labels is not None:
            targets = self._labels.index_select(0, chosen.to(self.device))
        else:
            targets = torch.from_numpy(read[1]).to(self.device)
        return (inputs, targets) if augment is None or draw is None else augment.apply(inputs, targets, draw)


class ImageCache:
    """Decoded images in memory that this process and those forked later share; what does not fit is not kept.

    Args:
        count: number of images.
        capacity: bytes; pages are taken from the system when they are written.
    """

    def __init__(self, count: int, capacity: int) -> None:
        self._capacity = capacity if count and capacity > _HEADER else 0
        if not self._capacity:
            return
        try:
            self._bytes = np.frombuffer(mmap(-1, capacity), np.uint8)
        except (OSError, OverflowError, ValueError) as error:
            raise DataError(
                f"cache-gib={capacity / 2**30:g}: the system does not give so much memory ({error}). Use less."
            ) from error
        # The place of each image + 1; 0: not kept, -1: being written. At its place are its shape, then its bytes.
        self._places = np.frombuffer(mmap(-1, count * 8), np.int64)
        self._used = np.frombuffer(mmap(-1, 8), np.int64)
        self._lock = multiprocessing.get_context("fork" if sys.platform != "win32" else "spawn").Lock()

    def get(self, number: int) -> Bytes | None:
        """Return a kept image, (C, H, W); it shares the cache's memory. None if it is not kept."""
        if not self._capacity or (place := int(self._places[number])) <= 0:
            return None
        start = place - 1
        shape = tuple(self._bytes[start : start + _HEADER].view(np.int64)[:3].tolist())
        return self._bytes[start + _HEADER :][: shape[0] * shape[1] * shape[2]].reshape(shape)

    def put(self, number: int, image: Bytes) -> None:
        """Keep an image, uint8 (C, H, W), if there is room."""
        needed = _HEADER + -(-image.size // _HEADER) * _HEADER
        if not self._capacity or self._places[number] or int(self._used[0]) + needed > self._capacity:
            return
        if not self._lock.acquire(timeout=1):
            self._capacity = 0  # its owner was killed: nothing more is kept
            return
        try:
            start = int(self._used[0])
            if self._places[number] or start + needed > self._capacity:
                return
            self._places[number] = -1
            self._used[0] = start + needed
        finally:
            self._lock.release()
        self._bytes[start : start + _HEADER].view(np.int64)[:3] = image.shape
        self._bytes[start + _HEADER :][: image.size] = image.reshape(-1)
        if self._lock.acquire(timeout=1):  # a barrier: the image is written before its place can be read
            self._places[number] = start + 1
            self._lock.release()


class _Names:
    """Paths as one array of bytes and their ends."""

    def __init__(self, paths: Sequence[Path]) -> None:
        encoded = [os.fsencode(path) for path in paths]
        self._bytes = np.frombuffer(b"".join(encoded), np.uint8)
        self._ends = np.cumsum([0, *map(len, encoded)])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> str:
        return os.fsdecode(self._bytes[self._ends[number] : self._ends[number + 1]].tobytes())


@dataclass(frozen=True)
class LookedAt:
    """What a look at image files shows, by their numbers.

    Attributes:
        problems: why a file cannot be read.
        pages: files with several pages, of which the first is used.
        alpha: files with an alpha channel, which is not used.
    """

    problems: dict[int, str]
    pages: list[int]
    alpha: list[int]


def look_at_files(paths: Sequence[Path], *, whole: bool = False) -> LookedAt:
    """Return what is wrong with image files, and what of them is not used.

    Args:
        paths: the files.
        whole: decode each file. Else headers, and ends of JPEG and PNG files, are looked at; but once a file cannot be
            read all are decoded, so that all damaged ones are found together.
    """
    problems, pages, alpha = dict[int, str](), list[int](), list[int]()

    def look(number: int) -> None:
        problem, has_pages, has_alpha = _look(paths[number], whole)
        if problem:
            problems[number] = f"image {paths[number]} cannot be read: {problem}"
        if has_pages:
            pages.append(number)
        if has_alpha:
            alpha.append(number)

    _for_all(len(paths), look)
    if problems and not whole:
        return look_at_files(paths, whole=True)
    return LookedAt(dict(sorted(problems.items())), sorted(pages), sorted(alpha))


def _look(path: Path, whole: bool) -> tuple[str, bool, bool]:
    """Return why an image file cannot be read, "" if it looks sound; whether it has several pages, and alpha."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            if image.mode not in MODES:
                raise ValueError(_NOT_BYTES.format(image.mode))
            if (bits := _bits(path, image)) > 8:
                raise ValueError(f"it has {bits} bits for each channel; save it with 8")
            pages = getattr(image, "is_animated", False) and image.format != "MPO"  # of a phone: a small copy
            alpha = image.has_transparency_data
            if whole or not _has_end(path, image.format):
                image.load()
            return "", pages, alpha
    except Image.DecompressionBombError as error:
        return f"{error} Make it smaller", False, False
    except (OSError, ValueError, SyntaxError) as error:
        return "it is empty" if path.is_file() and not path.stat().st_size else str(error), False, False


def _bits(path: Path, image: Any) -> int:
    """Return the bits of a channel of a PNG or TIFF file, of which Pillow keeps 8 for colours; 8 for other kinds."""
    if image.format == "TIFF":
        return int(max(image.tag_v2.get(258, (8,))))
    if image.format != "PNG":
        return 8
    with path.open("rb") as file:
        return file.read(25)[24]


def _has_end(path: Path, kind: str | None) -> bool:
    """Return whether the end of a JPEG or PNG file is where it usually is; True for other kinds."""
    ends = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND"}
    if kind not in ends:
        return True
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        return ends[kind] in file.read()


def _pixels(path: str, mode: str = "RGB") -> Tensor:
    """Return one image as bytes, (C, H, W): RGB, or as they are (for example the numbers of a palette)."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            if image.mode not in MODES:
                raise ValueError(_NOT_BYTES.format(image.mode))
            pixels = np.array(image.convert(mode) if mode else image, dtype=np.uint8)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # Pillow's, for damaged files
        raise DataError(f"image {path} cannot be read: {error}") from error
    return torch.from_numpy(pixels if pixels.ndim == 3 else pixels[:, :, None]).permute(2, 0, 1)


def _packed(image: Tensor, mask: Tensor | None) -> Bytes:
    whole: Bytes = (image if mask is None else torch.cat([image, mask[None]])).numpy()
    return whole


def _unpacked(stored: Bytes, has_mask: bool) -> tuple[Tensor, Tensor | None]:
    whole = torch.from_numpy(stored)
    return (whole[:-1], whole[-1]) if has_mask else (whole, None)


def _for_all(count: int, act: Any) -> None:
    with ThreadPoolExecutor(min(8, num_cores())) as pool:
        for start in range(0, count, _CHUNK):  # a million futures at the same time would need a gigabyte
            list(pool.map(act, range(start, min(start + _CHUNK, count))))


def _refuse_damaged(damaged: dict[int, str]) -> None:
    if damaged:
        first = [damaged[number] for number in sorted(damaged)[:10]]
        more = f"\nand {len(damaged) - 10} more" if len(damaged) > 10 else ""
        count = f"{len(damaged)} image files cannot be read:\n" if len(damaged) > 1 else ""
        raise DataError(count + "\n".join(first) + more)


def _num_workers(asked: int) -> int:
    """Return the number of processes that decode: for -1 the cores, or none where several processes have clients."""
    if asked >= 0:
        return asked
    ray = sys.modules.get("ray")
    shared = multiprocessing.parent_process() is not None or (ray is not None and ray.is_initialized())
    if shared:
        return 0
    return num_cores()


def _executor(files: FileSet, workers: int) -> Executor:
    """Return worker processes that are forks of this one, which share the cache; threads where there are no forks."""
    if sys.platform == "win32":
        return ThreadPoolExecutor(workers, initializer=_open_set, initargs=(weakref.ref(files), 0))
    context = multiprocessing.get_context("fork")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: the processes only decode
        # The pool ends with the files: it must not be what keeps them.
        pool = ProcessPoolExecutor(workers, context, _open_set, (weakref.ref(files), os.getpid()))
        pool.submit(int).result()  # starts all processes
    return pool


_of_this_worker = threading.local()


def _read(numbers: Sequence[int], each: Sequence[str], seeds: Sequence[int]) -> tuple[Bytes, Bytes | None]:
    """Do ``FileSet.read`` with the worker's files."""
    found: tuple[Bytes, Bytes | None] = _of_this_worker.files.read(numbers, each, seeds)
    return found


def _open_set(files: weakref.ref[FileSet], parent: int) -> None:
    """Prepare a worker for one set of files; a process ends when its parent has ended, however that came about."""
    _of_this_worker.files = files()
    if not parent:
        return
    torch.set_num_threads(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
