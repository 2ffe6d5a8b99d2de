"""On one rank, fsdp_c issues no collectives. In full precision, its results equal those of an
unsharded model bit by bit."""

from __future__ import annotations

import re

from behavior import assert_same, differences, get_exceptions, get_results


def test_one_rank_issues_no_collectives() -> None:
    (counts,) = get_results("collectives_on_one_rank", "fsdp_c", world=1)
    assert counts == {}


def test_training_on_one_rank_matches_plain_model() -> None:
    (result,) = assert_same("training_on_one_rank", world=1)
    expected = result.pop("not sharded")
    assert len(result) == 3
    for case, results in result.items():
        assert differences(expected, results) == [], case


def test_training_with_empty_parameters_on_one_rank_matches_plain_model() -> None:
    (result,) = get_results("training_with_empty_parameters_on_one_rank", "fsdp_c", world=1)
    expected = result.pop("not sharded")
    assert len(result) == 3
    for case, results in result.items():
        assert differences(expected, results) == [], case


def test_mixed_precision_on_one_rank_matches_torch() -> None:
    (result,) = assert_same("mixed_precision_on_one_rank", world=1)
    bfloat16 = result.pop("param torch.bfloat16, reduce torch.float32")
    assert len(result) == 2
    for case, other in result.items():
        assert differences(bfloat16, other) != [], case


def test_accumulation_on_one_rank_matches_torch() -> None:
    (result,) = assert_same("accumulation_on_one_rank", world=1)
    assert differences(result["not sharded"], result["sharded"]) == []


def test_shards_replaced_between_backwards_keep_gradients_on_one_rank() -> None:
    (result,) = assert_same("shards_replaced_between_backwards_on_one_rank", world=1)
    assert len(result) == 6
    expected = result["not replaced, reshard_after_forward=True"]
    for case, gradients in result.items():
        assert differences(expected, gradients) == [], case


def test_evaluation_before_the_optimizer_step_leaves_no_stale_weights_on_one_rank() -> None:
    (by_fsdp_c,) = get_results("evaluation_on_one_rank", "fsdp_c", world=1)
    (by_torch,) = get_results("evaluation_on_one_rank", "torch", world=1)
    assert by_fsdp_c["evaluated"] == by_fsdp_c["not evaluated"] == by_torch["not evaluated"]
    assert by_torch["evaluated"] != by_torch["not evaluated"]


def test_inference_mode_on_one_rank_matches_no_grad() -> None:
    """torch fails, because it reads version counters, which inference tensors do not have."""
    (result,) = get_results("inference_mode_on_one_rank", "fsdp_c", world=1)
    for when in ("at first", "after training"):
        assert result[f"{when}, inference_mode"] == result[f"{when}, no_grad"]
    assert differences(result["not sharded"], result["at first"]) == []
    (error,) = get_exceptions("inference_mode_on_one_rank", "torch", world=1)
    assert re.search("version counter|before doing inplace update", error.text)


def test_state_dicts_on_one_rank_match_torch() -> None:
    (result,) = assert_same("state_dict_on_one_rank", world=1)
    assert set(result["kinds"]) == {"DTensor"}
    assert differences(result["weights"], result["full"]) == []
    assert differences(result["continued"], result["loaded"]) == []


def test_in_place_write_in_forward_persists_for_unsharded_parameters() -> None:
    """torch loses the write, because it copies the parameters even on one rank."""
    (by_fsdp_c,) = get_results("writes_in_forward_on_one_rank", "fsdp_c", world=1)
    (by_torch,) = get_results("writes_in_forward_on_one_rank", "torch", world=1)
    assert differences(by_fsdp_c["before"], by_fsdp_c["not sharded"]) != []
    for kept in ("sharded", "by hand"):
        assert differences(by_fsdp_c["not sharded"], by_fsdp_c[kept]) == []
        assert differences(by_fsdp_c["before"], by_torch[kept]) == []
    for lost in ("cast", "by hand, cast"):
        assert differences(by_fsdp_c["before"], by_fsdp_c[lost]) == []
        assert differences(by_fsdp_c["before"], by_torch[lost]) == []
