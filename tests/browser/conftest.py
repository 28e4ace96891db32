"""The tests of this folder need playwright, which `make test-browser` installs."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("playwright") else ["test_*.py"]
