"""The program in docs/tensor_parallel.md for plain local tensors prints what the page shows."""

import contextlib
import io
import re
from pathlib import Path

from documented import run_shown
from ranks import RankPools

PAGE = (Path(__file__).parents[2] / "docs/tensor_parallel.md").read_text()
SECTION = PAGE.partition("## Plain local tensors\n")[2]


def printed() -> str:
    (program,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    program = re.sub(r"^dist.init_process_group.*\n", "", program, flags=re.MULTILINE)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        run_shown(program, {"__name__": "local_tp"})
    return output.getvalue()


def test_the_program_prints_what_the_page_shows(ranks: RankPools) -> None:
    first, *others = ranks(4).run(printed)
    (shown,) = re.findall(r"```\n(op .*?)```", SECTION, re.DOTALL)
    assert first == shown
    assert others == [""] * 3
