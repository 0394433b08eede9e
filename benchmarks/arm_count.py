"""What a loop of the ARM kernels takes on Neoverse-N1, counted from the compiler's assembly: no ARM machine is needed.

    python -m benchmarks.arm_count 'sdot_rows<.*Reader<5>, 3>' [neon | i8mm]

Needs aarch64-linux-gnu-g++ and c++filt, and llvm-mca for its own figure. The core has two vector pipes, two load pipes
and takes four instructions a cycle; what an instruction takes was measured on such a core: one pipe for half a cycle
each, but shifts and narrowing one certain pipe, conversions the other one for two cycles, a store half a cycle of a
vector pipe. `cycles` is the largest of these limits: the loop cannot be faster. llvm-mca (LLVM 14 has no model of this
core and takes that of Cortex-A57) says how two versions compare, not how long they take.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from shutil import which

from twostroke.ops.cpu.build import FLAGS, ISA_FLAGS, NATIVE

COMPILER = "aarch64-linux-gnu-g++"
ONE_PIPE = re.compile(r"[us]?sh[lr]l?2?|[us]sra|[us]xtl2?|addv|[us]maxv|fmaxv|[us]?q?xtu?n2?")
CONVERSION = re.compile(r"fcvt\w+|[us]cvtf|mla|mul")
BRANCH = re.compile(r"(?:b\.?\w*|cbn?z|tbn?z)\s+(?:.*,\s*)?(\.L\w+|\d+b)$")


def assembly(isa: str) -> list[str]:
    flags = (*FLAGS, *ISA_FLAGS["aarch64"][isa])
    command = [COMPILER, *flags, "-I", str(NATIVE), "-S", str(NATIVE / "isa" / f"{isa}.cpp"), "-o", "-"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return subprocess.run(["c++filt"], input=text, capture_output=True, text=True, check=True).stdout.splitlines()


def functions(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    name, body = "", list[str]()
    for line in lines:
        if re.match(r"[A-Za-z_(].*:$", line):
            name, body = line[:-1], []
        elif line.strip().startswith(".size") and name:
            yield name, body
            name = ""
        elif name and (text := line.split("//")[0].strip()) and not re.match(r"[#]|\.(?!L)", text):
            body += [part for part in re.split(r"(?<=:)\s+", text) if part]


def loops(body: list[str]) -> Iterator[list[str]]:
    """Innermost ones: from a label to the branch back to it."""
    found, labels = [], dict[str, int]()
    for i, line in enumerate(body):
        if line.endswith(":"):
            labels[line[:-1]] = i
        elif (branch := BRANCH.match(line)) and (target := branch[1].removesuffix("b")) in labels:
            found.append((labels[target], i + 1))
    for start, end in found:
        if not any(start <= a and b <= end and (a, b) != (start, end) for a, b in found):
            yield body[start:end]


def count(loop: list[str]) -> Counter[str]:
    """Instructions by kind; half cycles of both vector pipes, of the one that shifts, of the one that converts."""
    seen: Counter[str] = Counter()
    for line in loop:
        if line.endswith(":"):
            continue
        name, _, operands = line.replace("\t", " ").partition(" ")
        seen["instructions"] += 1
        vector = bool(re.search(r"\b[vq]\d", operands))
        if name.startswith(("ld", "prfm")):
            seen["loads"] += 2 if name == "ldp" and vector else 1
        elif name.startswith("st"):
            seen["vector"] += (2 if name == "stp" else 1) if vector else 0
        elif vector and name != "movi":
            packed = "." in operands.split(",")[0]
            seen["vector"] += 2 if packed and CONVERSION.fullmatch(name) else 1
            seen["shifts"] += bool(ONE_PIPE.fullmatch(name))
            seen["conversions"] += 2 if packed and CONVERSION.fullmatch(name) else 0
        if name in ("sdot", "smmla", "fmla"):
            seen[name] += 1
    return seen


def cycles(seen: Counter[str]) -> float:
    return max(seen["vector"] / 2, seen["shifts"], seen["conversions"], seen["loads"] / 2, seen["instructions"] / 4)


def mca(loop: list[str]) -> str:
    if not which("llvm-mca"):
        return "no llvm-mca"
    text = "\n".join(re.sub(r"\b(\d+)[bf]$", r".L\1", line if line[0] != "1" else ".L1:") for line in loop) + "\n"
    options = ["-mtriple=aarch64", "-mcpu=neoverse-n1", "-mattr=+dotprod,+fullfp16,+i8mm", "-iterations=100"]
    done = subprocess.run(["llvm-mca", *options], input=text, capture_output=True, text=True, check=True)
    total = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    return f"{int(total[1]) / 100:.1f}" if total else "?"


def main() -> None:
    pattern, isa = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "neon"
    for name, body in functions(assembly(isa)):
        if not re.search(pattern, name):
            continue
        print(name.replace("(anonymous namespace)::", ""))
        for loop in [*loops(body)] or [body]:  # a function without a loop is one piece
            seen = count(loop)
            if seen["vector"] >= 16:
                kinds = ", ".join(f"{number} {kind}" for kind, number in seen.items())
                print(f"    cycles {cycles(seen):.1f}, llvm-mca {mca(loop)}: {kinds}")


if __name__ == "__main__":
    main()
