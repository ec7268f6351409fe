"""The command `python -m infinity …`, for launchers that start Python modules. It does the same as the command
`infinity …`."""

import sys

from infinity.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
