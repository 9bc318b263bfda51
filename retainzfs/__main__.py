"""`python -m retainzfs`."""

import sys

from retainzfs.cli import main

if __name__ == "__main__":
    sys.exit(main())
