"""Where the checkout has adapters of peers, also for a package that is installed without them."""

from pathlib import Path

ADAPTERS = Path(__file__).parents[1] / "examples/bench_peers"
