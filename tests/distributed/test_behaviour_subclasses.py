"""All-gather extensions: what torch's FSDP2 makes of parameters and gradients, ours makes, too."""

from __future__ import annotations

from behaviour import assert_same, differences, returned


def test_gradients_may_be_subclasses_without_memory_of_their_own() -> None:
    for found in assert_same("gradients_that_are_pairs"):
        for name, results in found.items():
            first_loss, first_gradient = results[0], results[1 if "acc" not in name else 2]
            assert len(first_loss) == 2, "the loss is a pair"
            assert first_gradient[0].abs().sum() > 0, name


def test_wrappers_need_no_extensions() -> None:
    for found in assert_same("wrappers_without_extensions"):
        for case, results in found.items():
            assert case.split()[0] in results[7], "the shards are no wrappers"
    assert_same("wrappers_without_extensions_alone", world=1)


def test_an_extension_may_be_patched_onto_a_plain_tensor() -> None:
    pairs = zip(
        returned("extensions_patched_onto_tensors", "fsdp_c"),
        returned("extensions_patched_onto_tensors", "torch"),
    )
    for ours, theirs in pairs:
        for case, found in ours.items():
            assert differences(theirs[case]["trained"], found["trained"]) == [], case
        assert differences(theirs["None"]["sizes"], ours["None"]["sizes"]) == []


def test_an_extension_may_release_what_was_gathered() -> None:
    """torch asks it from release 2.15 on."""
    for found in returned("extensions_patched_onto_tensors", "fsdp_c"):
        whole = 6 * 6
        assert found["False"]["sizes"] == 2 * [[[2 * whole], [4 * whole]]]
        assert found["True"]["sizes"] == 2 * [[[0], [4 * whole]]]
