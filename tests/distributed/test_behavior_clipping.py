"""torch's own clipping functions under ``install``: results, errors, warnings and gradients."""

from __future__ import annotations

import pytest
from behavior import differences, returned

COMMON = {"usual_clipping": 2, "usual_clipping_on_four": 4}
UNCOMMON = {"unusual_clipping": 2, "unusual_clipping_on_four": 4}


@pytest.mark.parametrize(("name", "world"), (COMMON | UNCOMMON).items())
def test_clipping_functions_match_torch(name: str, world: int) -> None:
    pairs = zip(returned(name, "fsdp_c", world), returned(name, "torch", world), strict=True)
    for by_fsdp_c, by_torch in pairs:
        for case, expected in by_torch["results"].items():
            assert differences(expected, by_fsdp_c["results"][case]) == [], case


@pytest.mark.parametrize(("name", "world"), COMMON.items())
def test_common_clipping_calls_take_the_c_path(name: str, world: int) -> None:
    for by_fsdp_c in returned(name, "fsdp_c", world):
        # Each call of clip_three_ways takes the C path six times, unless it raises.
        assert by_fsdp_c["c_calls"] > 5 * len(by_fsdp_c["results"])
