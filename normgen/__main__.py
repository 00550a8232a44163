"""`python -m normgen`."""

import sys

from normgen.cli import main

if __name__ == "__main__":
    sys.exit(main())
