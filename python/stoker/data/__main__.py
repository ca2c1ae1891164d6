"""`python -m stoker.data`: see prepare.py."""

import sys

from .prepare import main

sys.exit(main())
