"""The options of scripts/plan.py: their parser, and every check that needs no process group."""

import argparse
import json
import math
import os
from dataclasses import fields
from pathlib import Path

from llama import MODELS, LlamaConfig
from options import RECIPES
from plan_links import Links

MOST_RANKS = 16_384
MODELS_AT_SCALE = ("8b", "70b", "405b")
# The worlds of --scale.
WORLDS = (8, 64, 1024, 4096, 16_384)
# The last axis is the one whose ranks are consecutive.
MESHES = (("dp", "tp"), ("replicate", "shard", "tp"))


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns the parser; names must be given in full."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--model",
        default="405b",
        metavar="|".join((*MODELS_AT_SCALE, "FILE")),
        help="size of the Llama, or a JSON file with the fields of LlamaConfig",
    )
    add(
        "--mesh",
        default="dp=2048,tp=8",
        help=f"dp=..,tp=.., or replicate=..,shard=..,tp=.. (HSDP); up to {MOST_RANKS:,} ranks",
    )
    add("--recipe", nargs="+", default=["tensorwise"], metavar="NAME", help=", ".join(RECIPES))
    add("--batch-size", type=int, default=1, help="sequences per data-parallel rank")
    add("--seq-len", type=int, help="tokens of each; default: the longest of the model")
    links = parser.add_argument_group("links", (Links.__doc__ or "").partition("\n")[0])
    for field in fields(Links):
        links.add_argument(
            f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default
        )
    add(
        "--scale",
        action="store_true",
        help=f"the first recipe at {WORLDS} ranks too, and time precompute",
    )
    add("--json", type=Path, metavar="FILE", help="write all numbers to a file")
    add("--write", action="store_true", help="write docs/plan.md (with --scale)")
    add("--jobs", type=int, default=min(os.cpu_count() or 1, 4), help="runs at the same time")
    return parser


def parse_options(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Parses and checks the options; errors end the process with status 2.

    Returns:
        The options, with `config` (LlamaConfig), `axes` (sizes by name) and `links` (Links).
    """
    args = parser.parse_args(argv)
    unknown = [name for name in args.recipe if name not in RECIPES]
    if unknown:
        parser.error(f"--recipe {unknown[0]}: choose from {', '.join(RECIPES)}")
    try:
        args.config = read_model(args.model)
        args.axes = read_mesh(args.mesh)
        args.links = Links(**{field.name: getattr(args, field.name) for field in fields(Links)})
        check_sizes(args.config, args.axes)
    except ValueError as error:
        parser.error(str(error))
    if args.seq_len is None:
        args.seq_len = args.config.max_seq_len
    for name in ("batch_size", "seq_len", "jobs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.seq_len > args.config.max_seq_len:
        parser.error(
            f"--seq-len {args.seq_len} is above the model's max_seq_len={args.config.max_seq_len}"
        )
    if args.write and not args.scale:
        parser.error("--write needs --scale: the growth table is part of the page")
    if args.scale and "dp" not in args.axes:
        parser.error("--scale changes dp: give a --mesh dp=..,tp=..")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json}: its folder does not exist")
    return args


def read_model(model: str) -> LlamaConfig:
    """The sizes of a model by name, or from a JSON file.

    Raises:
        ValueError: there is no such file, it is no JSON object, or its fields are not those of
            `LlamaConfig`.
    """
    if model in MODELS:
        return MODELS[model]
    path = Path(model)
    if not path.is_file():
        raise ValueError(f"--model {model}: no such file, and none of {', '.join(MODELS)}")
    try:
        sizes = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--model {model}: not JSON: {error}") from error
    kinds = {f.name: f.type for f in fields(LlamaConfig)}
    if not isinstance(sizes, dict):
        raise ValueError(f"--model {model}: a JSON object of LlamaConfig's fields is needed")
    for name, value in sizes.items():
        if name not in kinds:
            raise ValueError(f"--model {model}: {name!r} is none of {', '.join(kinds)}")
        allowed = (int, float) if kinds[name] is float else (int,)
        if isinstance(value, bool) or not isinstance(value, allowed) or value <= 0:
            raise ValueError(f"--model {model}: {name} must be a positive number, got {value!r}")
    try:
        return LlamaConfig(**sizes)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--model {model}: {error}") from error


def read_mesh(mesh: str) -> dict[str, int]:
    """The sizes of a mesh's axes, in their order; those left out are 1.

    Raises:
        ValueError: the text is no list of NAME=SIZE, an axis is unknown, or there are too many
            ranks.
    """
    sizes: dict[str, int] = {}
    for part in mesh.split(","):
        name, equals, size = part.strip().partition("=")
        if not (equals and size.isdecimal() and size.isascii() and int(size)):
            raise ValueError(f"--mesh {mesh}: {part.strip()!r} is not NAME=SIZE; use dp=..,tp=..")
        if name in sizes:
            raise ValueError(f"--mesh {mesh}: {name} is there twice")
        sizes[name] = int(size)
    known = next((names for names in MESHES if set(sizes) <= set(names)), None)
    if known is None:
        shown = " or ".join(",".join(f"{name}=.." for name in names) for names in MESHES)
        raise ValueError(f"--mesh {mesh}: use {shown}")
    ranks = math.prod(sizes.values())
    if ranks > MOST_RANKS:
        raise ValueError(f"--mesh {mesh}: {ranks:,} ranks, more than {MOST_RANKS:,}")
    return {name: sizes.get(name, 1) for name in known}


def check_sizes(config: LlamaConfig, axes: dict[str, int]) -> None:
    """Refuses meshes that the model can't be cut for.

    Raises:
        ValueError: tp does not divide the heads.
    """
    if config.n_kv_heads % axes["tp"]:
        raise ValueError(
            f"tp={axes['tp']} does not divide the {config.n_kv_heads} key/value heads of the model"
        )


def worlds(axes: dict[str, int]) -> list[dict[str, int]]:
    """The meshes of --scale: tp stays, dp grows."""
    tp = axes["tp"]
    return [{"dp": world // tp, "tp": tp} for world in WORLDS if world % tp == 0]
