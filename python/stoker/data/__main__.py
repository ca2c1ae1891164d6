"""`python -m stoker.data`: see prepare.py."""

import signal
import sys

from .prepare import main

signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # its reader was killed: it ends too, without a traceback
sys.exit(main())
