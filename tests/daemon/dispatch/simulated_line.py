"""A simulated line for tests of the drive: rules, a catalog, simulated devices, and the drive turned by hand."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from daemon.dispatch.chains import Judged
from daemon.dispatch.drive import Drive
from daemon.dispatch.pool import Fault, StoredImage
from daemon.dispatch.simulated import AnswerOf, SimulatedClock, SimulatedMemory, SimulatedPool
from daemon.dispatch.trace import Makeup
from daemon.line.serving import Serving
from daemon.policy.matrix import Performance
from daemon.policy.paper.assign import partition
from daemon.policy.predict import expert_facts
from daemon.policy.presets import Tuning, preset
from daemon.policy.request import RAM, ExecutorFacts, ExecutorId, PoolFacts, PoolId, Processor
from daemon.records import BatchDone, BoardRef, ExpertSwitch, Image, JournalKey, QueueSample, Verdict
from experts.spec import Answer, ArchitectureId, Detection, ExpertId, ExpertSpec, LayoutId, Task
from routing_rules.compile import compile_rules
from routing_rules.routes import GUARDS, Routes
from tests.daemon.dispatch.simulated_channels import SimulatedChannels
from tests.editions import a_served, a_serving

RULES = """
boards:
  main: {components: {A1: 10, A2: 10, B: 20, C: 5}}
classifiers:
  A*: {expert: "{component}", pass: [ok], review_below: 0.5, then: {ok: solder, odd: shape}, on_clear: review}
  "*": {expert: "{component}", pass: [ok], review_below: 0.5}
detectors:
  solder: {expert: yolo-solder, fail_on: {bridge: 0.4}}
  shape: {expert: yolo-shape, fail_on: {bent: 0.4}}
defects: {bridge: D207}
"""


def routes(text: str = RULES) -> Routes:
    return compile_rules(text)


def a_spec(name: str, weights_bytes: int = 10, sha256: str = "0" * 64, task: Task = "classify") -> ExpertSpec:
    classes = ("ok", "odd", "missing") if task == "classify" else ("bridge", "bent")
    return ExpertSpec(
        expert=ExpertId(name),
        architecture=ArchitectureId("resnet18"),
        task=task,
        file=Path(f"/nowhere/{name}.safetensors"),
        classes=classes,
        input_size=64,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        sha256=sha256,
        layout=LayoutId("resnet18"),
        weights_bytes=weights_bytes,
    )


def a_catalog(*names: str, weights_bytes: int = 10) -> dict[ExpertId, ExpertSpec]:
    names = names or ("A1", "A2", "B", "C", "yolo-solder", "yolo-shape")
    specs = [a_spec(name, weights_bytes, task="detect" if name.startswith("yolo") else "classify") for name in names]
    return {spec.expert: spec for spec in specs}


def on_backbone(catalog: Mapping[ExpertId, ExpertSpec], backbone: str, *names: str) -> dict[ExpertId, ExpertSpec]:
    """Return the catalog with some of its experts as heads of a backbone."""
    resident = replace(a_spec(backbone, weights_bytes=10, sha256=backbone[-1] * 64), classes=())
    heads = {
        ExpertId(name): replace(catalog[ExpertId(name)], weights_bytes=1, sha256="a" * 64, backbone=resident)
        for name in names
    }
    return {**catalog, **heads}


def an_image(
    number: int,
    component: str = "B",
    deadline_ms: int | None = None,
    accepted_s: float = 0.0,
    edition: int = 1,
) -> Image:
    return Image(
        inspection_id=number,
        source="cam",
        image_id=str(number),
        board=BoardRef("main", "S1"),
        component=component,
        designator=str(number),
        accepted_s=accepted_s,
        deadline_ms=deadline_ms,
        edition=edition,
        key=JournalKey(1, number, 10),
    )


def a_mix(count: int, first: int = 0, **fields: Any) -> list[Image]:
    """Return images of four component types in turn, numbered from `first`."""
    return [an_image(number, ["A1", "A2", "B", "C"][number % 4], **fields) for number in range(first, first + count)]


def says(labels: Mapping[int, str] | None = None, otherwise: str = "ok") -> AnswerOf:
    """Answer by image number: classifiers give the label, detectors a box of it (nothing for "ok")."""

    def answer(spec: ExpertSpec, image: StoredImage) -> Answer | Fault:
        label = (labels or {}).get(image.key.offset, otherwise)
        if label in ("bad_image", "expert_failed"):
            return Fault(label, "as the test says")
        if spec.task == "classify":
            return Answer(label if label in spec.classes else "ok", 0.9)
        boxes = (Detection(label, 0.9, (1.0, 1.0, 5.0, 5.0)),) if label in spec.classes else ()
        return Answer(boxes[0].label if boxes else None, 0.9 if boxes else None, boxes)

    return answer


@dataclass
class Line:
    """A drive over simulated devices, which hears its reports. `run` turns it until nothing happens any more."""

    drive: Drive
    clock: SimulatedClock
    pools: dict[PoolId, SimulatedPool]
    serving: Serving
    reported: list[Verdict] = field(default_factory=list)
    switches: list[ExpertSwitch] = field(default_factory=list)
    bad_images: list[tuple[Image, str]] = field(default_factory=list)
    outcomes: dict[int, Verdict] = field(default_factory=dict)
    ended_s: dict[int, float] = field(default_factory=dict)
    until_s: float | None = None
    ended_editions: list[int] = field(default_factory=list)

    def turn(self) -> None:
        self.until_s = self.drive.turn()
        for pool in self.pools.values():
            assert pool.memory.used_bytes <= pool.memory.budget_bytes
        for outcome in self.reported:
            assert outcome.image.inspection_id not in self.outcomes, "an image ended twice"
            self.outcomes[outcome.image.inspection_id] = outcome
            self.ended_s[outcome.image.inspection_id] = self.clock.now()
        self.reported.clear()

    def run(self, until_s: float | None = None) -> None:
        self.turn()
        turns = 0
        while until_s is None or self.clock.now() < until_s:
            turns += 1
            assert turns < 20_000, "the line goes round in circles"
            limits = [limit for limit in (self.until_s, until_s) if limit is not None]
            if not self.clock.step(min(limits, default=None)):
                return
            self.turn()

    def accept(self, *images: Image) -> None:
        self.drive.accept(images)

    def put_in_force(self, catalog: Mapping[ExpertId, ExpertSpec], rules: Routes | None = None) -> int:
        """Let images of another edition, whose number is returned, be accepted from now on."""
        served = a_served(rules or self.serving.current.routes, catalog, self.serving.current.number + 1)
        self.drive.take_editions_later(served)
        self.turn()
        self.serving.put_in_force(served, self.clock.now())
        return served.number

    def end_editions(self, numbers: list[int]) -> None:
        self.drive._call(lambda: self.drive._end_editions(numbers))
        self.turn()

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Send a control message; return its answer or raise ControlError."""
        answer: Future[dict[str, Any]] = self.drive.ask_later(kind, fields)
        self.turn()
        return answer.result(0)

    def reasons(self) -> dict[int, str | None]:
        """Return the reason of each image that ended, in the order of their numbers."""
        return {number: self.outcomes[number].reason for number in sorted(self.outcomes)}

    def judged(self, answers: list[Judged]) -> None: ...

    def finished(self, verdicts: list[Verdict]) -> None:
        self.reported += verdicts

    def bad_image(self, image: Image, reason: str) -> None:
        self.bad_images.append((image, reason))

    def switched(self, switch: ExpertSwitch) -> None:
        self.switches.append(switch)

    def batch_done(self, batch: BatchDone) -> None: ...

    def sampled(self, sample: QueueSample) -> None: ...

    def editions_ended(self, numbers: list[int]) -> None:
        self.ended_editions += numbers


def a_line(
    *,
    catalog: Mapping[ExpertId, ExpertSpec] | None = None,
    budgets: Mapping[str, int] | None = None,
    executors: Sequence[str] = ("cpu",),
    policy: str = "coserve-plus",
    answer: AnswerOf | None = None,
    load_s: float = 0.1,
    tuning: Tuning | None = None,
    record: Path | None = None,
    rules: Routes | None = None,
    max_batch: int = 4,
    activation_bytes: int | None = None,
    matrix: Sequence[Performance] = (),
    usage: Mapping[str, float] | None = None,
    guards: Sequence[str] = GUARDS,
) -> Line:
    clock = SimulatedClock()
    budgets = budgets or {"cpu": 30}
    devices = [
        PoolFacts(PoolId(name), _processor(name), size, max_batch, activation_bytes, "pc2" if name[:3] == "pc2" else "")
        for name, size in budgets.items()
    ]
    streams = [ExecutorFacts(ExecutorId(f"{pool}/{n}"), PoolId(pool)) for n, pool in enumerate(executors)]
    facts, used = partition(devices, streams, preset(policy))
    memories = {each.pool: SimulatedMemory(each.budget_bytes) for each in facts}
    channels = SimulatedChannels(clock, load_s, load_s / 10.0)
    pools = {
        name: SimulatedPool(name, memory, clock, channels.route, answer or says(), sources=memories)
        for name, memory in memories.items()
    }
    catalog = a_catalog() if catalog is None else catalog
    serving = a_serving(rules or routes(), catalog)
    drive = Drive(
        Makeup(
            expert_facts(catalog.values(), serving.current.routes, usage or {}),
            facts,
            used,
            policy,
            tuning or Tuning(),
            tuple(matrix),
        ),
        serving,
        pools.values(),
        usage=usage,
        record=record,
        guards=guards,
        clock=clock.now,
        wall=lambda: 1000.0 + clock.now(),
    )
    line = Line(drive, clock, pools, serving)
    drive.start_devices(line)
    return line


def _processor(device: str) -> Processor:
    if device == RAM:
        return "ram"
    return "cpu" if device == "cpu" else "gpu"


def reports_to(**listeners: Callable[[Any], None]) -> Any:
    """Return an observer of the drive that hears only the reports named."""
    kinds = ("judged", "finished", "switched", "bad_image", "batch_done", "sampled")
    return SimpleNamespace(**{kind: listeners.get(kind, lambda *_: None) for kind in kinds})
