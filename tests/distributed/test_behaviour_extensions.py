"""All-gather extensions: each call of their hooks, and what comes of them, is torch's."""

from __future__ import annotations

import pytest
from behaviour import assert_same, differences, returned

SAME = (
    "hooks_of_extensions_alone_in_their_groups",
    "hooks_of_extensions_when_prefetched",
    "hooks_of_extensions_unsharded_by_hand",
    "hooks_of_extensions_in_evaluations",
    "hooks_of_extensions_in_two_dtypes",
    "hooks_of_extensions_that_are_replicated",
)


def test_hooks_are_called_as_torch_calls_them() -> None:
    for found in assert_same("hooks_of_extensions"):
        for case, (trained, calls, *held) in found.items():
            assert len(trained) == (5 if "accumulated" not in case else 7), case
            assert {call[0] for call in calls} == {"pre", "post"}, case
            assert sum(held[0]) == 0 if held and "kept" not in case else True, case


@pytest.mark.parametrize("name", SAME)
def test_hooks_are_called_where_torch_calls_them(name: str) -> None:
    assert_same(name)


def test_one_rank_trains_as_without_hooks() -> None:
    for name in ("hooks_of_extensions_on_one_rank", "several_inputs_on_one_rank"):
        ((found, plain, _),) = returned(name, "fsdp_c", 1)
        assert differences(found, plain) == [], name
    assert_same("hooks_of_extensions_on_one_rank", world=1)


def test_inputs_may_have_other_sizes_each_time() -> None:
    for found, plain, lengths, held in returned("inputs_of_other_sizes_at_each_gather", "fsdp_c"):
        assert differences(found, plain) == []
        assert lengths == [(2 * size, size) for _, size in lengths]
        assert len({size for _, size in lengths}) == len(lengths)
        assert sum(held) == 0
    for _, _, lengths, _ in returned("inputs_of_other_sizes_at_each_gather", "torch"):
        assert lengths != [(2 * size, size) for _, size in lengths], "torch has mended it"


def test_a_parameter_over_outputs_that_change_is_refused() -> None:
    for found in returned("outputs_that_cannot_change_under_a_parameter", "fsdp_c"):
        assert found[0] == "RuntimeError"
        assert "lies over the memory that they were gathered into" in found[1][0]
        assert "0.weight" in found[1][0]
    for found in returned("outputs_that_cannot_change_under_a_parameter", "torch"):
        assert found is None, "torch splits the row as if nothing had changed"


def test_what_torch_refuses_is_refused_in_its_words() -> None:
    for found in assert_same("hooks_that_return_what_they_should_not"):
        assert all(found.values()), found
    for found in assert_same("extensions_resharded_to_a_smaller_group", world=4):
        assert found == {
            "one": ("NotImplementedError", []),
            "several": ("AssertionError", ["Expected 1 all_gather_output, got 3"]),
        }


def test_a_hook_that_fails_leaves_a_model_that_trains_on() -> None:
    theirs = returned("hooks_that_fail", "torch")
    for rank, ours in enumerate(returned("hooks_that_fail", "fsdp_c")):
        plain = ours.pop("plain")
        for case, (raised, (held, again, after_reset, trained)) in ours.items():
            assert raised == theirs[rank][case][0]
            assert raised == ("KeyError", [f"'the hook {case.split(',')[0]} failed'"])
            assert (held, again, after_reset) == (0, None, 0), case
            if "first" in case:
                assert differences(trained, plain) == [], case
