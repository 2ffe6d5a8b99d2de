"""torch's own clipping functions under ``install``: results, errors, warnings and gradients."""

from __future__ import annotations

import pytest
from behavior import differences, get_results

ON_C_PATH = {"clipping_on_c_path": 2, "clipping_on_c_path_of_four_ranks": 4}
ON_TORCH_PATH = {"clipping_on_torch_path": 2, "clipping_on_torch_path_of_four_ranks": 4}


@pytest.mark.parametrize(("name", "world"), (ON_C_PATH | ON_TORCH_PATH).items())
def test_clipping_functions_match_torch(name: str, world: int) -> None:
    pairs = zip(get_results(name, "fsdp_c", world), get_results(name, "torch", world), strict=True)
    for by_fsdp_c, by_torch in pairs:
        for case, expected in by_torch["results"].items():
            assert differences(expected, by_fsdp_c["results"][case]) == [], case


@pytest.mark.parametrize(("name", "world"), ON_C_PATH.items())
def test_clipping_scenarios_with_supported_gradients_take_the_c_path(name: str, world: int) -> None:
    for by_fsdp_c in get_results(name, "fsdp_c", world):
        # Each call of clip_three_ways takes the C path six times, unless it raises.
        assert by_fsdp_c["c_calls"] > 5 * len(by_fsdp_c["results"])
