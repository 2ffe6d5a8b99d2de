"""torch's own clipping functions under ``install``: results, errors, warnings and gradients."""

from __future__ import annotations

import pytest
from behaviour import differences, returned

NAMES = ("usual_clipping", "unusual_clipping", "usual_clipping_on_four", "unusual_clipping_on_four")


@pytest.mark.parametrize("name", NAMES)
def test_all_is_as_in_torch(name: str) -> None:
    for ours, theirs in zip(returned(name, "fsdp_c"), returned(name, "torch"), strict=True):
        for case, expected in theirs["seen"].items():
            assert differences(expected, ours["seen"][case]) == [], case


@pytest.mark.parametrize("name", NAMES[::2])
def test_what_is_usual_takes_the_c_path(name: str) -> None:
    for ours in returned(name, "fsdp_c"):
        # A call of three_ways takes it six times where nothing raises.
        assert ours["taken"] > 5 * len(ours["seen"])
