"""`make faults`: the long run of the fault harness, episode after episode, and the account of it.

    python -m tests.faults.faults_long_run DIR [--seed N] [--jobs N]

Each episode is drawn from the seed and its name, in a folder of its own that stays if a promise was broken;
DIR/seed-N/summary.json is the account.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults.faults_rounds import FaultLine, Tally, kill_at_point, kill_at_random, points_of, refuse
from tests.faults.powercut import Unsynced
from tests.faults.shim import ShimError, build_shim
from tests.lines import make_experts

_CUTS: tuple[Unsynced | None, ...] = (None, "nothing", "garbage", "some")
_ROUNDS_PER_EPISODE = 10
#: Calls of a running daemon that its disk may refuse, and how. A write may also stop short, which is not an error.
_REFUSALS = (
    "sync@.journal$:eio",
    "sync@.journal$:enospc",
    "write@.journal$:enospc",
    "write@.journal$:eio:2+",
    "write@.journal$:short",
    "open@.journal$:enospc",
    "sync@/journal$:eio",
    "unlink@.journal$:eio",
    "truncate@.journal$:eio",
    "sync@/inspection.db-wal$:eio",
    "write@/inspection.db-wal$:enospc",
    "write@/inspection.db-wal$:eio:3+",
    "write@/inspection.db-wal$:short",
    "sync@/inspection.db$:eio",
    "write@/inspection.db$:enospc",
    "write@/images/:enospc",
    "sync@/images$:eio",
    "open@/images/:enospc",
)


class Episode(NamedTuple):
    """`rules`: what each round does, in the words of its kind."""

    name: str
    kind: str
    rules: tuple[str, ...]


def carry_out(episode: Episode, folder: Path, experts: Path, seed: int) -> Tally:
    place = folder / episode.name
    with FaultLine(place, experts, seed) as line:
        try:
            for number, rule in enumerate(episode.rules):
                _round(line, episode.kind, rule, number)
            line.finish()
        except Exception:  # noqa: BLE001  the other episodes go on, and this one is not forgotten
            line.tally.promises_broken.append(f"the episode ended early: {traceback.format_exc()}")
    line.tally.promises_broken = [f"{episode.name}: {text}" for text in line.tally.promises_broken]
    if not line.tally.promises_broken:
        shutil.rmtree(place)
    return line.tally


def _round(line: FaultLine, kind: str, rule: str, number: int) -> None:
    match kind:
        case "kills":
            kill_at_random(line)
        case "power-cuts":
            kill_at_random(line, unsynced=_CUTS[1 + number % 3])
        case "points" | "births":
            kill_at_point(line, rule, _CUTS[number % 4] if kind == "points" else line.rng.choice(_CUTS))
        case _:
            _refuse(line, rule)


def _refuse(line: FaultLine, rules: str) -> None:
    """Let the disk refuse calls, one kind after the other, then kill the daemon."""
    run = line.run()
    run.wait_ready()
    for rule in rules.split():
        refuse(line, run, rule, for_s=1.5)
    run.kill()
    line.end_of(run, "SIGKILL", line.rng.choice(_CUTS))


def plan(folder: Path, experts: Path, seed: int) -> Iterator[Episode]:
    for kind, episodes in (("kills", 10), ("power-cuts", 6)):
        for number in range(episodes):
            yield Episode(f"{kind}-{number}", kind, ("",) * _ROUNDS_PER_EPISODE)
    born, met = _dry_run(folder, experts, seed)
    yield from _points(met)
    yield from _births(born, random.Random(seed))
    for number in range(0, len(_REFUSALS), 3):
        for repeat in range(2):
            yield Episode(f"disk-{number}-{repeat}", "disk", (" ".join(_REFUSALS[number : number + 3]),) * 2)


def _points(met: Counter[str]) -> Iterator[Episode]:
    """Cut each point that a run comes to before and after, early, in the middle and late."""
    for number, point in enumerate(sorted(met)):
        times = met[point]
        # Not every run comes as far as the one that was counted.
        ordinals = sorted({1, 2, max(1, times // 4), max(1, times // 2)})
        rules = tuple(f"{point}:{kill}:{at}" for at in ordinals for kill in _kills(point))
        yield Episode(f"points-{number}", "points", rules)


def _births(born: Counter[str], rng: random.Random) -> Iterator[Episode]:
    """Cut a new line's first start at each point that it comes to: the first time, the last and one between."""
    for number, point in enumerate(sorted(point for point in born if not point.startswith("send"))):
        for at in sorted({1, born[point], rng.randint(1, born[point])}):
            yield Episode(f"births-{number}-{at}", "births", (f"{point}:{rng.choice(_kills(point))}:{at}",))


def _kills(point: str) -> tuple[str, ...]:
    return ("kill-before", "kill-after", *(("kill-short",) if point.startswith("write") else ()))


def _dry_run(folder: Path, experts: Path, seed: int) -> list[Counter[str]]:
    """Count how often a run comes to each point: until a first line is ready, and in a second run with traffic."""
    counts: list[Counter[str]] = []
    with FaultLine(folder / "dry-run", experts, seed, cameras=1) as line:
        for traffic_s in (0.0, 4.0):
            run = line.run()
            run.wait_ready()
            run.wait_end(traffic_s)
            run.kill()
            counts.append(points_of(run))
        line.finish()
    shutil.rmtree(folder / "dry-run")
    return counts


def summarize(done: Sequence[Tally], seed: int, took_s: float) -> dict[str, Any]:
    """Return one account of all episodes."""
    ends = sum((tally.ends for tally in done), Counter[str]())
    broken = [problem for tally in done for problem in tally.promises_broken]
    return {
        "seed": seed,
        "episodes": len(done),
        "rounds": sum(tally.rounds for tally in done),
        "rounds_killed": ends.total() - ends["stopped"],
        "power_cuts": sum(count for how, count in ends.items() if "power cut" in how),
        "faults_injected": sum((tally.faults for tally in done), Counter[str]()),
        "images_accepted": sum(tally.images_accepted for tally in done),
        "results_published": sum(tally.results_published for tally in done),
        "messages_resent": sum(tally.messages_resent for tally in done),
        "images_lost": sum("is lost" in problem or "bytes are gone" in problem for problem in broken),
        "images_doubled": sum("a second time" in problem or "repeats" in problem for problem in broken),
        "promises_broken": broken,
        "ends": ends,
        "took_s": round(took_s),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    try:
        build_shim()
    except ShimError as error:
        print(error, file=sys.stderr)
        return 2
    folder, began_s = options.dir.absolute() / f"seed-{options.seed}", time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    done: list[Tally] = []
    with (
        tempfile.TemporaryDirectory(dir=folder) as scratch,
        ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool,
    ):
        experts = Path(scratch)
        make_experts(experts)
        episodes = list(plan(folder, experts, options.seed))
        print(f"{len(episodes)} episodes, {sum(len(each.rules) for each in episodes)} rounds", flush=True)
        running = {pool.submit(carry_out, each, folder, experts, options.seed): each.name for each in episodes}
        for future in as_completed(running):
            done.append(tally := future.result())
            broken = f" BROKEN: {tally.promises_broken[0]}" if tally.promises_broken else ""
            what = f"{tally.rounds} rounds, {tally.images_accepted} images accepted"
            print(f"{running[future]}: {what}{broken}", flush=True)
    summary = json.dumps(summarize(done, options.seed, time.monotonic() - began_s), indent=2)
    (folder / "summary.json").write_text(summary + "\n", encoding="utf-8")
    print(summary)
    return 1 if any(tally.promises_broken for tally in done) else 0


if __name__ == "__main__":
    sys.exit(main())
