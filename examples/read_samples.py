"""Reads an epoch of a data set that other tools wrote, shuffled, from any store, and times it.

python examples/read_samples.py mds dir:/data train       # MosaicML's MDS shards below /data/train
python examples/read_samples.py arrow dir:/data train     # what Dataset.save_to_disk wrote there
python examples/read_samples.py safetensors dir:/data rows.safetensors
"""

from __future__ import annotations

import argparse
import time

import stoker
from stoker.data import Arrow, Loader, Mds, Safetensors

SOURCES = {"mds": Mds, "arrow": Arrow, "safetensors": Safetensors}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=tuple(SOURCES))
    parser.add_argument("store", help='where the data set is: "dir:/data", "s3://bucket/prefix"')
    parser.add_argument("name", nargs="?", default="", help="the data set's folder or object there")
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()

    with stoker.open_store(args.store, read_only=True) as store:
        source = SOURCES[args.kind](store, args.name)
        loader = Loader(source, batch=args.batch, seed=1, shuffle="window")
        began, samples = time.perf_counter(), 0
        for batch in loader:
            if samples == 0:
                print("the first sample:", batch[0])
            samples += len(batch)
        seconds = time.perf_counter() - began
        print(f"{samples} samples, {samples / seconds:.0f} a second")
        loader.close()


if __name__ == "__main__":
    main()
