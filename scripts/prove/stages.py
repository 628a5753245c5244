"""The stages of `scripts.prove`, in their order. (For parsers, so nothing here imports torch.)"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stage:
    """A process on each rank that runs cases.

    Attributes:
        name: the name in the results.
        seconds: the time for all cases; for "bits", besides `checks.seconds_of_bits`.
        run: `MODULE:FUNCTION` of `scripts.prove`, called with a `Worker` and a `Place`.
        patience: the seconds that one case may take.
        alone: whether it runs on rank 0 alone; otherwise in a process group of all ranks.
        environment: variables of its processes.
        where: where it runs unless `--only` says: "always", on "GPUs", on "one GPU", or "" (never).
    """

    name: str
    seconds: float
    run: str
    patience: float = 60.0
    alone: bool = False
    where: str = "GPUs"
    environment: dict[str, str] = field(default_factory=dict)


NO_NVLS = {"NCCL_NVLS_ENABLE": "0"}  # sums in switches differ between groups (nccl#1497, #2360)

CHECKS = ("bits", "bytes", "tests")  # their cases decide the exit status
STAGES = {
    stage.name: stage
    for stage in (
        Stage("facts", 60, "checks:facts", where="always"),
        Stage("bits", 100, "checks:bits", 150, where="always", environment=NO_NVLS),
        Stage("bytes", 90, "checks:bytes_of_steps", 150, where="always"),
        Stage("loss", 90, "training:loss", where="always"),
        Stage("time", 330, "speed:time"),
        Stage("tests", 200, "tests:run", 150, alone=True, where="one GPU"),
        Stage("experts", 22, "speed:experts", alone=True, where=""),
        Stage("curve", 540, "training:curve", 540, where=""),
    )
}
