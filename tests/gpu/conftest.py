"""Makes the helpers of tests/parity and the launcher of tests/distributed importable by name."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
for folder in (HERE, TESTS / "parity", TESTS / "distributed", TESTS.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
