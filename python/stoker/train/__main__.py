"""`python -m stoker.train` is what `stoker train` runs."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
