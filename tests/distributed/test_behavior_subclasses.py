"""Tensor subclasses and all-gather extensions: parameters and gradients match torch."""

from __future__ import annotations

from behavior import assert_same, differences, get_results


def test_wrapper_subclass_gradients_match_torch() -> None:
    for result in assert_same("two_tensor_gradients"):
        for name, results in result.items():
            assert len(results["losses"][0]) == 2, "the loss must be a pair"
            gradient_of_first_step, *_ = results["gradients"][0]
            assert gradient_of_first_step[0].abs().sum() > 0, name


def test_wrapper_subclasses_without_extensions_match_torch() -> None:
    for result in assert_same("wrappers_without_extensions"):
        for case, results in result.items():
            kind, *_ = case.split()
            for types in results["shard types"]:
                assert kind in types, "the shards must be wrappers"
    assert_same("wrappers_without_extensions_on_one_rank", world=1)


def test_all_gather_extension_patched_onto_plain_tensor_matches_torch() -> None:
    pairs = zip(
        get_results("extensions_patched_onto_tensors", "fsdp_c"),
        get_results("extensions_patched_onto_tensors", "torch"),
    )
    for by_fsdp_c, by_torch in pairs:
        for case, result in by_fsdp_c.items():
            assert differences(by_torch[case]["trained"], result["trained"]) == [], case
        case = "no release hook"
        assert differences(by_torch[case]["sizes"], by_fsdp_c[case]["sizes"]) == []


def test_extension_hooks_can_free_memory_of_all_gather_outputs() -> None:
    """torch supports the release hook from 2.15 on."""
    for result in get_results("extensions_patched_onto_tensors", "fsdp_c"):
        numel = 6 * 6
        assert result["kept by release hook"]["sizes"] == 2 * [[[2 * numel], [4 * numel]]]
        assert result["released by release hook"]["sizes"] == 2 * [[[0], [4 * numel]]]
