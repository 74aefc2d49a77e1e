"""``python -m fsmap`` is ``fsmap``."""

import sys

from fsmap.cli import main

if __name__ == "__main__":
    sys.exit(main())
