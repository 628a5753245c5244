"""Try `hf_tp_plan` on all language models of transformers that can be built from a small config.

    python -m scripts.measure.hf_plans --assert
    python -m scripts.measure.hf_plans --only llama qwen3 gpt_oss

A forward and backward of each model on 2 ranks (gloo, CPU), with and without sequence parallelism,
is compared with one device. A plan is *right* if in the unconverted model the gradient of every
parameter has an SQNR of 80 dB or more: a gradient that lacks one rank's part, or is summed twice,
has 6 dB. The table also has the SQNR of all gradients in float8, against float8 on one device. It
is lower: sums in another order round rare values to other codes, and send tokens to other experts.
Vision-language models get only text. A model whose plan is refused is not run. All takes five
minutes on two cores.
"""

from importlib import import_module

from scripts.common.report import make_parser, parse, run


def main(argv: list[str] | None = None) -> int:
    asserts = "a plan is wrong, or a model fails on ranks that works on one device"
    parser = make_parser("scripts.measure.hf_plans", __doc__, asserts=asserts)
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="types of model, such as llama")
    args = parse(parser, argv)
    every = import_module("scripts.measure.hf_plans_run").every_model()
    args.only = args.only or list(every)
    if unknown := set(args.only) - set(every):
        parser.error(f"--only: transformers has no model of type {', '.join(unknown)}")
    return run("scripts.measure.hf_plans_run", args)


if __name__ == "__main__":
    raise SystemExit(main())
