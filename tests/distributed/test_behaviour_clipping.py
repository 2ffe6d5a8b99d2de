"""torch's own clipping functions under ``install``: results, errors, warnings and gradients."""

from __future__ import annotations

import pytest
from behaviour import differences, returned

USUAL = {"usual_clipping": 2, "usual_clipping_on_four": 4}
UNUSUAL = {"unusual_clipping": 2, "unusual_clipping_on_four": 4}


@pytest.mark.parametrize(("name", "world"), (USUAL | UNUSUAL).items())
def test_all_is_as_in_torch(name: str, world: int) -> None:
    found = zip(returned(name, "fsdp_c", world), returned(name, "torch", world), strict=True)
    for ours, theirs in found:
        for case, expected in theirs["seen"].items():
            assert differences(expected, ours["seen"][case]) == [], case


@pytest.mark.parametrize(("name", "world"), USUAL.items())
def test_what_is_usual_takes_the_c_path(name: str, world: int) -> None:
    for ours in returned(name, "fsdp_c", world):
        # A call of three_ways takes it six times where nothing raises.
        assert ours["taken"] > 5 * len(ours["seen"])
