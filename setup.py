"""Maps the top-level folders onto the import package, and compiles the loader `ostinato._C`.

runtime/ is ostinato, graphs/ its graphs, and csrc/ travels along as data: kernels are compiled
from it on the user's machine (see ostinato.kernels), the loader alone is compiled here. Everything
else about the distribution is declared in pyproject.toml.
"""

import hashlib
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import find_packages, setup

# Of the params.h of every folder, and of headers that add to it, such as prefill_params.h.
PARAMS = sorted(Path("csrc").glob("*/*params.h"))


def _digest(path: Path) -> str:
    """Hash a header and the params.h that it adds to."""
    texts = [header.read_bytes() for header in dict.fromkeys((path.with_name("params.h"), path))]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:16]


def _name(path: Path) -> str:
    """Return a header's macro: OSTINATO_ABI_ATTENTION_PREFILL of attention/prefill_params.h."""
    parts = ("OSTINATO_ABI", path.parent.name, path.stem.removesuffix("params").strip("_"))
    return "_".join(filter(None, parts)).upper()


ABI = {_name(path): _digest(path) for path in PARAMS}
NATIVE = {
    ".".join(("ostinato", *folder.parts)): str(folder)
    for folder in {file.parent for file in Path("csrc").rglob("*.*")}
}
PACKAGE_DIR = {"ostinato": "runtime", "ostinato.graphs": "graphs", **NATIVE}

setup(
    package_dir=PACKAGE_DIR,
    packages=[
        *PACKAGE_DIR,
        *(f"ostinato.{name}" for name in find_packages("runtime")),
        *(f"ostinato.graphs.{name}" for name in find_packages("graphs")),
    ],
    package_data={
        "ostinato": ["py.typed", "_C.pyi"],
        **{name: ["*.cu", "*.cuh", "*.h", "*.cpp"] for name in NATIVE},
    },
    ext_modules=[
        Pybind11Extension(
            "ostinato._C",
            ["csrc/bindings.cpp"],
            include_dirs=["csrc"],
            depends=[str(path) for path in (*sorted(Path("csrc").glob("bindings_*.h")), *PARAMS)],
            # As `ostinato.kernels.compiler.abi_version`, which gives each kernel library its own.
            define_macros=[(name, f"0x{digest}ULL") for name, digest in ABI.items()],
            libraries=["dl"],
            cxx_std=17,
        )
    ],
    # A strict editable install is a tree of links that type checkers and debuggers resolve; the
    # lenient one hides the folder mapping behind an import hook.
    options={"editable_wheel": {"mode": "strict"}},
)
