"""Path of the bench's modules, which are not in a package: the modules' folder is added to sys.path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
