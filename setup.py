"""Maps the top-level folders onto the import package, and compiles the two extensions.

runtime/ is ostinato, graphs/ its graphs, and csrc/ travels along as data: kernels are compiled
from it on the user's machine (see ostinato.jit). Only the loader `ostinato._C` and the graph
manager's `ostinato.graphs._native` are compiled here. Everything else about the distribution is
declared in pyproject.toml.
"""

from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import find_packages, setup

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
        "ostinato.graphs": ["_native.pyi"],
        "ostinato.graphs.loop": ["advance.cu"],
        **{name: ["*.cu", "*.cuh", "*.h", "*.cpp"] for name in NATIVE},
    },
    ext_modules=[
        Pybind11Extension(
            "ostinato._C",
            ["csrc/bindings/module.cpp"],
            include_dirs=["csrc"],
            depends=[str(path) for path in sorted(Path("csrc").rglob("*.h"))],
            libraries=["dl"],
            cxx_std=17,
        ),
        Pybind11Extension(
            "ostinato.graphs._native",
            ["csrc/graphs/module.cpp"],
            depends=[str(path) for path in sorted(Path("csrc/graphs").glob("*.h"))],
            libraries=["dl"],
            cxx_std=17,
        ),
    ],
    # A strict editable install is a tree of links that type checkers and debuggers resolve; the
    # lenient one hides the folder mapping behind an import hook.
    options={"editable_wheel": {"mode": "strict"}},
)
