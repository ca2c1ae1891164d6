"""`python -m stoker.trace`."""

import sys

from .cli import main

sys.exit(main(sys.argv[1:]))
