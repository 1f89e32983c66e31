"""Faults that ptxas makes in sm_90's asynchronous matrix products, found in the machine code.

A descriptor in uniform registers names a matrix in shared memory, and must not depend on the thread. ptxas 12.8 (Triton
3.6) made descriptors from the number of the thread where two matrices of different layouts used one address. An operand
in registers must stay there until the product is waited for. Triton 3.6 and ptxas before 13.3 can overwrite it
(triton-lang/triton#9433). Products run in order; ``gsb0`` ends a group, and ``WARPGROUP.DEPBAR.LE gsb0, N`` waits for
all groups but the newest N.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_REGISTER = re.compile(r"\b(U?R)(\d+)\b")
_OLDEST = 8  # age of a group that every wait waits for: N is at most 7
_NO_RESULT = ("BAR", "BRA", "BSSY", "BSYNC", "EXIT", "FENCE", "LDGSTS", "NOP", "RED", "ST", "STG", "STL", "STS", "STSM")
_SAME_FOR_ALL_THREADS = ("ATOM", "HGMMA", "HMMA", "LD", "REDUX", "SHFL", "ULDC", "VOTE")
"""Results of these are not numbers of threads: a shuffle makes the number of a warp the same for its threads."""


class _Instruction(NamedTuple):
    guarded: bool
    name: str
    operands: list[str]

    @classmethod
    def of(cls, text: str) -> _Instruction:
        found = re.fullmatch(r"(@!?U?P\w+ )?(\S+)\s*(.*)", text.strip())
        assert found, text
        return cls(found[1] is not None, found[2], [each.strip() for each in found[3].split(", ")])

    @property
    def results(self) -> tuple[str, ...]:
        """Registers that are written; predicates are left out."""
        if self.name.split(".")[0] in _NO_RESULT or self.name.startswith("WARP"):
            return ()
        for operand in self.operands[:3]:  # predicates may come first
            if found := re.fullmatch(r"(U?R)(\d+)", operand):
                return tuple(f"{found[1]}{int(found[2]) + i}" for i in range(self._width))
            if not re.fullmatch(r"U?P\w", operand):
                break
        return ()

    @property
    def _width(self) -> int:
        if self.name.startswith("HGMMA"):
            return int(self.name.split("x")[1]) // 2
        if ".128" in self.name or self.name.startswith("HMMA"):
            return 4
        if self.name.startswith("LDSM"):
            return int(self.name[-1])
        return 2 if re.search(r"\.64|\.WIDE|^CS2R$", self.name) else 1

    @property
    def sources(self) -> set[str]:
        """Registers that are read, and of pairs the second ones."""
        text = " ".join(self.operands[1:])
        found = {f"{kind}{index}" for kind, index in _REGISTER.findall(text)}
        if self.name.startswith("UIADD3.64"):
            found |= {f"{kind}{int(index) + 1}" for kind, index in _REGISTER.findall(text)}
        return found

    def differs(self, state: set[str]) -> bool:
        """Whether the result differs between threads of a warp; the thread's number without its low 5 bits does not.

        Products with eight warps choose their operands by the number of the warp.
        """
        if self.name.startswith("S2"):
            return self.operands[1] in ("SR_TID.X", "SR_LANEID")
        if self.name.startswith(_SAME_FOR_ALL_THREADS) or not self.sources & state:
            return False
        constants = [int(each, 16) for each in self.operands if re.fullmatch(r"0x[0-9a-f]+", each)]
        is_number_of_warp = (self.name.startswith("SHF.R") and constants[:1] >= [5]) or (
            self.name == "LOP3.LUT" and constants[1:] == [0xC0] and constants[0] % 32 == 0
        )
        return not (is_number_of_warp and {f"id {one}" for one in self.sources & state} <= state)

    def ends_groups(self, state: set[str]) -> set[str]:
        """Return the state after the end of a group, or after a wait for groups."""
        if self.operands[-1] == "gsb0":
            return {re.sub(r"^in (\d)", lambda age: f"in {min(int(age[1]) + 1, _OLDEST)}", one) for one in state}
        if self.name == "WARPGROUP.DEPBAR.LE":
            done = tuple(f"in {age} " for age in range(int(self.operands[-1], 16) + 1, _OLDEST + 1))
            return {one for one in state if not one.startswith(done)}
        return state

    def next(self, at: int) -> list[int]:
        """Indices of the instructions that may follow; each has 16 bytes."""
        kind = self.name.split(".")[0]
        ends = kind in ("BRA", "EXIT", "RET") and not self.guarded
        following = [] if ends else [at + 1]
        targets = re.findall(r"\b0x([0-9a-f]+)", " ".join(self.operands)) if kind in ("BRA", "CALL") else []
        return following + [int(each, 16) // 16 for each in targets[-1:]]


def faults_of_products(sass: Sequence[str]) -> list[str]:
    """Return a line for each product whose descriptor depends on the thread, or whose operand is overwritten.

    The state before each instruction is a set of registers: ``R4`` differs between threads of a warp, ``id R4`` is the
    thread's number, ``in 2 R4`` is an operand of a product that has not been waited for, in the second newest group (0:
    the group has not ended). Sets of all paths are united.
    """
    code = [_Instruction.of(text) for text in sass]
    before: dict[int, frozenset[str]] = {0: frozenset()}
    faults: dict[int, str] = {}
    work = [0]
    while work:
        at = work.pop()
        each, state = code[at], set(before[at])
        if each.name.startswith("HGMMA"):
            descriptors, operand = re.search(r"gdesc\[UR(\d+)\]", sass[at]), re.fullmatch(r"R(\d+)", each.operands[1])
            assert descriptors, sass[at]
            first = int(descriptors[1])
            matrices = range(first, first + 4)
            if operand:
                matrices = range(first + 2, first + 4)
                state |= {f"in 0 R{int(operand[1]) + i}" for i in range(4)}
            if wrong := [f"UR{i}" for i in matrices if f"UR{i}" in state]:
                faults[at] = f"{sass[at].strip()}: the descriptor depends on the thread ({', '.join(wrong)})"
        state, results = each.ends_groups(state), each.results
        if wrong := [one for one in results if any(f"in {age} {one}" in state for age in range(_OLDEST + 1))]:
            faults[at] = f"{sass[at].strip()}: overwrites operands of a product ({', '.join(wrong)})"
        differs = each.differs(state)
        if not each.guarded:
            state -= {*results, *(f"id {one}" for one in results)}
        if differs:
            state |= set(results)
        if each.operands[-1] == "SR_TID.X":
            state |= {f"id {one}" for one in results}
        for after in each.next(at):
            if after not in before or not state <= before[after]:
                before[after] = before.get(after, frozenset()) | state
                work.append(after)
    return [faults[at] for at in sorted(faults)]
