"""`python -m stoker.curm train ARGS`: what `stoker curm train` runs."""

import sys

from stoker.curm import train

if __name__ == "__main__":
    sys.exit(train.main(sys.argv[2:]))
