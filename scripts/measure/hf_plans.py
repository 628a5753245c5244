"""Tries `hf_tp_plan` on every language model of transformers that is made from a small config.

    python -m scripts.measure.hf_plans --assert
    python -m scripts.measure.hf_plans --only llama qwen3 gpt_oss

On 2 ranks (gloo, CPU), with sequence parallelism and without, a forward and backward of each model
is compared with the same on one device. A plan is *right* if every parameter of the unconverted
model has a gradient of 80 dB (SQNR) or more: a gradient of one rank alone, or one that is summed
twice, has 6 dB. The table also has the gradient of all parameters in float8, against float8 on one
device. There a sum in another order rounds rare values to other codes, and sends tokens to other
experts. Models of images and text are given text alone. A model whose plan is refused is not run.
It takes five minutes on two cores.
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
