"""torchtitan pins what other extras need newer, so ``scripts/test_torchtitan.sh`` installs it apart.

In an environment without it there is nothing here to collect.
"""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torchtitan") else ["test_*.py"]
