"""torchtitan pins what other extras need newer, so ``scripts/test_torchtitan.sh`` installs it apart.

In an environment without it there is nothing here to collect.
"""

from importlib.metadata import packages_distributions

# (Not find_spec: this folder is on the path as a package of that name.)
collect_ignore_glob = [] if "torchtitan" in packages_distributions() else ["test_*.py"]
