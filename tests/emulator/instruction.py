"""PTX as data: operands, instructions, kernels."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Register:
    name: str
    type: str
    """Declared type without the dot: "b32", "pred", ..."""


@dataclass(frozen=True)
class Immediate:
    value: int
    """An integer; for a floating-point literal its IEEE bits."""
    float_bits: int = 0
    """0 for an integer, 32 or 64 for a floating-point literal of that width."""


@dataclass(frozen=True)
class Symbol:
    """A special register, parameter, variable or label."""

    name: str


@dataclass(frozen=True)
class Address:
    base: "Register | Symbol | Immediate"
    offset: int = 0
    rest: tuple = ()
    """Further operands inside the brackets (tensor coordinates)."""


@dataclass(frozen=True)
class Vector:
    items: tuple


@dataclass(frozen=True)
class Pair:
    """`d|p`: two destinations."""

    first: "Register | Symbol"
    second: "Register | Symbol"


@dataclass(frozen=True)
class Negated:
    """`!p` as a source operand."""

    register: Register


SINK = Symbol("_")

Operand = Register | Immediate | Symbol | Address | Vector | Pair | Negated


@dataclass
class Instruction:
    """One PTX instruction.

    Attributes:
        opcode: first part of the name, such as "ld".
        modifiers: the other parts, in order, "::" kept: ("global", "L1::no_allocate", "b32").
        operands: destinations first, as written.
        guard: the predicate register of `@p`, or None.
        negate: the guard is `@!p`.
        line: line of the PTX text.
        text: the instruction as written.
        source: "file:line" of the `.loc` in force, or "".
    """

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | None
    negate: bool
    line: int
    text: str
    source: str = ""

    @property
    def where(self) -> str:
        """The PTX line and the source line, for messages."""
        source = f" ({self.source})" if self.source else ""
        return f"PTX line {self.line}{source}: {self.text}"


@dataclass
class Variable:
    """A module or function variable in a state space."""

    name: str
    space: str
    align: int
    num_bytes: int
    initial: bytes | None = None
    external: bool = False


@dataclass
class Parameter:
    name: str
    type: str
    num_bytes: int


@dataclass
class Entry:
    """One `.entry`: a straight list of instructions and the labels into it."""

    name: str
    parameters: list[Parameter]
    directives: dict[str, tuple[int, ...]]
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    """Unique label -> index of the instruction it stands before."""
    branch_targets: dict[str, list[str]] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)


@dataclass
class Module:
    version: str
    target: str
    entries: dict[str, Entry]
    variables: dict[str, Variable]
