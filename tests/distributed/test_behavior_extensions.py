"""All-gather extensions: hook calls and their results match torch."""

from __future__ import annotations

import pytest
from behavior import assert_same, differences, get_results

SAME = (
    "hooks_of_extensions_in_groups_of_one",
    "hooks_of_extensions_when_prefetched",
    "hooks_of_extensions_unsharded_directly",
    "hooks_of_extensions_in_evaluations",
    "hooks_of_extensions_in_two_dtypes",
    "hooks_of_extensions_that_are_replicated",
)


def test_extension_hook_calls_and_results_match_torch() -> None:
    for result in assert_same("hooks_of_extensions"):
        for case, (trained, calls, *memory) in result.items():
            assert len(trained) == (5 if "accumulated" not in case else 7), case
            assert {call[0] for call in calls} == {"pre", "post"}, case
            if memory and "kept" not in case:
                assert sum(memory[0]) == 0, case


@pytest.mark.parametrize("name", SAME)
def test_extension_hook_scenario_matches_torch(name: str) -> None:
    assert_same(name)


def test_extension_hooks_on_one_rank_match_plain_tensors() -> None:
    for name in ("hooks_of_extensions_on_one_rank", "several_inputs_on_one_rank"):
        ((result, plain, calls),) = get_results(name, "fsdp_c", 1)
        assert differences(result, plain) == [], name
        assert set(calls) == {"pre", "post"}, name
    assert_same("hooks_of_extensions_on_one_rank", world=1)


def test_extension_inputs_may_change_size_at_each_gather() -> None:
    for result, plain, lengths, memory in get_results("extension_inputs_of_varying_size", "fsdp_c"):
        assert differences(result, plain) == []
        assert lengths == [(2 * size, size) for _, size in lengths]
        assert len({size for _, size in lengths}) == len(lengths)
        assert sum(memory) == 0
    for _, _, lengths, _ in get_results("extension_inputs_of_varying_size", "torch"):
        assert lengths != [(2 * size, size) for _, size in lengths], "torch has fixed this bug"


def test_outputs_changed_while_a_parameter_shares_their_memory_raise() -> None:
    for kind, (message,) in get_results(
        "outputs_changed_while_a_parameter_shares_their_memory", "fsdp_c"
    ):
        assert kind == "RuntimeError"
        assert "shares the memory that they were gathered into" in message
        assert "0.weight" in message
    for result in get_results("outputs_changed_while_a_parameter_shares_their_memory", "torch"):
        assert result is None, "torch now raises as well"


def test_invalid_extension_results_raise_torchs_errors() -> None:
    for result in assert_same("hooks_with_invalid_results"):
        assert all(result.values()), result
    for result in assert_same("extensions_resharded_to_a_smaller_group", world=4):
        assert result == {
            "one": ("NotImplementedError", []),
            "several": ("AssertionError", ["Expected 1 all_gather_output, got 3"]),
        }


def test_model_trains_after_a_failed_extension_hook() -> None:
    by_torch = get_results("failing_hooks", "torch")
    for rank, by_fsdp_c in enumerate(get_results("failing_hooks", "fsdp_c")):
        plain = by_fsdp_c.pop("plain")
        for case, (error, (memory, retry_error, after_reset, trained)) in by_fsdp_c.items():
            assert error == by_torch[rank][case][0]
            assert error == ("KeyError", [f"'the hook {case.split(',')[0]} failed'"])
            assert (memory, retry_error, after_reset) == (0, None, 0), case
            assert differences(trained, plain) == [], case
