"""The copies of block scales as TMA wants them, of every kernel and every tile, without a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from effort import sampled
from ostinato.jit.sources import CSRC
from ostinato.jit.toolchain import require_nvcc
from ostinato.ops.linear.gemm_variants import GEMM_TILED, GemmTiled

pytestmark = pytest.mark.nvcc

_CHECKS = Path(__file__).with_name("scale_boxes.cpp").read_text()
_VARIANTS = [v for v in GEMM_TILED if v.block_scales and v.out_dtype == "bf16"]


def what_is_wrong(folder: Path, variant: GemmTiled, checks: str = _CHECKS) -> str:
    """Compile the checks of one variant for the host, run them, and return what they print."""
    source, program = folder / "checks.cpp", folder / "checks"
    source.write_text(checks)
    macros = [f"-D{name}={value}" for name, value in variant.defines().items()]
    flags = ["-std=c++20", "-w", "-DNDEBUG", "-cudart", "none", f"-I{CSRC}"]
    command = [require_nvcc().path, *flags, *macros, str(source), "-o", str(program)]
    subprocess.run(command, check=True, timeout=100)
    done = subprocess.run([program], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode == 0) == (done.stdout == "")
    return done.stdout


@pytest.mark.parametrize("variant", sampled(_VARIANTS, 4), ids=lambda variant: variant.name)
def test_every_copy_of_scales_is_one_that_tma_can_do(variant: GemmTiled, tmp_path: Path) -> None:
    assert what_is_wrong(tmp_path, variant) == ""


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        # What a GPU ends with "illegal instruction": copies that begin at any scale.
        (("start = scale_box_start(first)", "start = first"), "a copy begins within 16 bytes"),
        (("place = place_in_scale_box(first)", "place = 0"), "a tile begins at another scale"),
        (("count <= box", "count + 4 <= box"), "a tile ends behind its box"),
    ],
)
def test_the_checks_find_what_is_wrong(
    changed: tuple[str, str], words: str, tmp_path: Path
) -> None:
    assert _CHECKS.count(changed[0]) == 1
    assert what_is_wrong(tmp_path, _VARIANTS[0], _CHECKS.replace(*changed)).startswith(words)
