"""Which mutants are run: the same number in each room, spread over its files and operators."""

from collections import Counter
from hashlib import sha256
from pathlib import Path

from tests.mutants.fault import Mutant
from tests.mutants.operators import mutants

SHARES = {
    "suite": 6,
    "suite/pipeline/model": 6,
    "suite/pipeline/planning": 4,
    "suite/pipeline/runtime": 6,
    "suite/pipeline/schedule": 6,
    "suite/training": 6,
    "suite/training/checkpoint": 6,
    "suite/data": 6,
    "launch/backends": 6,
    "launch/inference": 6,
    "launch/supervision": 6,
}
"""Rooms, with their shares of the mutants. ``suite`` is its files that are in no folder: settings, paths, errors."""

SEED = 1

TOP = ("suite", "models", "experiments", "launch")


def room_of(file: str) -> str:
    """Returns the room of a file: the deepest folder of ``SHARES`` around it, otherwise its folder."""
    folder = file.rpartition("/")[0]
    around = [room for room in SHARES if folder == room or (room != "suite" and folder.startswith(f"{room}/"))]
    return max(around, key=len, default=folder)


def all_mutants(root: Path, top: tuple[str, ...] = TOP) -> list[Mutant]:
    """Returns what could be changed in all files below the folders ``top``."""
    files = [path for folder in top for path in sorted((root / folder).rglob("*.py"))]
    return [mutant for path in files for mutant in mutants(path.read_bytes(), path.relative_to(root).as_posix())]


def choose(candidates: list[Mutant], number: int, seed: int = SEED) -> list[Mutant]:
    """Returns about ``number`` mutants. A room with few candidates gives them all."""
    by_room: dict[str, list[Mutant]] = {room: [] for room in SHARES}
    for mutant in candidates:
        if (room := room_of(mutant.file)) in by_room:
            by_room[room].append(mutant)
    total = sum(SHARES.values())
    return [
        mutant
        for room, several in by_room.items()
        for mutant in _spread(several, round(number * SHARES[room] / total), seed)
    ]


def _spread(candidates: list[Mutant], number: int, seed: int) -> list[Mutant]:
    """Takes from the file with the fewest taken, and there from the operator with the fewest in the room. Each place of
    the code is changed once."""
    rank = {mutant: sha256(f"{seed} {mutant.key}".encode()).digest() for mutant in candidates}
    left = sorted(candidates, key=rank.__getitem__)
    files, operators = Counter[str](), Counter[str]()
    taken: list[Mutant] = []
    while left and len(taken) < number:
        file = min((mutant.file for mutant in left), key=lambda name: (files[name], sha256(name.encode()).digest()))
        here = [mutant for mutant in left if mutant.file == file]
        chosen = min(here, key=lambda mutant: (operators[mutant.operator], rank[mutant]))
        taken.append(chosen)
        files[file] += 1
        operators[chosen.operator] += 1
        left = [mutant for mutant in left if not _overlap(mutant, chosen)]
    return taken


def _overlap(one: Mutant, other: Mutant) -> bool:
    return one.file == other.file and one.begin < other.end and other.begin < one.end


def find_again(old: Mutant, candidates: list[Mutant]) -> Mutant | None:
    """Returns the same change in later code: in the same function, otherwise in the only function of that name that has
    it. None when its code is gone."""
    same = [new for new in candidates if new[2:6] == old[2:6]]
    here = [new for new in same if new[:2] == old[:2]]
    elsewhere = [new for new in same if _last_name(new) == _last_name(old)]
    return here[0] if here else elsewhere[0] if len(elsewhere) == 1 else None


def _last_name(mutant: Mutant) -> str:
    return mutant.function.rpartition(".")[2]
