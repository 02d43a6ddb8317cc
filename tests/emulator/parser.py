"""PTX text to `Module`: statements, scopes, registers and labels; no instruction semantics.

A brace at the start of a statement opens or closes a scope; any other brace belongs to an operand
list. Register and label names of inner scopes (inline assembly) are made unique here, so that later
stages see one flat kernel.
"""

import re
import struct

from .errors import PtxSyntaxError, UnknownInstructionError
from .instruction import (
    SINK,
    Address,
    Entry,
    Immediate,
    Instruction,
    Module,
    Negated,
    Operand,
    Pair,
    Parameter,
    Register,
    Symbol,
    Variable,
    Vector,
)

TYPE_BYTES = {
    **{f"{kind}{bits}": bits // 8 for kind in "bus" for bits in (8, 16, 32, 64)},
    **{"f16": 2, "bf16": 2, "f16x2": 4, "bf16x2": 4, "f32": 4, "f64": 8, "b128": 16, "pred": 1},
}
_NAME = r"[A-Za-z_$%][\w$]*"
_TOKEN = re.compile(
    r"\s*(0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?"
    r"|\d+\.\d*(?:[eE][+-]?\d+)?|\d+U?"
    rf"|{_NAME}(?:\.[\w$]+)*|[\[\]{{}},+\-|!])"
)
_LABEL = re.compile(rf"({_NAME})\s*:(?!:)")
_LINE_DIRECTIVES = {".version", ".target", ".address_size", ".loc", ".file"}
_ENTRY_DIRECTIVES = {
    "reqntid", "maxntid", "minnctapersm", "maxnreg", "explicitcluster", "reqnctapercluster",
    "maxclusterrank", "blocksareclusters",
}  # fmt: skip


def parse(text: str) -> Module:
    """Parses a whole PTX module."""
    return _Parser(text).module()


class _Scope:
    """Names declared between one pair of braces."""

    def __init__(self, number: int):
        self.suffix = f"@{number}" if number else ""
        self.registers: dict[str, Register] = {}
        self.ranges: list[tuple[str, int, str]] = []
        self.labels: set[str] = set()

    def find(self, name: str) -> Register | None:
        if name in self.registers:
            return self.registers[name]
        for prefix, count, kind in self.ranges:
            digits = name[len(prefix) :]
            if name.startswith(prefix) and digits.isdigit() and int(digits) < count:
                return Register(name + self.suffix, kind)
        return None


class _Parser:
    def __init__(self, text: str):
        blank = lambda match: "\n" * match.group().count("\n")  # noqa: E731
        self.text = re.sub(r"/\*.*?\*/", blank, text, flags=re.S)
        self.text = re.sub(r"//[^\n]*", "", self.text)
        self.position = 0
        self.files: dict[str, str] = {}
        self.source = ""
        self.scope_count = 0
        self._line_at, self._line = 0, 1

    def error(self, message: str) -> PtxSyntaxError:
        return PtxSyntaxError(f"PTX line {self.line()}: {message}")

    def line(self) -> int:
        """Line of the current position; positions only grow, so counting is incremental."""
        self._line += self.text.count("\n", self._line_at, self.position)
        self._line_at = self.position
        return self._line

    def skip_space(self) -> bool:
        """Moves to the next character that matters; False at the end of the text."""
        while self.position < len(self.text) and self.text[self.position] in " \t\r\n;":
            self.position += 1
        return self.position < len(self.text)

    def until(self, end: str) -> str:
        """The text up to `end`, which is consumed."""
        stop = self.text.find(end, self.position)
        if stop < 0:
            raise self.error(f"expected {end!r} before the end of the text")
        taken = self.text[self.position : stop]
        self.position = stop + len(end)
        return taken

    def module(self) -> Module:
        module = Module("", "", {}, {})
        while self.skip_space():
            word = re.compile(r"\.[\w]+|\S").match(self.text, self.position).group()
            if word in _LINE_DIRECTIVES:
                self.line_directive(module)
            elif word == ".section":
                self.until("}")
            elif ".entry" in self.text[self.position : self.position + 40].split("(")[0]:
                self.line()
                entry = self.entry()
                module.entries[entry.name] = entry
            elif word in (".extern", ".visible", ".global", ".const", ".shared", ".weak"):
                variable = self.variable(self.until(";"))
                module.variables[variable.name] = variable
            else:
                raise UnknownInstructionError(
                    f"PTX line {self.line()}: directive {word!r} is not known"
                )
        return module

    def line_directive(self, module: Module | None) -> None:
        words = self.until("\n").split()
        if words[0] == ".version":
            module.version = words[1]
        elif words[0] == ".target":
            module.target = words[1].strip(",")
        elif words[0] == ".file":
            self.files[words[1]] = " ".join(words[2:]).split(",")[0].strip('"')
        elif words[0] == ".loc":
            self.source = f"{self.files.get(words[1], words[1])}:{words[2]}"

    def variable(self, text: str) -> Variable:
        declaration, _, initial = text.partition("=")
        match = re.fullmatch(
            rf"\s*((?:\.\w+\s+)*?)(?:\.align\s+(\d+)\s+)?\.(\w+)\s+({_NAME})\s*((?:\[\d*\])*)\s*",
            declaration,
        )
        if not match or match[3] not in TYPE_BYTES:
            raise self.error(f"cannot read the declaration {text.strip()!r}")
        spaces = [word.strip(".") for word in match[1].split()]
        space = next((s for s in spaces if s in ("shared", "global", "const", "local")), None)
        if space is None:
            raise self.error(f"the declaration {text.strip()!r} names no state space")
        size = TYPE_BYTES[match[3]]
        count = 1
        for extent in re.findall(r"\[(\d*)\]", match[5]):
            count *= int(extent or 0)
        values = [int(v, 0) for v in re.findall(r"-?\w+", initial)] if initial else None
        data = None
        if values is not None:
            data = b"".join((v % (1 << 8 * size)).to_bytes(size, "little") for v in values)
            data = data.ljust(size * count, b"\0")
        external = "extern" in spaces
        return Variable(match[4], space, int(match[2] or size), size * count, data, external)

    def entry(self) -> Entry:
        header = self.until("{")
        match = re.search(rf"\.entry\s+({_NAME})\s*(?:\((.*?)\))?(.*)$", header, re.S)
        if not match:
            raise self.error(f"cannot read the entry header {header.strip()!r}")
        parameters = [self.parameter(p) for p in (match[2] or "").split(",") if p.strip()]
        directives = {}
        for name, values in re.findall(r"\.(\w+)\s*([\d,\s]*)", match[3]):
            if name not in _ENTRY_DIRECTIVES:
                raise UnknownInstructionError(
                    f"PTX line {self.line()}: entry directive .{name} is not known"
                )
            directives[name] = tuple(int(v) for v in re.findall(r"\d+", values))
        entry = Entry(match[1], parameters, directives)
        self.body(entry)
        return entry

    def parameter(self, text: str) -> Parameter:
        words = re.sub(r"\.(align\s+\d+|ptr|global|shared|const)\b", "", text).split()
        match = re.fullmatch(rf"({_NAME})(?:\[(\d+)\])?", words[-1])
        kind = words[-2].strip(".")
        if words[0] != ".param" or kind not in TYPE_BYTES or not match:
            raise self.error(f"cannot read the parameter {text.strip()!r}")
        return Parameter(match[1], kind, TYPE_BYTES[kind] * int(match[2] or 1))

    def body(self, entry: Entry) -> None:
        scopes = [self.scope()]
        while self.skip_space():
            char = self.text[self.position]
            label = _LABEL.match(self.text, self.position)
            if char == "{":
                self.position += 1
                scopes.append(self.scope())
            elif char == "}":
                self.position += 1
                scopes.pop()
                if not scopes:
                    return
            elif label:
                self.position = label.end()
                self.label(entry, scopes, label[1])
            elif char == ".":
                self.body_directive(entry, scopes[-1])
            else:
                self.instruction(entry, scopes)
        raise self.error("the kernel has no closing brace")

    def scope(self) -> _Scope:
        """A new scope; its labels are found ahead, since branches may jump forward."""
        scope = _Scope(self.scope_count)
        self.scope_count += 1
        depth, at = 0, self.position
        for match in re.compile(rf"[{{}}]|(?:^|(?<=[;{{}}\n]))\s*({_NAME})\s*:(?!:)").finditer(
            self.text, at
        ):
            depth += {"{": 1, "}": -1}.get(match.group(), 0)
            if depth < 0:
                break
            if match[1] and depth == 0:
                scope.labels.add(match[1])
        return scope

    def label(self, entry: Entry, scopes: list[_Scope], name: str) -> None:
        unique = self.resolve_label(scopes, name)
        rest = re.compile(r"\s*\.branchtargets\b").match(self.text, self.position)
        if rest:
            self.position = rest.end()
            targets = self.until(";").split(",")
            entry.branch_targets[unique] = [self.resolve_label(scopes, t.strip()) for t in targets]
            return
        if unique in entry.labels:
            raise self.error(f"label {name!r} appears twice in one scope")
        entry.labels[unique] = len(entry.instructions)

    def resolve_label(self, scopes: list[_Scope], name: str) -> str:
        for scope in reversed(scopes):
            if name in scope.labels:
                return name + scope.suffix
        raise self.error(f"label {name!r} is not defined")

    def body_directive(self, entry: Entry, scope: _Scope) -> None:
        word = re.compile(r"\.\w+").match(self.text, self.position).group()
        if word in _LINE_DIRECTIVES:
            self.line_directive(None)
        elif word == ".pragma":
            self.until(";")
        elif word == ".reg":
            self.registers(scope, self.until(";"))
        elif word in (".local", ".shared"):
            variable = self.variable(self.until(";"))
            entry.variables[variable.name] = variable
        else:
            raise UnknownInstructionError(
                f"PTX line {self.line()}: directive {word!r} is not known"
            )

    def registers(self, scope: _Scope, text: str) -> None:
        match = re.fullmatch(r"\s*\.reg\s+\.(\w+)\s+(.*)", text, re.S)
        if not match or match[1] not in TYPE_BYTES:
            raise self.error(f"cannot read the register declaration {text.strip()!r}")
        for name in match[2].split(","):
            ranged = re.fullmatch(rf"\s*({_NAME})<(\d+)>\s*", name)
            if ranged:
                scope.ranges.append((ranged[1], int(ranged[2]), match[1]))
            else:
                scope.registers[name.strip()] = Register(name.strip() + scope.suffix, match[1])

    def instruction(self, entry: Entry, scopes: list[_Scope]) -> None:
        line = self.line()
        text = " ".join(self.until(";").split())
        rest, guard, negate = text, None, False
        if text.startswith("@"):
            match = re.match(r"@(!?)\s*(\S+)\s+(.*)", text)
            if not match:
                raise self.error(f"cannot read {text!r}")
            negate, guard, rest = bool(match[1]), self.find(scopes, match[2]), match[3]
            if guard is None:
                raise self.error(f"the guard of {text!r} is not a declared register")
        name, _, operands = rest.partition(" ")
        opcode, *modifiers = name.split(".")
        parsed = _Operands(self, scopes, operands, text).all()
        entry.instructions.append(
            Instruction(opcode, tuple(modifiers), parsed, guard, negate, line, text, self.source)
        )

    def find(self, scopes: list[_Scope], name: str) -> Register | None:
        for scope in reversed(scopes):
            register = scope.find(name)
            if register:
                return register
        return None


class _Operands:
    """Recursive descent over the operand list of one instruction."""

    def __init__(self, parser: _Parser, scopes: list[_Scope], text: str, whole: str):
        self.parser, self.scopes, self.whole = parser, scopes, whole
        self.tokens = []
        at = 0
        text = text.strip()
        while at < len(text):
            match = _TOKEN.match(text, at)
            if not match:
                raise parser.error(f"cannot read {text[at:]!r} in {whole!r}")
            self.tokens.append(match[1])
            at = match.end()
            while at < len(text) and text[at].isspace():
                at += 1
        self.at = 0

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, wanted: str | None = None) -> str:
        token = self.peek()
        if not token or (wanted and token != wanted):
            raise self.parser.error(f"expected {wanted or 'an operand'} in {self.whole!r}")
        self.at += 1
        return token

    def all(self) -> tuple[Operand, ...]:
        operands = self.items("") if self.tokens else ()
        if self.peek():
            raise self.parser.error(f"cannot read {self.peek()!r} in {self.whole!r}")
        return operands

    def items(self, end: str) -> tuple[Operand, ...]:
        items = [self.operand()]
        while self.peek() == ",":
            self.take()
            items.append(self.operand())
        if end:
            self.take(end)
        return tuple(items)

    def operand(self) -> Operand:
        token = self.take()
        if token == "{":
            return Vector(self.items("}"))
        if token == "[":
            return self.address()
        if token == "!":
            return Negated(self.name(self.take()))
        if token == "-" or token[0].isdigit():
            return self.number(token)
        first = self.name(token)
        if self.peek() == "|":
            self.take()
            return Pair(first, self.name(self.take()))
        return first

    def name(self, token: str) -> Register | Symbol:
        if token == "_":
            return SINK
        register = self.parser.find(self.scopes, token)
        if register:
            return register
        for scope in reversed(self.scopes):
            if token in scope.labels:
                return Symbol(token + scope.suffix)
        return Symbol(token)

    def number(self, token: str) -> Immediate:
        sign = 1
        if token == "-":
            sign, token = -1, self.take()
        if token[:2] in ("0f", "0F"):
            return Immediate(int(token[2:], 16) ^ (0x80000000 if sign < 0 else 0), 32)
        if token[:2] in ("0d", "0D"):
            return Immediate(int(token[2:], 16) ^ ((1 << 63) if sign < 0 else 0), 64)
        if "." in token or ("e" in token.lower() and "x" not in token.lower()):
            bits = struct.unpack("<Q", struct.pack("<d", sign * float(token)))[0]
            return Immediate(bits, 64)
        token = token.rstrip("U")
        octal = len(token) > 1 and token.isdigit() and token[0] == "0"
        return Immediate(sign * int(token, 8 if octal else 0))

    def address(self) -> Address:
        token = self.take()
        base = self.number(token) if token[0].isdigit() else self.name(token)
        offset = 0
        while self.peek() in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            offset += sign * self.number(self.take()).value
        rest: tuple[Operand, ...] = ()
        if self.peek() == ",":
            self.take()
            rest = self.items("]")
        else:
            self.take("]")
        return Address(base, offset, rest)
