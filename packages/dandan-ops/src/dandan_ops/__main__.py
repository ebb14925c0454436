"""`python -m dandan_ops` is the command `dandan-ops`."""

import sys

from dandan_ops.cli import main

if __name__ == "__main__":
    sys.exit(main())
