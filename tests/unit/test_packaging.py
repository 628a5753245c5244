"""What pyproject.toml promises and what the tree holds: packages, links, imports."""

import ast
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fp8_dist

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE_DIRS: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]
# What an import under the name of the folder says.
SUB_PACKAGES = {
    "fsdp": "this package is fp8_dist.fsdp, not fsdp: import fp8_dist.fsdp",
    "tensor_parallel": (
        "this package is fp8_dist.tensor_parallel, not tensor_parallel: import "
        "fp8_dist.tensor_parallel"
    ),
}


def modules() -> Iterator[tuple[str, Path]]:
    """(import name, file) of every module of the library."""
    for package, folder in PACKAGE_DIRS.items():
        for path in sorted((ROOT / folder).glob("*.py")):
            yield (package if path.stem == "__init__" else f"{package}.{path.stem}"), path


MODULES = dict(modules())
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def imports(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            yield child.module or ""


def test_every_folder_of_the_library_is_a_declared_package() -> None:
    assert PROJECT["tool"]["setuptools"]["packages"] == list(PACKAGE_DIRS)
    found = {
        path.parent.relative_to(ROOT).as_posix()
        for top in ("fp8_dist", "fsdp", "tensor_parallel")
        for path in (ROOT / top).rglob("__init__.py")
        if not any(parent.is_symlink() for parent in path.parents)
    }
    assert found == set(PACKAGE_DIRS.values())


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A Python process."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@pytest.mark.parametrize("folder", SUB_PACKAGES)
def test_a_sub_package_is_linked_and_has_no_second_name(folder: str) -> None:
    link = ROOT / "fp8_dist" / folder
    assert link.is_symlink()
    assert os.readlink(link) == f"../{folder}"
    assert PACKAGE_DIRS[f"fp8_dist.{folder}"] == folder
    # A new process with -S finds no other installed packages, and has imported nothing.
    done = run("-S", "-c", f"import {folder}", cwd=ROOT)
    assert done.returncode == 1
    assert f"ImportError: {SUB_PACKAGES[folder]} (from the root of a checkout" in done.stderr


# Modules that the library imports only on demand, and what they need besides torch.
OPTIONAL = {
    "fp8_dist.report.figures": {"matplotlib", "numpy"},
    "fp8_dist.report.page": {"jinja2"},
    "fp8_dist.kernels.cuda.triton": {"triton"},
    "fp8_dist.integrations.torchtitan": {"torchtitan"},
    "fp8_dist.integrations.transformers": {"accelerate", "transformers"},
}


def test_imports() -> None:
    """torch is the only runtime dependency, and imports stand at the top of the file."""
    assert PROJECT["project"]["dependencies"] == ["torch>=2.11"]
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
    for name, tree in TREES.items():
        tops = {module.split(".")[0] for module in imports(tree)}
        optional = {top for room, tops in OPTIONAL.items() if name.startswith(room) for top in tops}
        assert tops - set(sys.stdlib_module_names) <= {"torch", "fp8_dist"} | optional, name
        inner = [m for n in ast.walk(tree) if isinstance(n, functions) for m in imports(n)]
        assert not inner, name


def test_modules_that_strings_name_are_not_above() -> None:
    """Extend the import contract, which does not see imports by name."""
    contract = PROJECT["tool"]["importlinter"]["contracts"][0]
    layers = [re.split(r" \| ", layer) for layer in contract["layers"]]
    height = {f"fp8_dist.{room}": -i for i, rooms in enumerate(layers) for room in rooms}
    for name, tree in TREES.items():
        if name == "fp8_dist":
            continue
        room = ".".join(name.split(".")[:2])
        for node in ast.walk(tree):
            value = node.value if isinstance(node, ast.Constant) else None
            if isinstance(value, str) and re.fullmatch(r"fp8_dist(\.\w+)+", value):
                named = ".".join(value.split(".")[:2])
                assert named == room or height[named] < height[room], f"{name}: {value}"


def names_of_the_library() -> set[str]:
    """Names that the library gives to functions, classes, variables and its own attributes."""
    found = {"_asdict", "_fields", "_replace"}  # of every NamedTuple
    for node in (node for tree in TREES.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) == "self"
        ):
            found.add(node.attr)
    return found


OWN_NAMES = names_of_the_library()
# Attributes that torch_internals checks, and others read: tables of nn.Module, and a style's part.
CHECKED = {"_buffers", "_modules", "_parameters", "_partition_linear_fn"}


def private_names(tree: ast.AST) -> Iterator[str]:
    """Private names of others: imported, looked up under ``torch.``, or attributes of objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            for name in [*(node.module or "").split("."), *(alias.name for alias in node.names)]:
                if name.startswith("_"):
                    yield f"{node.module}: {name}"
        if isinstance(node, ast.Attribute):
            path = ast.unparse(node)
            is_torch = re.match(r"torch\..*\b_[a-z]", path.replace("aten._", "aten."))
            is_private = node.attr.startswith("_") and not node.attr.startswith("__")
            is_operator = path.startswith(("aten.", "torch.ops.aten."))
            if is_torch or (
                is_private and node.attr not in OWN_NAMES | CHECKED and not is_operator
            ):
                yield path


def test_private_names_of_torch_are_in_two_files() -> None:
    # (Integrations read private attributes of the packages that they are for.)
    assert {
        name
        for name, tree in TREES.items()
        if set(private_names(tree)) and "integrations" not in name
    } == {"fp8_dist.fsdp_internals", "fp8_dist.torch_internals"}


# Of torch's GPU wheels: exact in its own metadata, and absent from the CPU's.
GPU_WHEELS = ("cuda-", "nvidia-", "triton")


def transitive(requirements: Iterable[Requirement]) -> set[str]:
    """Canonical names of the requirements, and of what they require on this machine in turn."""
    waiting, seen = list(requirements), set[tuple[str, str]]()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) not in seen and not name.startswith(GPU_WHEELS):
                seen.add((name, extra))
                for text in importlib.metadata.requires(name) or ():
                    inner = Requirement(text)
                    if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                        waiting.append(inner)
    return {name for name, _ in seen}


def test_everything_that_is_installed_is_pinned() -> None:
    own = PROJECT["project"]["name"]
    extras: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
    texts = [text for extra in extras.keys() - {"torchtitan"} for text in extras[extra]]
    texts += PROJECT["project"]["dependencies"] + PROJECT["build-system"]["requires"]
    wanted = (each for each in map(Requirement, texts) if each.name != own)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(line.split("==")[0]) for line in lines if "==" in line}
    assert transitive(wanted) - pinned == set()


def test_constraints_are_exact_and_on_the_page_of_torchtitan() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    assert all(str(pin.specifier).startswith("==") for pin in pins)
    assert [pin.name.lower() for pin in pins] == sorted(pin.name.lower() for pin in pins)
    # torch before torchtitan, which would take the newest one, for CUDA.
    torch, triton = (line for line in lines if line.startswith(("torch==", "triton==")))
    page = (ROOT / "docs/torchtitan.md").read_text()
    installs = re.findall(r"^pip install (.*)$", page.partition("python3 -m venv")[2], re.M)
    assert installs == [f"{torch} {triton}", '-e ".[torchtitan]"']


def built(kind: str, tree: Path) -> Path:
    """The sdist or wheel that the build backend makes of a tree, without the network."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}('dist')"
    subprocess.run([sys.executable, "-P", "-c", code], cwd=tree, capture_output=True, check=True)
    (archive,) = (tree / "dist").iterdir()
    return archive


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the wheel that is made from the sdist that is made from the checkout."""
    checkout = tmp_path_factory.mktemp("checkout") / "tree"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "runs")
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=ignored)
    unpacked, site = tmp_path_factory.mktemp("sdist"), tmp_path_factory.mktemp("site")
    with tarfile.open(built("sdist", checkout)) as sdist:
        sdist.extractall(unpacked, filter="data")
    (tree,) = unpacked.iterdir()
    with zipfile.ZipFile(built("wheel", tree)) as wheel:
        wheel.extractall(site)
    return site


def test_the_wheel_holds_the_library_alone_and_runs(installed: Path) -> None:
    found = {path.relative_to(installed).as_posix() for path in installed.rglob("*.*")}
    packages = {package: package.replace(".", "/") for package in PACKAGE_DIRS}
    modules = {
        f"{packages[package]}/{path.name}"
        for package, folder in PACKAGE_DIRS.items()
        for path in (ROOT / folder).glob("*.py")
    }
    outside = {name for name in found if not name.startswith("fp8_dist-")}
    assert outside == modules | {"fp8_dist/py.typed", "fp8_dist/report/page.html"}
    (wheel,) = importlib.metadata.distributions(path=[str(installed)])
    assert (wheel.name, wheel.version) == ("fp8-dist", fp8_dist.__version__)
    assert [line for line in wheel.requires or () if "extra ==" not in line] == ["torch>=2.11"]
    extras = set(PROJECT["project"]["optional-dependencies"])
    assert set(wheel.metadata.get_all("Provides-Extra")) == extras
    assert wheel.metadata.get_all("License-File") == ["LICENSE"]
    # Outside of the checkout. Sub-packages are attributes, which are imported when they are used.
    (installed / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    lines = (
        "import sys, fp8_dist",
        "late = {'debug', 'doctor', 'report', 'tensor_parallel'}",
        "assert late <= set(dir(fp8_dist)) and 'fsdp' in dir(fp8_dist)",
        "assert not [n for n in late if f'fp8_dist.{n}' in sys.modules]",
        "print(fp8_dist.debug.comm_audit.__name__, fp8_dist.tensor_parallel.llama_tp_plan.__name__)",
        "print(hasattr(fp8_dist, 'debugger'), hasattr(fp8_dist.integrations, 'other'))",
        "fp8_dist.doctor.main([])",
        "from fp8_dist.report.__main__ import main; main(['.'])",
    )
    env = os.environ | {"PYTHONPATH": str(installed)}
    done = run("-P", "-c", "\n".join(lines), cwd=installed, env=env)
    assert done.returncode == 0, done.stderr
    attributes, others, version, *_, written = done.stdout.splitlines()
    assert (attributes, others) == ("comm_audit llama_tp_plan", "False False")
    assert version.startswith(f"fp8_dist {fp8_dist.__version__}, ")
    assert written == "written: report.html"


def test_the_changelog_has_the_version_or_is_ahead_of_it() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[(.+?)\](.*)$", text, re.MULTILINE)
    sections = [name for name, _ in headings]
    assert all(re.fullmatch(r" - \d{4}-\d\d-\d\d", date) for _, date in headings[1:])
    release = fp8_dist.__version__.partition(".dev")[0]
    assert sections[0] == "Unreleased"
    assert sections[1:2] == ([] if release != fp8_dist.__version__ else [release])
