"""Checks the site that `make docs` built: the API pages have every public name.

python tests/try_site.py SITE
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import FunctionType

_DOCUMENTED = (type, FunctionType)
# Functions that a submodule has the name of stand under the submodule's.
_RENAMED = {
    "ostinato.models.kv_format": "ostinato.models.kv_format.kv_format",
    "ostinato.ops.embed": "ostinato.ops.embed.embed",
    "ostinato.ops.linear": "ostinato.ops.linear.linear.linear",
}


def missing(site: Path, package: str) -> list[str]:
    """Return the functions and classes of a package's `__all__` that its API page has not."""
    module = importlib.import_module(package)
    page = site / "api" / f"{package.split('.')[1]}.html"
    anchors = set(re.findall(r'\bid="([^"]+)"', page.read_text(encoding="utf-8")))
    public = ((name, getattr(module, name)) for name in module.__all__)
    names = [f"{package}.{name}" for name, value in public if isinstance(value, _DOCUMENTED)]
    return [name for name in names if _RENAMED.get(name, name) not in anchors]


def main() -> None:
    """End with a message that names what is missing."""
    site = Path(sys.argv[1])
    packages = [f"ostinato.{page.stem}" for page in sorted(Path("docs/api").glob("*.md"))]
    packages.remove("ostinato.index")
    packages.remove("ostinato.compat")
    packages += [f"ostinato.compat.{name}" for name in ("flash_attn", "sglang", "transformers")]
    absent = [name for package in packages for name in missing(site, package)]
    if absent:
        raise SystemExit(f"{site}: got API pages without {', '.join(absent)}, expected them there")


if __name__ == "__main__":
    main()
