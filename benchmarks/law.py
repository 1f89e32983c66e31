"""Searches the noise generator for pairs of keys with correlated random numbers.

    python benchmarks/law.py --output benchmarks/results/law.json

A sample is an argmax over noise, so the joint distribution of the numbers of two keys matters. Numbers are bijections
of hashes, and two keys are related by the xor of their parts: hashed lane ids within a row; seed, position or place
between rows. The scans cover many such differences, and all pairs of lanes of real vocabularies whose hashed ids differ
only in the top bits, which a multiplication mixes least.

Each pair acts as two tokens with probabilities 1 - p and p. z compares how often the second one wins in 400,000 rows
with the expectation given the noise of the first. Scans of many thousand pairs first search for a biased bit of x ^ y,
x - y or x + y, and then sample with the worst pairs. The lowest 8 of 31 bits (2^-23 in total) are excluded: the last
multiplication does not mix them, and no sample depends on them. `expected` is the mean of the largest |z| for
independent numbers; one run in a thousand exceeds `limit`. `without round 3` tests the generator without its last
multiplication, as a control that must fail.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterable
from datetime import date
from itertools import combinations
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bateleur.eagle import HashedVocab, Keys, Role, bits

sys.path.append(str(Path(__file__).parents[1] / "packages/eagle/tests"))
from eagle_doubles.markov import chi_square

SPLITS = (0.9, 0.5, 0.1, 0.02, 0.002)
VOCABULARIES = (50_257, 128_256, 151_936, 262_144)
TOP_BITS = 8
BASE = 0x1B56C4E9  # any hashed id: only the difference of two ids matters
LOW_BITS, BITS = 8, 31
CPU = torch.device("cpu")
UNDO_ROUND_3 = pow(0x2C1B3C6D, -1, 1 << 32) - (1 << 32)


class Scan(NamedTuple):
    """Pairs of keys (P, ..). `bits(some, rows)` returns (n, 1) or (n, D) bits of the first keys and (n, D) bits of the
    second keys, for D pairs and n rows of different numbers.
    """

    pairs: Tensor
    bits: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


# ---- scans


def differences(width: int, counts: Iterable[int], low: int = 0) -> list[int]:
    """All numbers with so many bits set among `width` bits from bit `low` on."""
    return [sum(1 << low + bit for bit in chosen) for k in counts for chosen in combinations(range(width), k)]


def int32(values: Tensor) -> Tensor:
    """The low 32 bits as a signed number."""
    return (values & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)


def of_hashed_ids(changes: list[int]) -> Scan:
    """Token ids of one row whose hashed ids have these xor differences."""

    def of(some: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        words = torch.cat((torch.tensor([BASE]), some ^ BASE))
        found = bits(Keys(torch.full_like(rows, 5), rows), Role.TARGET, HashedVocab(int32(words)))
        return found[:, :1], found[:, 1:]

    return Scan(torch.tensor(changes), of)


def of_vocabulary(size: int, top: int = TOP_BITS) -> Scan:
    """All pairs of token ids whose hashed ids differ only in the `top` bits."""
    below = HashedVocab.of(size, CPU).hashes.long() & (1 << 32 - top) - 1
    order = below.argsort()
    pairs, apart = [], 1
    while len(same := (below[order[apart:]] == below[order[:-apart]]).nonzero().flatten()):
        pairs.append(torch.stack((order[same], order[same + apart]), 1))
        apart += 1

    def of(some: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        found = bits(Keys(torch.full_like(rows, 6), rows), Role.TARGET, some.flatten())
        return found[:, 0::2], found[:, 1::2]

    return Scan(torch.cat(pairs), of)


def of_rows(changes: list[tuple[int, int, int, Role]], first: Role = Role.TARGET) -> Scan:
    """One lane in two rows: changes of seed, position and place, and the role of the second row."""

    def of(some: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        seed, position, place = (rows * 0x9E3779B97F4A7C1, rows * 0x9E3779B1 & 0xFFFFFFFF, rows * 0x9E37 & 0xFFF)
        second = [
            bits(Keys(seed ^ change, position ^ moved, place ^ turned), Role(role), 1)
            for change, moved, turned, role in some.tolist()
        ]
        return bits(Keys(seed, position, place), first, 1), torch.cat(second, 1)

    # As signed int64, like the seeds of a tensor.
    signed = [(s - (1 << 64) if s >> 63 else s, *rest) for s, *rest in changes]
    return Scan(torch.tensor(signed), of)


def scans(most: int) -> dict[str, Scan]:
    """All scans, with differences of at most `most` bits."""
    counts, target = range(1, most + 1), Role.TARGET
    roles = [(first, second) for first, second in combinations(Role, 2)]
    return {
        "hashed ids, few bits": of_hashed_ids(differences(32, counts)),
        "hashed ids, top 16 bits": of_hashed_ids([high << 16 for high in range(1, 1 << 16)]),
        **{f"vocabulary {size:,}": of_vocabulary(size) for size in VOCABULARIES},
        "seeds": of_rows([(change, 0, 0, target) for change in differences(64, counts)]),
        "positions": of_rows([(0, change, 0, target) for change in differences(32, counts)]),
        "places": of_rows([(0, c & 0xFFFFFFFF, c >> 32, target) for c in differences(44, range(1, min(most, 2) + 1))]),
        **{
            f"{first.name} and {second.name}": of_rows(
                [(0, change, 0, second) for change in [0, *differences(32, (1, 2))]], first
            )
            for first, second in roles
        },
    }


# ---- tests


def exponential(found: Tensor) -> Tensor:
    """Exponential variates from bits: the smallest E / probability wins, like the largest logit + Gumbel noise."""
    return (found & 0x7FFFFFFF).float().mul_(-(2.0**-31)).clamp_(min=2.0**-24 - 1).log1p_().neg_()


def drawn(x: Tensor, y: Tensor) -> Tensor:
    """(D, S) z of how often the second of two tokens is sampled, for each split."""
    first, second = exponential(x), exponential(y)
    found = []
    for p in SPLITS:
        least = first * (p / (1 - p))
        chance = -torch.expm1(-least)
        surplus = ((second < least).float() - chance).double().sum(0)
        found.append(surplus / (chance * (1 - chance)).double().sum(0).sqrt())
    return torch.stack(found, 1)


def unfair(x: Tensor, y: Tensor) -> Tensor:
    """(D, 69) z of every bit of x ^ y, x - y and x + y except the lowest."""
    found = [
        ((mixed >> bit & 1).sum(0) / len(mixed) - 0.5) * (2 * len(mixed) ** 0.5)
        for mixed in (x ^ y, x - y, x + y)
        for bit in range(LOW_BITS, BITS)
    ]
    return torch.stack(found, 1).double()


def without_round_3(found: Tensor) -> Tensor:
    """The bits before the last round."""
    found = found * UNDO_ROUND_3
    return found ^ (found >> 16 & 0xFFFF)


class Sizes(NamedTuple):
    """Numbers of rows for sampling and for bit tests, and of pairs to sample with."""

    rows: int
    bit_rows: int
    pairs: int
    suspects: int


def run(scan: Scan, pairs: Tensor, test: Callable[[Tensor, Tensor], Tensor], rows: Tensor, old: bool) -> Tensor:
    """Absolute z of a test, (P, ..), computed in batches of pairs."""
    step = max(1, 1_600_000 // len(rows))
    found = []
    for some in pairs.split(step):
        x, y = scan.bits(some, rows)
        found.append(test(without_round_3(x), without_round_3(y)) if old else test(x, y))
    return torch.cat(found).abs()


def largest(count: int, share: float) -> float:
    """Value that the largest of `count` |z| exceeds with about this probability if all numbers are independent."""
    return NormalDist().inv_cdf(1 - share / (2 * count))


def summary(z: Tensor) -> dict[str, Any]:
    """The worst of a table of |z|, with its expectation. The share 0.5615 gives the mean of the largest."""
    return {
        "pairs": len(z),
        "worst": round(float(z.max()), 2),
        "expected": round(largest(z.numel(), 0.5615), 2),
        "limit": round(largest(z.numel(), 1e-3), 2),
    }


def examine(scan: Scan, sizes: Sizes, *, old: bool = False) -> dict[str, Any]:
    """Sample with all pairs, or with the pairs whose bits look worst if there are too many."""
    pairs, result = scan.pairs, {}
    if len(pairs) > sizes.pairs:
        z = run(scan, pairs, unfair, torch.arange(sizes.bit_rows) + 10**9, old)
        result["bits"] = summary(z)
        pairs = pairs[z.amax(1).topk(sizes.suspects).indices]
    z = run(scan, pairs, drawn, torch.arange(sizes.rows), old)
    at = int(z.amax(1).argmax())
    return result | {"draws": summary(z), "pair": pairs[at].tolist(), "split": SPLITS[int(z[at].argmax())]}


def quadruples(count: int, *, old: bool = False) -> dict[str, Any]:
    """Four lanes whose hashed ids have the xor 0, although no two of them need to be related."""
    law = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    scan, rows = of_hashed_ids(differences(32, (1, 2))), torch.arange(count)
    found = []
    for left, right in combinations(differences(32, (1,)), 2):
        first, others = scan.bits(torch.tensor([left, right, left | right]), rows)
        four = torch.cat((first, others), 1)
        drawn = (exponential(without_round_3(four) if old else four) / law).argmin(1, keepdim=True)
        found.append(chi_square(drawn, law, 4).z)
    return {"draws": summary(torch.tensor(found, dtype=torch.float64)[:, None])}


def line(name: str, result: dict[str, Any]) -> str:
    draws = result["draws"]
    pairs = result.get("bits", draws)["pairs"]
    text = f"{name:<38}{pairs:>9,}"
    for part in ("bits", "draws"):
        each = result.get(part)
        text += f"{each['worst']:>10.2f} ({each['expected']:.2f}, {each['limit']:.2f})" if each else " " * 24
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="run fewer rows and only differences of one and two bits")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    sizes = Sizes(20_000, 512, 64, 64) if args.quick else Sizes(400_000, 4096, 6000, 1000)
    torch.set_num_threads(1)
    began, results = time.perf_counter(), {}
    print(f"{'':<38}{'pairs':>9}{'unfair bits: worst |z|':>24}{'draws: worst |z|':>24}  (expected, limit)")
    for name, scan in scans(2 if args.quick else 3).items():
        results[name] = examine(scan, sizes)
        print(line(name, results[name]), flush=True)
    results["hashed ids, four lanes"] = quadruples(sizes.rows)
    print(line("hashed ids, four lanes", results["hashed ids, four lanes"]))
    control = of_hashed_ids(differences(32, (1, 2)))
    results["without round 3"] = examine(control, sizes, old=True)
    results["four lanes, without round 3"] = quadruples(sizes.rows, old=True)
    for name in ("without round 3", "four lanes, without round 3"):
        print(line(name, results[name]))
    print(f"{time.perf_counter() - began:.0f} s")
    if args.output:
        told = {
            "date": str(date.today()),
            "machine": platform.machine(),
            "torch": torch.__version__,
            "sizes": sizes._asdict(),
            "splits": SPLITS,
            "scans": results,
        }
        args.output.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
