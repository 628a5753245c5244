"""torchtitan pins other versions than the extras, so ``scripts/test_torchtitan.sh`` installs it.

In an environment without torchtitan no tests are collected here.
"""

from importlib.metadata import packages_distributions

# (find_spec would find this folder, which is on the path as a package of that name.)
collect_ignore_glob = [] if "torchtitan" in packages_distributions() else ["test_*.py"]
