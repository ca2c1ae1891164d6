"""`python -m stoker.train` is what `stoker train` runs."""

import sys

from .cli import main

sys.exit(main())
