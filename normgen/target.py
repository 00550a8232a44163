"""Facts about GPUs, and the launch ladders that rest on them: the only file that knows hardware."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """What one multiprocessor (AMD: compute unit) has, and in which portions programs are given it."""

    multiprocessors: int
    warp: int
    """Threads a warp."""
    warps: int
    """Resident at once, of all programs."""
    programs: int
    """Resident at once, however small."""
    registers: int
    """Of 32 bits, in `parts` files of equal size; a warp has its registers in one of them."""
    parts: int
    register_step: int
    """Registers a thread are rounded up to a multiple of this."""
    shared: int
    """Bytes of shared memory for all resident programs."""
    shared_program: int
    """Bytes that one program may ask for."""
    shared_step: int
    shared_reserved: int
    """Bytes that each program takes besides what it asks for."""

    def occupancy(self, registers: int, shared: int, warps: int) -> tuple[int, str]:
        """Resident programs a multiprocessor, and what allows no more: warps, programs, registers or shared.

        Takes registers a thread, bytes of shared memory and warps of one program. No program at all is resident where
        one asks for more than there is.
        """
        taken = -(-registers // self.register_step) * self.register_step * self.warp
        reserved = -(-(shared + self.shared_reserved) // self.shared_step) * self.shared_step
        limits = {
            "warps": self.warps // warps,
            "programs": self.programs,
            "registers": self.parts * (self.registers // self.parts // max(taken, 1)) // warps,
            "shared": self.shared // max(reserved, 1) if shared <= self.shared_program else 0,
        }
        limit = min(limits, key=lambda name: limits[name])
        return limits[limit], limit


# The GPU that stands for each target: A100, H100 and H200, B200, MI300X. From the technical specifications by compute
# capability in NVIDIA's programming guide, its occupancy calculator, and LLVM's AMDGPUBaseInfo (a compute unit has four
# files of 512 vector registers a lane, and eight warps on each).
TARGETS = {
    "cuda:80": Gpu(108, 32, 64, 32, 65536, 4, 8, 164 * 1024, 163 * 1024, 128, 1024),
    "cuda:90": Gpu(132, 32, 64, 32, 65536, 4, 8, 228 * 1024, 227 * 1024, 128, 1024),
    "cuda:100": Gpu(148, 32, 64, 32, 65536, 4, 8, 228 * 1024, 227 * 1024, 128, 1024),
    "hip:gfx942": Gpu(304, 64, 32, 32, 4 * 512 * 64, 4, 8, 64 * 1024, 64 * 1024, 512, 0),
}


@dataclass(frozen=True)
class Rung:
    """Rows up to `widest` elements are served by tiles of `elements` elements, with `warps` warps a program."""

    widest: int
    elements: int
    warps: int
    programs: int
    """Programs a multiprocessor in a persistent grid; unused where there is one program a tile."""
    reason: str
    measured: str
    """What chose it: see MEASURED, at the widest row of the rung; then the best of the other choices tried there."""


# A program that holds a whole row keeps it in registers, of which a thread has at most 255: 32 to 64 elements a thread
# forward and 16 backward leave room for the parameters and for other programs. Where a few registers less let one more
# program run, ptxas spills a few bytes for it; tests/test_compile.py holds that no shipped kernel is at such an edge.
# AMD's warps are of 64 threads: with fewer than 512 elements a warp a load would not fill 16 bytes.
FORWARD_LADDER = (
    Rung(256, 1024, 1, 0, "narrow rows share a tile", "0.97 / 0.95; 2048 elements: 0.98 / 0.89"),
    Rung(2048, 2048, 2, 0, "rows share a tile", "0.97 / 0.97 / 1.00; 4 warps: 0.98 / 0.92 / 1.01"),
    Rung(4096, 4096, 2, 0, "one row a program", "0.96 / 0.93 / 0.99; 4 warps: 0.95 / 0.94 / 0.98"),
    Rung(8192, 8192, 4, 0, "one row a program", "0.96 / 0.91 / 0.98; 8 warps: 0.95 / 0.91 / 0.97"),
    Rung(16384, 16384, 8, 0, "one row a program", "0.97 / 0.73 / 0.98; 16 warps: 0.94 / 0.83 / 0.99, with spills"),
)
BACKWARD_LADDER = (
    Rung(4096, 4096, 8, 2, "rows share a tile", "0.79 / 0.72 / 0.80; 8192 and 16 warps: 0.74 / 0.65 / 0.77"),
    Rung(8192, 8192, 16, 1, "one row a tile", "0.76 / 0.69 / 0.79; 8 warps: 0.73 / 0.69 / 0.77"),
)
MEASURED = "rms / layer / add + rms as a share of a device copy, bf16 on an H200, torch 2.11.0, triton 3.6.0"


@dataclass(frozen=True)
class Chunk:
    """The loop over chunks of a row wider than the ladder."""

    elements: int
    warps: int


CHUNK = Chunk(8192, 16)


@dataclass(frozen=True)
class Columns:
    """Tiles of the kernel that sums parameter gradients over rows, a block of columns at a time."""

    rows: int
    columns: int
    warps: int


COLUMNS = Columns(16, 256, 8)


def single_block_limit(grad: bool) -> int:
    """The widest row that one program can hold, in every direction that is emitted."""
    return min(FORWARD_LADDER[-1].widest, BACKWARD_LADDER[-1].widest) if grad else FORWARD_LADDER[-1].widest
