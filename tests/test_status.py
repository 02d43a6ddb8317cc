"""docs/status.md and the code agree on what has run where."""

import re
from pathlib import Path

from k3jax.ops.check import CHECKED_OPS, PROVEN

STATUS = Path(__file__).parent.parent / "docs" / "status.md"


def rows():
    lines = [line for line in STATUS.read_text().splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_proven_architectures_are_those_that_ran():
    ran = {
        (kernel.partition(":")[0], arch)
        for kernel, arch, _, _, where, _ in rows()
        if where != "not run"
    }
    assert ran >= PROVEN
    assert {op for op, _ in PROVEN} <= set(CHECKED_OPS)


def test_every_claim_of_a_run_has_card_and_day():
    for row in rows():
        for cell in row[4:]:
            assert cell == "not run" or re.fullmatch(r"\w+, \d{4}-\d\d-\d\d", cell), row


def test_nothing_claims_to_have_run_on_sm100():
    assert all(row[4:] == ["not run", "not run"] for row in rows() if row[1] != "sm_90a")
