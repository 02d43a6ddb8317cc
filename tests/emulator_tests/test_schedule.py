"""Launches and scheduling: spin waits between blocks, dependent launches, hangs, seeds."""

import numpy as np
import pytest

from tests.emulator import (
    DeadlockError,
    Device,
    EmulationError,
    GlobalMemory,
    RaceError,
    TrapError,
    UninitialisedError,
    load,
)
from tests.emulator.program import launch_spec
from tests.emulator_tests.harness import kernel, run

SEEDS = [None, 1, 2, 3, 4, 5]

TURNS = """
\tsetp.ne.u32 %p0, %thread, 0;
\t@%p0 bra END;
WAIT:
\tld.acquire.gpu.global.b32 %r0, [%pa0];
\tsetp.ne.u32 %p1, %r0, {who};
\t@%p1 bra WAIT;
\tmul.wide.u32 %d0, %r0, 4;
\tadd.u64 %d0, %d0, %pa1;
\tst.global.b32 [%d0], %block;
\tadd.u32 %r1, %r0, 1;
\tst.release.gpu.global.b32 [%pa0], %r1;
END:
"""


def turns(who, grid, **options):
    memory = GlobalMemory()
    flag, out = memory.allocate("flag", np.zeros(1, "u4")), memory.allocate("out", 4 * grid)
    run(kernel(TURNS.format(who=who), ["u64", "u64"]), 64, [flag, out], memory, grid=grid,
        **options)  # fmt: skip
    return memory.contents(out, 4 * grid)[0].view("u4")


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_take_turns_upwards(seed):
    np.testing.assert_array_equal(turns("%block", 8, seed=seed), np.arange(8))


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_take_turns_downwards(seed):
    """The last block goes first: every block must be resident and scheduled fairly."""
    who = "%r9"
    code = TURNS.format(who=who).replace("WAIT:", "\tsub.u32 %r9, 7, %block;\nWAIT:", 1)
    memory = GlobalMemory()
    flag, out = memory.allocate("flag", np.zeros(1, "u4")), memory.allocate("out", 32)
    run(kernel(code, ["u64", "u64"]), 64, [flag, out], memory, grid=8, seed=seed)
    np.testing.assert_array_equal(memory.contents(out, 32)[0].view("u4"), np.arange(8)[::-1])


def test_waiting_for_a_block_that_is_not_resident():
    """More blocks than fit at once, the first waiting for the last: the card would hang too."""
    code = TURNS.format(who="%r9").replace("WAIT:", "\tsub.u32 %r9, 63, %block;\nWAIT:", 1)
    memory = GlobalMemory()
    flag, out = memory.allocate("flag", np.zeros(1, "u4")), memory.allocate("out", 256)
    text = kernel(code, ["u64", "u64"])
    with pytest.raises(DeadlockError, match="stand at PTX line"):
        run(text, 1024, [flag, out], memory, grid=64, num_sms=4, patience=30)
    run(text, 1024, [flag, out], memory, grid=64, num_sms=32)


def test_hang_report_names_line_and_lane():
    with pytest.raises(DeadlockError, match=r"1 blocks unfinished(.|\n)*block 0, warp 0, lane 0"):
        turns("5", 1, patience=20)


def test_endless_loop_without_polling():
    with pytest.raises(EmulationError, match="endless loop"):
        run(
            kernel("L:\n\tadd.u32 %r0, %r0, 1;\n\tbra L;", []),
            32,
            [],
            GlobalMemory(),
            max_steps=5000,
        )


def test_poll_budget_ends_in_a_trap():
    code = """
\tmov.b32 %r1, 0;
WAIT:
\tadd.u32 %r1, %r1, 1;
\tsetp.gt.u32 %p1, %r1, 50;
\t@%p1 trap;
\tld.volatile.global.b32 %r0, [%pa0];
\tnanosleep.u32 100;
\tsetp.eq.u32 %p0, %r0, 0;
\t@%p0 bra WAIT;"""
    memory = GlobalMemory()
    flag = memory.allocate("flag", np.zeros(1, "u4"))
    with pytest.raises(TrapError, match="block 0, warp 0"):
        run(kernel(code, ["u64"]), 32, [flag], memory)


def test_budget_by_the_clock():
    code = """
\tmov.u64 %d0, %globaltimer;
WAIT:
\tmov.u64 %d1, %globaltimer;
\tsub.u64 %d2, %d1, %d0;
\tsetp.lt.u64 %p0, %d2, 20000;
\t@%p0 bra WAIT;"""
    run(kernel(code, []), 32, [], GlobalMemory())


def test_try_wait_times_out():
    """A bounded wait on an mbarrier that never completes ends by its own count."""
    code = """
\tsetp.ne.u32 %p0, %thread, 0;
\t@%p0 ret;
\tmbarrier.init.shared.b64 [%sm], 1;
\tmov.b32 %r0, 0;
WAIT:
\tadd.u32 %r0, %r0, 1;
\tsetp.gt.u32 %p1, %r0, 10;
\t@%p1 bra OUT;
\tmbarrier.try_wait.parity.shared.b64 %p2, [%sm], 0;
\t@!%p2 bra WAIT;
OUT:
\tst.global.b32 [%pa0], %r0;"""
    memory = GlobalMemory()
    out = memory.allocate("out", 4)
    run(kernel(code, ["u64"]), 32, [out], memory, shared=64)
    assert memory.contents(out, 4)[0].view("u4")[0] == 11


# Dependent launches: the first writes, the second doubles, and both overlap.

WRITE = """
\t{trigger}
\tmad.lo.u32 %r0, %block, 32, %thread;
\tmul.wide.u32 %d0, %r0, 4;
\tadd.u64 %d0, %d0, %pa0;
\tst.global.b32 [%d0], %r0;
"""
DOUBLE = """
\t{wait}
\tmad.lo.u32 %r0, %block, 32, %thread;
\tmul.wide.u32 %d0, %r0, 4;
\tadd.u64 %d1, %d0, %pa0;
\tadd.u64 %d2, %d0, %pa1;
\tld.global.b32 %r1, [%d1];
\tadd.u32 %r1, %r1, %r1;
\tsetp.gt.u32 %p0, %r1, 100000;
\t@%p0 trap;
\tst.global.b32 [%d2], %r1;
"""


def chain(
    trigger="griddepcontrol.launch_dependents;",
    wait="griddepcontrol.wait;",
    overlap=True,
    seed=None,
    second=None,
):
    memory = GlobalMemory()
    middle, out = memory.allocate("middle", 512), memory.allocate("out", 512)
    specs = []
    for number, (body, args) in enumerate(
        [
            (WRITE.format(trigger=trigger), [middle]),
            (second or DOUBLE.format(wait=wait), [middle, out]),
        ]
    ):
        code = load(kernel(body, ["u64"] * len(args)))
        specs.append(
            launch_spec(
                code,
                (4, 1, 1),
                (32, 1, 1),
                (1, 1, 1),
                0,
                args,
                number=number,
                overlaps_previous=overlap and number > 0,
            )
        )
    device = Device(memory, seed=seed)
    device.run(specs)
    return memory.contents(out, 512)[0].view("u4")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("trigger", ["griddepcontrol.launch_dependents;", ""])
def test_dependent_launch_waits(trigger, seed):
    np.testing.assert_array_equal(chain(trigger, seed=seed), np.arange(128) * 2)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("trigger", ["griddepcontrol.launch_dependents;", ""])
def test_dependent_launch_that_does_not_wait(trigger, seed):
    """Found under every schedule, also where the first launch happens to be done."""
    with pytest.raises((RaceError, UninitialisedError)):
        chain(trigger, wait="", seed=seed)


def test_dependent_launch_that_waits_too_late():
    late = DOUBLE.replace("{wait}", "").replace(
        "\tst.global", "\tgriddepcontrol.wait;\n\tst.global"
    )
    with pytest.raises((RaceError, UninitialisedError)):
        chain(second=late)


def test_third_launch_is_not_ordered_after_the_first_by_the_second():
    """The second launch does not wait, so waiting for it says nothing of the first."""
    with pytest.raises(RaceError, match=r"which launch 0 .* writes"):
        three(IDLE.format(""))
    np.testing.assert_array_equal(three(IDLE.format("griddepcontrol.wait;")), np.arange(128) * 2)


def test_third_launch_is_ordered_by_a_second_that_waits_before_it_lets_it_start():
    """What the first launch wrote is then there for the third, whether or not it waits."""
    patient = "\tgriddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;\n"
    np.testing.assert_array_equal(three(middle=patient, wait=""), np.arange(128) * 2)
    with pytest.raises((RaceError, UninitialisedError)):
        three(middle=IDLE.format("griddepcontrol.wait;"), wait="")


IDLE = "\tgriddepcontrol.launch_dependents;\n\t{}"


def three(middle, wait="griddepcontrol.wait;"):
    memory = GlobalMemory()
    written, out = memory.allocate("middle", 512), memory.allocate("out", 512)
    specs = []
    for number, (body, args) in enumerate(
        [
            (WRITE.format(trigger="griddepcontrol.launch_dependents;"), [written]),
            (middle, []),
            (DOUBLE.format(wait=wait), [written, out]),
        ]
    ):
        code = load(kernel(body, ["u64"] * len(args)))
        specs.append(
            launch_spec(
                code,
                (4, 1, 1),
                (32, 1, 1),
                (1, 1, 1),
                0,
                args,
                number=number,
                overlaps_previous=number > 0,
            )
        )
    Device(memory).run(specs)
    return memory.contents(out, 512)[0].view("u4")


@pytest.mark.parametrize("wait", ["", "griddepcontrol.wait;"])
def test_ordinary_launches_are_in_order(wait):
    np.testing.assert_array_equal(chain(wait=wait, overlap=False), np.arange(128) * 2)


def test_a_seed_replays():
    """The same seed gives the same schedule, step by step."""

    def steps(seed):
        memory = GlobalMemory()
        flag, out = memory.allocate("flag", np.zeros(1, "u4")), memory.allocate("out", 32)
        text = kernel(TURNS.format(who="%block"), ["u64", "u64"])
        device = run(text, 64, [flag, out], memory, grid=8, seed=seed)
        return device.steps, device.time

    assert steps(7) == steps(7)
    assert len({steps(seed) for seed in range(6)}) > 1


def test_waiting_is_passed_on_by_a_barrier():
    """One warp waits for the launch before; the block's barrier orders the others."""
    second = """
\tsetp.ne.u32 %p0, %warp, 0;
\t@%p0 bra MEET;
\tgriddepcontrol.wait;
MEET:
\t{barrier}
\tmad.lo.u32 %r0, %block, 64, %thread;
\tmul.wide.u32 %d0, %r0, 4;
\tadd.u64 %d0, %d0, %pa0;
\tld.global.b32 %r1, [%d0];
\tbar.sync 1;"""
    pair(second.replace("{barrier}", "bar.sync 0;"))
    with pytest.raises(RaceError, match="launch 0"):
        pair(second.replace("{barrier}", ""))


@pytest.mark.parametrize("first", ["st.global.b32", "st.relaxed.gpu.global.b32"])
def test_polling_what_an_earlier_launch_fills(first):
    """Both sides must synchronise: polling what an ordinary store fills is a race."""
    second = """
\tld.relaxed.gpu.global.b32 %r1, [%pa0];
\tgriddepcontrol.wait;"""
    fill = WRITE.format(trigger="griddepcontrol.launch_dependents;").replace("st.global.b32", first)
    if first == "st.global.b32":
        with pytest.raises(RaceError, match="launch 0"):
            pair(second, fill)
    else:
        pair(second, fill)


def pair(second, first=None):
    memory = GlobalMemory()
    middle = memory.allocate("middle", 512)
    first = first or WRITE.format(trigger="griddepcontrol.launch_dependents;")
    specs = [
        launch_spec(load(kernel(body, ["u64"])), (2, 1, 1), (64, 1, 1), (1, 1, 1), 0,
                    [middle], number=number, overlaps_previous=number > 0)
        for number, body in enumerate([first.replace("%block, 32", "%block, 64"), second])
    ]  # fmt: skip
    Device(memory).run(specs)
