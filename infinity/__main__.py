"""`python -m infinity …`, for launchers that start modules. Does the same as `infinity …`."""

import sys

from infinity.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
