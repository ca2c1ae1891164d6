"""`python -m stoker.data`: see prepare.py."""

import signal
import sys

from .prepare import main

if __name__ == "__main__":
    # its reader was killed: it ends too, without a traceback
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
