"""Maps the top-level folders onto the import package: runtime/ is ostinato, graphs/ its graphs.

Everything else about the distribution is declared in pyproject.toml.
"""

from setuptools import find_packages, setup

PACKAGE_DIR = {"ostinato": "runtime", "ostinato.graphs": "graphs"}

setup(
    package_dir=PACKAGE_DIR,
    packages=[
        *PACKAGE_DIR,
        *(f"ostinato.{name}" for name in find_packages("runtime")),
        *(f"ostinato.graphs.{name}" for name in find_packages("graphs")),
    ],
    package_data={"ostinato": ["py.typed"]},
    # A strict editable install is a tree of links that type checkers and debuggers resolve; the
    # lenient one hides the folder mapping behind an import hook.
    options={"editable_wheel": {"mode": "strict"}},
)
