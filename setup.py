"""Maps the top-level folders onto the import package, and compiles the two extensions.

runtime/ is ostinato, graphs/ its graphs, and csrc/ travels along as data: kernels are compiled
from it on the user's machine (see ostinato.jit). Only the loader `ostinato._C` and the graph
manager's `ostinato.graphs._native` are compiled here. OSTINATO_PROJECT_URL, which `make dist` takes
from the remote `origin`, becomes the project's URLs. Everything else about the distribution is
declared in pyproject.toml.

OSTINATO_CUTLASS names a folder in which the PyPI package nvidia-cutlass is installed: the sdist,
and so the wheel made of it, gets the headers of CUTLASS that csrc/ includes.
"""

import importlib.metadata
import os
import re
import shutil
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension
from setuptools import find_packages, setup
from setuptools.command.editable_wheel import editable_wheel
from setuptools.command.sdist import sdist

NATIVE = {
    ".".join(("ostinato", *folder.parts)): str(folder)
    for folder in {file.parent for file in Path("csrc").rglob("*.*")}
}
PACKAGE_DIR = {"ostinato": "runtime", "ostinato.graphs": "graphs", **NATIVE}
URL = os.environ.get("OSTINATO_PROJECT_URL", "").rstrip("/")
PAGES = {
    "Source": "",
    "Documentation": "/tree/main/docs",
    "Changelog": "/blob/main/CHANGELOG.md",
    "Issues": "/issues",
}

CUTLASS = os.environ.get("OSTINATO_CUTLASS")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)


class SdistWithCutlass(sdist):
    """Adds headers of CUTLASS to the release tree; none are in the repository."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        if CUTLASS:
            copy_cutlass(Path(CUTLASS), Path(base_dir, "csrc", "third_party", "cutlass"))


def copy_cutlass(site: Path, to: Path) -> None:
    """Copy the headers that csrc/ includes, directly or through one another, and their version."""
    (package,) = importlib.metadata.distributions(name="nvidia-cutlass", path=[str(site)])
    include = site / "cutlass_library" / "source" / "include"
    ours = [file for file in Path("csrc").rglob("*") if file.suffix in (".h", ".cuh", ".cu")]
    names = [name for file in ours for name in INCLUDE.findall(file.read_text(encoding="utf-8"))]
    pending = [include / name for name in names if name.startswith(("cute/", "cutlass/"))]
    found: set[Path] = set()
    while pending:
        header = pending.pop().resolve(strict=True)
        if header not in found:
            found.add(header)
            text = header.read_text(encoding="utf-8")
            places = [
                at / name for name in INCLUDE.findall(text) for at in (header.parent, include)
            ]
            pending += [place for place in places if place.is_file()]
    for header in found:
        copy = to / "include" / header.relative_to(include.resolve())
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(header, copy)
    (to / "version.txt").write_text(f"{package.version}\n", encoding="utf-8")


class LinkedFolders(editable_wheel):
    """Links whole folders where the strict editable install links each file.

    Files that come and go in these are seen at once. Those directly in runtime/ stay linked one by
    one, since graphs/ and csrc/ have their place beside them.
    """

    def run(self) -> None:
        super().run()
        for tree in Path("build").glob("__editable__.*/ostinato"):
            link_folder(tree)


def link_folder(tree: Path) -> Path | None:
    """Replace a folder of links by a link to the folder that all of them point into.

    Returns that folder, or None where the links point into several, or something is no link.
    """
    targets = {
        target.parent if target is not None and target.name == entry.name else None
        for entry in tree.iterdir()
        for target in [link_folder(entry) if entry.is_dir() else _target(entry)]
    }
    if len(targets) != 1 or None in targets:
        return None
    (folder,) = targets
    shutil.rmtree(tree)
    tree.symlink_to(folder, target_is_directory=True)
    return folder


def _target(file: Path) -> Path | None:
    return file.resolve() if file.is_symlink() else None


setup(
    cmdclass={"sdist": SdistWithCutlass, "editable_wheel": LinkedFolders},
    project_urls={name: URL + page for name, page in PAGES.items()} if URL else {},
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
        "ostinato.server.page": ["*.css", "*.html", "*.js", "*.svg"],
        **{name: ["*.cu", "*.cuh", "*.h", "*.hpp", "*.cpp", "*.txt"] for name in NATIVE},
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
    # lenient one hides the folder mapping behind an import hook. See LinkedFolders.
    options={"editable_wheel": {"mode": "strict"}},
)
