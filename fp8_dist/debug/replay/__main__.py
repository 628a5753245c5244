"""Run the command ``python -m fp8_dist.debug.replay``."""

from fp8_dist.debug.replay import main

if __name__ == "__main__":
    raise SystemExit(main())
