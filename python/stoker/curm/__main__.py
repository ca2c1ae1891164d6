"""`python -m stoker.curm train ARGS`: what `stoker curm train` runs."""

import sys

from stoker.curm import train


def main() -> int:
    return train.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
