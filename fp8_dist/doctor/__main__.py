"""Run the command ``python -m fp8_dist.doctor``."""

from fp8_dist.doctor import main

if __name__ == "__main__":
    raise SystemExit(main())
