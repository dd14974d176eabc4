"""What reading costs: `python -m benchmarks.input`. The CPU time of one epoch over JPEG files, summed over all processes.

One device decodes each image once. N processes that train what one device trains should do no more together.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.crews import Variant
from benchmarks.turns import compare, turns_parser

REFERENCE = "one device"
_SIZES = (1, 2, 4, 8)
_MOST = 1.15


def variants(sizes: Sequence[int]) -> list[Variant]:
    """Lists what is measured: one device, and numbers of processes under `MultiWorkerStrategy`."""
    several = [Variant(_name(size), {"distributed": True}, size) for size in sizes]
    return [Variant(REFERENCE, {"distributed": False}), *several]


def _name(size: int) -> str:
    return "1 process" if size == 1 else f"{size} processes"


def write_images(folder: Path, number: int, pixels: int) -> None:
    """Writes square JPEG files that look like nothing, but take as long to decode as photographs."""
    draw = np.random.RandomState(0)
    for i in range(number):
        coarse = draw.randint(0, 255, (pixels // 8, pixels // 8, 3)).astype("float32")
        image = tf.cast(tf.image.resize(coarse, (pixels, pixels), "bicubic"), tf.uint8)
        (folder / f"{i:04}.jpg").write_bytes(tf.io.encode_jpeg(image).numpy())


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints tables, and writes JSON if asked to.

    Args:
        arguments: The command line; by default this process's own.

    Returns:
        What is written as JSON, by workload.
    """
    parser = turns_parser("input", __doc__, rounds=5)
    parser.add_argument("--images", type=int, default=4096, help="how many files there are")
    parser.add_argument("--pixels", type=int, default=384, help="height and width of an image")
    parser.add_argument("--processes", type=int, nargs="+", default=list(_SIZES), help="how many processes there are")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="tfrep-images-") as folder:
        write_images(Path(folder), chosen.images, chosen.pixels)
        name = f"{chosen.images} JPEG files"
        return compare(
            variants(chosen.processes),
            "benchmarks.input_worker",
            {name: {"folder": folder}},
            chosen,
            targets={name: {(_name(size), REFERENCE): _MOST for size in chosen.processes}},
            title="CPU time of an epoch over {name}, all processes together",
            reference=REFERENCE,
        )


if __name__ == "__main__":
    main()
