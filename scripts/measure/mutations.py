"""Small faults planted in the library, one at a time: does a test notice each?

python -m scripts.measure.mutations               all of them: about half a minute each
python -m scripts.measure.mutations --only fsdp   those with this text in their number or file
python -m scripts.measure.mutations --list        where they are, and the tests that find them

scripts/measure/faults.txt lists the faults, each with the test that must fail. They are planted in
copies of the checkout. The exit status is 1 if a fault survives or can no longer be planted, or if
a test is missing or fails without a fault.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import Queue
from typing import NamedTuple

from tqdm import tqdm

from scripts.common.markdown import table
from scripts.common.options import command_parser, positive

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).with_name("faults.txt")
FAILED, PASSED = 1, 0  # exit statuses of pytest
TIMEOUT_S = 900


class Fault(NamedTuple):
    """A small mistake that someone could make."""

    file: str  # relative to the root of the checkout
    what: str  # the mistake, in a few words
    before: str  # whole lines that occur once in the file
    after: str  # the lines that replace them
    test: str  # a pytest argument: a test, or several in one file, of which one must fail


def read_faults(text: str) -> list[Fault]:
    """Parse faults, which are separated by empty lines.

    A fault is a line `FILE: WHAT`, the lines of a patch, and a line with the test. Lines of the
    patch begin with "- " if they are removed, "+ " if they are added, and else with two spaces.
    """
    faults = []
    for entry in text.strip().split("\n\n"):
        first, *patch, test = entry.splitlines()
        file, what = first.split(": ", 1)
        before, after = (
            "".join(line[2:] + "\n" for line in patch if line[0] in (" ", sign)) for sign in "-+"
        )
        faults.append(Fault(file, what, before, after, test))
    return faults


def planted(source: str, fault: Fault) -> str:
    """Return the source of a file with the fault planted.

    Raises:
        ValueError: the lines to replace do not occur exactly once in the file.
    """
    changed, count = re.subn(
        f"^{re.escape(fault.before)}", lambda _: fault.after, source, flags=re.MULTILINE
    )
    if count != 1:
        raise ValueError(f"{fault.file}: {fault.before!r} stands there {count} times, not once")
    return changed


def problem(fault: Fault) -> str:
    """The reason why a fault can't be planted in this checkout; "" if it can."""
    try:
        planted((ROOT / fault.file).read_text(), fault)
    except (OSError, ValueError) as error:
        return f"{fault.what}: {error}"
    return ""


@contextmanager
def checkout() -> Iterator[Path]:
    """Copy all files of the checkout that git does not ignore to a temporary folder."""
    shown = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(shown, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    with tempfile.TemporaryDirectory(prefix="fp8_dist_fault_") as folder:
        for name in filter(None, names.split("\0")):
            if (ROOT / name).exists():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, Path(folder) / name, follow_symlinks=False)
        yield Path(folder)


def run_tests(folder: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run some tests of a checkout; return pytest's exit status and the end of its output."""
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return -1, f"no end within {TIMEOUT_S} s"
    return done.returncode, done.stdout[-2000:] + done.stderr[-500:]


def verdict_of(fault: Fault, folder: Path) -> tuple[str, str]:
    """Plant a fault and run its test: "caught", or another verdict and the output of pytest."""
    path = folder / fault.file
    source = path.read_text()
    path.write_text(planted(source, fault))
    try:
        status, output = run_tests(folder, [fault.test])
    finally:
        path.write_text(source)
    if status == PASSED:
        return "SURVIVED", output
    return ("caught", "") if status == FAILED else (f"NOT TRIED (pytest: {status})", output)


def main(argv: list[str] | None = None) -> int:
    parser = command_parser("scripts.measure.mutations", __doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="faults with it in their name")
    parser.add_argument("--list", action="store_true", help="print the faults, plant none")
    parser.add_argument("--jobs", type=positive, default=2, help="at a time; %(default)s")
    args = parser.parse_args(argv)
    chosen = [(f"{i} {f.file}", f) for i, f in enumerate(read_faults(FAULTS.read_text()), 1)]
    chosen = [(name, fault) for name, fault in chosen if args.only in name]
    if not chosen:
        parser.error(f"no fault has {args.only!r} in its name")
    if args.list:
        print(table(("fault", "what", "test"), [(n, f.what, f.test) for n, f in chosen]))
    if stale := list(filter(None, (problem(fault) for _, fault in chosen))):
        print("\n".join(stale))
        return 1
    if args.list:
        return 0
    progress = tqdm(total=1 + len(chosen), unit="run")
    with ExitStack() as stack:
        folders: Queue[Path] = Queue()
        for _ in range(args.jobs):
            folders.put(stack.enter_context(checkout()))
        tests = sorted({fault.test for _, fault in chosen})
        status, output = run_tests(folders.queue[0], tests)
        progress.update()
        if status != PASSED:
            print(f"{output}\n\nthese tests fail without a fault, or are not there")
            return 1

        def run(named: tuple[str, Fault]) -> tuple[str, ...]:
            folder, start = folders.get(), time.monotonic()
            try:
                verdict, output = verdict_of(named[1], folder)
            finally:
                folders.put(folder)
            progress.update()
            if verdict != "caught":
                progress.write(f"{named[0]}: {verdict}\n{output}")
            seconds = f"{time.monotonic() - start:.0f}"
            return named[0], named[1].what, named[1].test, verdict, seconds

        with ThreadPoolExecutor(args.jobs) as pool:
            rows = list(pool.map(run, chosen))
    progress.close()
    bad = sum(row[3] != "caught" for row in rows)
    print(table(("fault", "what", "test", "verdict", "s"), rows, "llllr"))
    print(f"\n{len(chosen) - bad} of {len(chosen)} faults were caught")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
