"""The command `python -m infinity.run CONFIG SCRIPT [ARGS…]`, for launchers that start Python modules. It does the same
as `infinity run`."""

import sys

from infinity.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
