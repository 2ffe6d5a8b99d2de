"""One rank: no collectives, and the bits of a model that is not sharded."""

from __future__ import annotations

import re

from behaviour import assert_same, differences, raised, returned


def test_one_rank_issues_no_collectives() -> None:
    (counts,) = returned("collectives_alone", "fsdp_c", world=1)
    assert counts == {}


def test_one_rank_trains_as_a_model_that_is_not_sharded() -> None:
    (found,) = assert_same("training_alone", world=1)
    expected = found.pop("not sharded")
    assert len(found) == 3
    for case, results in found.items():
        assert differences(expected, results) == [], case


def test_one_rank_trains_units_with_empty_parameters() -> None:
    (found,) = returned("training_with_empty_parameters_alone", "fsdp_c", world=1)
    expected = found.pop("not sharded")
    assert len(found) == 3
    for case, results in found.items():
        assert differences(expected, results) == [], case


def test_mixed_precision_on_one_rank_has_stocks_bits() -> None:
    (found,) = assert_same("mixed_precision_alone", world=1)
    first, second, third = found.values()
    assert differences(first, second) and differences(first, third)


def test_accumulation_on_one_rank() -> None:
    (found,) = assert_same("accumulation_alone", world=1)
    assert differences(found["not sharded"], found["sharded"]) == []


def test_an_evaluation_before_the_step_leaves_no_stale_weights_on_one_rank() -> None:
    (ours,) = returned("evaluation_alone", "fsdp_c", world=1)
    (theirs,) = returned("evaluation_alone", "torch", world=1)
    assert ours["with"] == ours["without"] == theirs["without"]
    assert theirs["with"] != theirs["without"]


def test_one_rank_evaluates_in_inference_mode() -> None:
    """Stock asks inference tensors for their version counters, which they do not have."""
    (found,) = returned("inference_mode_alone", "fsdp_c", world=1)
    for when in ("at first", "after training"):
        assert found[f"{when}, inference_mode"] == found[f"{when}, no_grad"]
    assert differences(found["without"], found["at first"]) == []
    (error,) = raised("inference_mode_alone", "torch", world=1)
    assert re.search("version counter|before doing inplace update", error.text)


def test_state_dicts_on_one_rank() -> None:
    (found,) = assert_same("state_dict_alone", world=1)
    assert set(found["kinds"]) == {"DTensor"}
    assert differences(found["weights"], found["full"]) == []
    assert differences(found["went on"], found["loaded"]) == []


def test_what_a_forward_writes_stays_where_parameters_are_whole() -> None:
    """As in a plain model. Torch's own copies of one rank's parameters lose it."""
    (ours,) = returned("writes_in_forward_alone", "fsdp_c", world=1)
    (theirs,) = returned("writes_in_forward_alone", "torch", world=1)
    assert differences(ours["before"], ours["not sharded"]) != []
    assert differences(ours["not sharded"], ours["sharded"]) == []
    for lost in (ours["cast"], theirs["sharded"], theirs["cast"]):
        assert differences(ours["before"], lost) == []
