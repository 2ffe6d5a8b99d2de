"""Searches of the models of csrc/transport. A model without one of its rules must fail.

``make model`` runs everything (FSDP_C_MODEL_WHOLE=1). README.md describes the models.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
WHOLE = os.environ.get("FSDP_C_MODEL_WHOLE") == "1"
MEMORY = 4000
"""Largest memory of a search, in MB."""

pytestmark = [
    pytest.mark.skipif(
        not (shutil.which("spin") and shutil.which("gcc")),
        reason="spin or gcc is not installed (Debian: apt-get install spin gcc)",
    ),
    pytest.mark.timeout(1200),
]

ONE_FAULT = "RANKS=2 FAULTS=1 ORDINARY"
NO_FAULT = "RANKS=2 FAULTS=0 ORDINARY"
TWO_FAULTS = "RANKS=2 FAULTS=2 ORDINARY"
THREE_RANKS = "RANKS=3 FAULTS=2 ORDINARY"
FINE_STEPS = "RANKS=2 FAULTS=0 ORDINARY FINE"
TWO_ITEMS = "RANKS=2 ITEMS=2 FAULTS=1"
THREE_RANKS_ONE_ITEM = "RANKS=3 ITEMS=1 FAULTS=2 ORDINARY"
THREE_COMPARING = "RANKS=3 ITEMS=2 FAULTS=2"

SEARCHES = {
    ("steps", ONE_FAULT): True,
    ("steps", "RANKS=2 FAULTS=0"): True,
    ("orders", "FAULTS=0"): True,
    ("orders", "FAULTS=0 SECOND_ROOT"): True,
    ("agreement", ONE_FAULT): True,
    ("agreement", "RANKS=2 FAULTS=0"): True,
    ("agreement", "RANKS=3 FAULTS=0 ORDINARY"): True,
    ("departures", f"{TWO_ITEMS} ORDINARY"): True,
    ("departures", "RANKS=3 ITEMS=2 FAULTS=0 ORDINARY"): True,
    ("labels", "RANKS=3 ITEMS=2 FAULTS=1"): True,
    ("labels", "RANKS=2 ITEMS=2 FAULTS=2"): True,
    ("labels", THREE_COMPARING): False,
    ("steps", FINE_STEPS): False,
    ("steps", "RANKS=2 FAULTS=1"): False,
    ("steps", "RANKS=2 FAULTS=2"): False,
    ("steps", "RANKS=2 FAULTS=2 ORDINARY CAPACITY=2"): False,
    ("steps", "RANKS=3 FAULTS=1"): False,
    ("steps", THREE_RANKS): False,
    ("orders", "FAULTS=1"): False,
    ("agreement", "RANKS=2 FAULTS=1"): False,
    ("agreement", "RANKS=2 FAULTS=2"): False,
    ("agreement", "RANKS=3 FAULTS=1"): False,
    ("agreement", THREE_RANKS): False,
    ("departures", TWO_ITEMS): False,
    ("departures", "RANKS=2 ITEMS=2 FAULTS=2"): False,
    ("departures", "RANKS=2 ITEMS=3 FAULTS=1"): False,
    ("departures", "RANKS=3 ITEMS=1 FAULTS=1"): False,
    ("departures", THREE_RANKS_ONE_ITEM): False,
    ("departures", "RANKS=3 ITEMS=2 FAULTS=1 ORDINARY"): False,
}
"""Model and settings of an exhaustive search -> whether `make test` includes it."""

DEADLOCK = "invalid end state"
RULES = {
    "LABEL_IS_COMPARED": ("steps", ONE_FAULT, "assertion", True),
    "TAG_IS_COMPARED": ("steps", "RANKS=2 FAULTS=1", "assertion", False),
    "MESSAGE_IS_COMMITTED_FIRST": ("steps", NO_FAULT, "assertion", True),
    "FULL_RING_IS_NOT_WRITTEN": ("steps", NO_FAULT, "assertion", False),
    "CLOSED_IS_READ_FIRST": ("steps", FINE_STEPS, "assertion", False),
    "RELEASE_FOLLOWS_READ": ("steps", FINE_STEPS, "assertion", False),
    "COUNTERS_ARE_READ_AGAIN": ("steps", FINE_STEPS, "assertion", False),
    "PEER_IS_TESTED": ("steps", ONE_FAULT, DEADLOCK, True),
    "ABANDONED_WORK_IS_COMPLETED": ("steps", ONE_FAULT, "", True),
    "PLAN_PRECEDES_GATHER": ("steps", ONE_FAULT, "assertion", True),
    "PLAN_IS_COMPARED": ("steps", ONE_FAULT, "assertion", False),
    "FALLBACK_IS_LARGEST": ("steps", "RANKS=2 FAULTS=0", "assertion", False),
    "ALL_RANKS_WAIT": ("steps", "RANKS=2 FAULTS=0", "assertion", False),
    "ALL_RANKS_CONNECT": ("steps", ONE_FAULT, "assertion", True),
    "INTERRUPTED_ROUND_IS_KEPT": ("steps", ONE_FAULT, "assertion", False),
    "ROUNDS_ARE_READ_LATE": ("orders", "FAULTS=0", DEADLOCK, True),
    "LATER_PLAN_NEEDS_WAITS": ("orders", "FAULTS=0 SECOND_ROOT", DEADLOCK, True),
    "FAILED_RANK_CLOSES": ("steps", "RANKS=3 FAULTS=1", DEADLOCK, False),
    "ALL_HEADERS_ARE_READ": ("steps", THREE_RANKS, "assertion", False),
    "LABEL_IS_HASHED": ("agreement", ONE_FAULT, "assertion", True),
    "UNKNOWN_EQUALS_ALL": ("agreement", ONE_FAULT, "assertion", False),
    "FIRST_KNOWN_RANK_IS_COMPARED": ("agreement", THREE_RANKS, "assertion", False),
    "ALL_RANKS_ALLOW": ("agreement", "RANKS=2 FAULTS=0", "assertion", False),
    "ROUND_1_IS_READ_FIRST": ("agreement", "RANKS=2 FAULTS=0", "assertion", True),
    "EXCHANGE_HAS_OWN_ALGORITHM": ("agreement", ONE_FAULT, "assertion", True),
    "EMPTY_INTERVAL_HAS_NO_EXCHANGE": ("agreement", NO_FAULT, "assertion", False),
    "INTERVAL_ENDS_AT_AGREEMENT_START": ("agreement", ONE_FAULT, "assertion", True),
    "ABANDONED_ROUND_IS_DROPPED": ("agreement", TWO_FAULTS, "assertion", False),
    "ALL_RANKS_SEARCH": ("agreement", THREE_RANKS, "assertion", False),
    "ALL_RANKS_RAISE": ("agreement", ONE_FAULT, "assertion", True),
    "OPTIMIZER_FOLLOWS_AGREEMENT": ("agreement", ONE_FAULT, "assertion", True),
    "PREDICTION_IS_COMPARED": ("departures", TWO_ITEMS, "assertion", True),
    "UNPREDICTED_COLLECTIVES_ARE_COMPARED": ("departures", TWO_ITEMS, "assertion", False),
    "ALL_RANKS_READ_EXCHANGE": ("departures", TWO_ITEMS, DEADLOCK, False),
    "INTERRUPTED_EXCHANGE_IS_KEPT": ("departures", TWO_ITEMS, "", False),
    "OFFERED_SIGNATURE_IS_COMPARED": ("departures", TWO_ITEMS, "assertion", False),
    "EXCHANGE_AFTER_CHANGE_HAS_OTHER_ALGORITHM": ("departures", TWO_ITEMS, "assertion", True),
    "DEPARTING_RANK_WAITS": ("departures", TWO_ITEMS, "assertion", False),
    "KEY_HAS_NUMBER": ("departures", TWO_ITEMS, "", False),
    "KEY_HAS_SIGNATURE": ("departures", TWO_ITEMS, "assertion", False),
    "COUNT_IS_TAKEN_BACK": ("departures", TWO_ITEMS, "assertion", False),
    "INTERRUPTED_RANK_IS_UNCOUNTED": ("departures", TWO_ITEMS, "assertion", False),
    "LEAVING_IS_ATOMIC": ("departures", TWO_ITEMS, "assertion", True),
    "DEPARTED_COLLECTIVE_IS_KEPT": ("departures", TWO_ITEMS, "", False),
    "WAITING_RANKS_ANSWER": ("departures", TWO_ITEMS, DEADLOCK, True),
    "OWN_DEPARTURE_IS_COMPARED": ("departures", TWO_ITEMS, DEADLOCK, False),
    "OWN_NUMBER_IS_COMPARED": ("departures", TWO_ITEMS, "", False),
    "REQUEST_IS_KEPT_FIRST": ("departures", TWO_ITEMS, "assertion", False),
    "INTERRUPTED_REQUEST_IS_CLOSED": ("departures", TWO_ITEMS, "assertion", False),
    "CLOSING_IS_ATOMIC": ("departures", TWO_ITEMS, "", False),
    "DIFFERENCE_REMAINS": ("departures", "RANKS=3 ITEMS=1 FAULTS=1 ORDINARY", DEADLOCK, False),
    "UNKNOWN_LABEL_EQUALS_ALL": ("labels", THREE_COMPARING, "assertion", True),
    "ISSUED_LABELS_ARE_COMPARED": ("labels", THREE_COMPARING, "assertion", False),
    "RING_IS_CLOSED": ("labels", THREE_COMPARING, "assertion", True),
    "ALL_RANKS_READ_REQUESTS": ("labels", THREE_COMPARING, "assertion", False),
    "REQUEST_REMAINS": ("labels", THREE_COMPARING, "assertion", False),
    "REQUEST_HAS_NUMBER": ("labels", THREE_COMPARING, "assertion", False),
    "TWO_RANKS_REQUEST": ("departures", THREE_RANKS_ONE_ITEM, DEADLOCK, False),
}
"""Rule of the C code -> model and settings in which the model without the rule fails, the kind of
the counterexample ("": any), and whether `make test` includes it."""


REACHED = {
    "DEATH": ("steps", ONE_FAULT),
    "CLOSED": ("steps", ONE_FAULT),
    "MISMATCH": ("steps", ONE_FAULT),
    "PLAN": ("steps", ONE_FAULT),
    "INTERRUPT": ("steps", ONE_FAULT),
    "RESET": ("steps", ONE_FAULT),
    "LATE_SHM": ("steps", "RANKS=2 FAULTS=0"),
    "DECLINED": ("steps", ONE_FAULT),
    "TRAINED_AFTER_MISMATCH": ("agreement", ONE_FAULT),
    "TIME_LIMIT": ("agreement", TWO_FAULTS),
    "STOPPED": ("departures", TWO_ITEMS),
    "DEPARTED": ("departures", TWO_ITEMS),
    "DIFFERENT": ("labels", "RANKS=2 ITEMS=2 FAULTS=1"),
    "TIMED_OUT": ("departures", TWO_ITEMS),
}
"""States that a search must visit, REACH_* in a model -> model and settings."""


def search(folder: Path, model: str, defines: str) -> tuple[str, int]:
    """Searches all states. Returns the counterexample, or "", and the number of states."""
    options = [f"-D{define}" for define in defines.split()]
    subprocess.run(["spin", "-a", *options, FOLDER / f"{model}.pml"], cwd=folder, check=True)
    level = "-O2" if WHOLE else "-O0"  # the compiler takes longer than a short search
    flags = [level, "-DSAFETY", "-DCOLLAPSE", "-DVECTORSZ=2048", f"-DMEMLIM={MEMORY}"]
    subprocess.run(["gcc", *flags, "-o", "pan", "pan.c"], cwd=folder, check=True)
    command = ["./pan", "-m200000", "-w22", "-n"]
    output = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    found = re.search(r"^pan:1: (.*)$", output, re.M)
    states = re.search(r"(\d+) states, stored", output)
    assert found or re.search(r"errors: 0$", output, re.M), output
    assert found or "Search not completed" not in output, output
    assert states
    return found.group(1) if found else "", int(states.group(1))


@pytest.mark.parametrize(("model", "settings"), [s for s in SEARCHES if WHOLE or SEARCHES[s]])
def test_protocol_model_holds_its_properties_in_all_states(
    tmp_path: Path, model: str, settings: str
) -> None:
    counterexample, states = search(tmp_path, model, settings)
    print(f"{model} {settings}: {states} states")
    assert counterexample == ""
    assert states > 2000, "the search visits too few states: the model is blocked"


@pytest.mark.parametrize("rule", [rule for rule in RULES if WHOLE or RULES[rule][3]])
def test_protocol_model_without_a_rule_has_a_counterexample(tmp_path: Path, rule: str) -> None:
    model, settings, kind, _ = RULES[rule]
    counterexample, states = search(tmp_path, model, f"{settings} WITHOUT_{rule}")
    print(f"{rule}: {states} states, {counterexample}")
    assert counterexample and kind in counterexample


@pytest.mark.parametrize("state", list(REACHED) if WHOLE else ["DEATH", "TRAINED_AFTER_MISMATCH"])
def test_search_of_protocol_model_visits_state(tmp_path: Path, state: str) -> None:
    model, settings = REACHED[state]
    counterexample, _ = search(tmp_path, model, f"{settings} REACH_{state}")
    assert "assertion violated" in counterexample


def test_tables_list_the_rules_and_states_of_the_protocol_models() -> None:
    text = "".join(path.read_text() for path in FOLDER.glob("*.pml"))
    assert set(re.findall(r"\bWITHOUT_([A-Z]\w*)", text)) == set(RULES)
    assert set(re.findall(r"\bREACH_([A-Z]\w*)", text)) == set(REACHED)
