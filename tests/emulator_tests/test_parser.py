"""The PTX front: what it reads, and how it refuses what it does not know."""

import numpy as np
import pytest

from tests.emulator import GlobalMemory, PtxSyntaxError, UnknownInstructionError, load
from tests.emulator.instruction import Address, Immediate, Pair, Register, Vector
from tests.emulator.parser import parse
from tests.emulator_tests.harness import HEADER, kernel, run


def instructions(body, declarations=""):
    module = parse(kernel(body, ["u64"], declarations))
    (entry,) = module.entries.values()
    skipped = 6  # what `kernel` itself puts first: one parameter, five set-up instructions
    return entry.instructions[skipped:-1]


def test_operands_of_every_form():
    body = (
        "\tld.global.v4.b32 {%r0, %r1, %r2, _}, [%pa0+-16];\n"
        "\tsetp.lt.and.s32 %p0|%p1, %r0, -5, !%p2;\n"
        "\t@!%p0 add.f32 %r3, %r3, 0f3F800000;\n"
        "\tmov.b64 %d0, {%r0, %r1};\n"
        "\tand.b32 %r4, %r4, 0xFF00FF00;\n"
        "\tadd.f64 %d1, %d1, 1.5;"
    )
    load4, compare, add, pack, mask, double = instructions(body)
    assert load4.modifiers == ("global", "v4", "b32")
    assert isinstance(load4.operands[0], Vector)
    assert len(load4.operands[0].items) == 4
    assert load4.operands[1] == Address(Register("%pa0", "b64"), -16)
    assert compare.operands[0] == Pair(Register("%p0", "pred"), Register("%p1", "pred"))
    assert compare.operands[2] == Immediate(-5)
    assert add.guard == Register("%p0", "pred")
    assert add.negate
    assert add.operands[2] == Immediate(0x3F800000, 32)
    assert isinstance(pack.operands[1], Vector)
    assert mask.operands[2] == Immediate(0xFF00FF00)
    assert double.operands[2] == Immediate(int(np.float64(1.5).view(np.uint64)), 64)


def test_scopes_hide_registers_and_labels():
    body = (
        "\t{ .reg .b32 a; mov.b32 a, 1; L: add.u32 a, a, 1; bra L; }\n"
        "\t{ .reg .b64 a; mov.b64 a, 1; L: bra L; }"
    )
    module = parse(kernel(body, []))
    (entry,) = module.entries.values()
    names = {op.name for i in entry.instructions for op in i.operands if isinstance(op, Register)}
    inner = {name for name in names if name.startswith("a@")}
    assert len(inner) == 2
    assert len(entry.labels) == 2


def test_comments_and_lines():
    text = kernel("\t// one\n\t/* two\n\tthree */ add.u32 %r0, %r0, 1;\n\tbad.b32 %r0;", [])
    with pytest.raises(UnknownInstructionError) as caught:
        load(text)
    line = next(i for i, row in enumerate(text.split("\n"), 1) if "bad" in row)
    assert f"PTX line {line}: bad.b32 %r0" in str(caught.value)


def test_source_lines_appear_in_messages():
    text = kernel("\t.loc 1 42 3\n\tbad.b32 %r0;", []) + '.file 1 "late.py"\n'
    text = text.replace(".visible", '.file 1 "kernel_decode.py"\n.visible', 1)
    with pytest.raises(UnknownInstructionError, match=r"\(kernel_decode\.py:42\)"):
        load(text)


def test_module_variables_and_static_shared_memory():
    text = kernel(
        "\tmov.u32 %r0, table;\n\tmad.lo.u32 %r0, %lane, 4, %r0;\n\tst.shared.b32 [%r0], %lane;\n"
        "\tld.shared.b32 %r1, [%r0];\n\tmul.wide.u32 %d0, %lane, 4;\n\tadd.u64 %d0, %d0, %pa0;\n"
        "\tst.global.b32 [%d0], %r1;",
        ["u64"],
        "\t.shared .align 16 .b8 table[128];",
    )
    memory = GlobalMemory()
    out = memory.allocate("out", 128)
    run(text, 32, [out], memory, shared=64)
    np.testing.assert_array_equal(memory.contents(out, 128)[0].view("u4"), np.arange(32))


SYNTAX = {
    "no such label": "\tbra NOWHERE;",
    "a label twice": "L:\n\tadd.u32 %r0, %r0, 1;\nL:\n\tbra L;",
    "an unreadable operand": "\tadd.u32 %r0, %r0, #5;",
    "an open vector": "\tmov.b64 %d0, {%r0, %r1;",
    "an undeclared guard": "\t@%q9 add.u32 %r0, %r0, 1;",
    "an unreadable register declaration": "\t.reg .b33 %x;",
}


@pytest.mark.parametrize("name", SYNTAX)
def test_bad_syntax(name):
    with pytest.raises((PtxSyntaxError, UnknownInstructionError), match="PTX line"):
        load(kernel(SYNTAX[name], []))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (kernel("\t.frob 1;", []), "frob"),
        (kernel("", [], directives=".wibble 3"), "wibble"),
        (HEADER.format(target="sm_90a") + ".func f() { ret; }", "func"),
    ],
)
def test_unknown_directives(text, named):
    with pytest.raises(UnknownInstructionError, match=named):
        load(text)


def test_missing_kernel():
    with pytest.raises(PtxSyntaxError, match="no kernel 'other'"):
        load(kernel("", []), "other")


def test_unfinished_text():
    with pytest.raises(PtxSyntaxError, match=r"end of the text|closing brace"):
        load(kernel("", []).rstrip().rstrip("}"))
