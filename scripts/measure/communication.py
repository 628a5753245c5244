"""Count the communication of one training step: bf16, fp8_dist, and torchao if it is installed.

    python -m scripts.measure.communication --assert

Starts 2 and then 4 ranks on this machine (gloo, CPU), which train a tiny Llama. The second step is
counted: forward, backward, optimizer and precompute. Counts and sizes of buffers depend on the
model, its batch and the mesh, not on the machine.

*Amax all-reduces* reduce amaxes in forward or backward: one number, or one number per row.
"""

from scripts.common.report import make_parser, parse, run


def main(argv: list[str] | None = None) -> int:
    asserts = "a row of the library has more collectives or bytes than it should"
    parser = make_parser("scripts.measure.communication", __doc__, asserts=asserts)
    return run("scripts.measure.communication_run", parse(parser, argv))


if __name__ == "__main__":
    raise SystemExit(main())
