"""Roll-outs at the hub: store what lines report, answer what they should have, carry out what the policy decides.

No thread runs here: each report of a line advances the roll-outs of its releases, in one transaction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any, Self

from fastapi import APIRouter, Depends, HTTPException
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, model_validator
from sqlalchemy import Connection, Row, func, insert, select, text, update
from sqlalchemy.dialects.postgresql import insert as upsert

from daemon.consumers.plant.tables import events, line_releases, rollouts
from daemon.plant.hub import Hub, json_body, line_of
from daemon.plant.releases import require_administrator, require_reader
from daemon.plant.settings import LineName
from daemon.policy import rollout as policy
from daemon.registry.manifest import Number, ReleaseName, decode
from daemon.registry.store import Store

#: A running roll-out counts its figures and decides this often at most.
_DECIDE_EVERY = timedelta(seconds=2)
#: Figures count this many of the newest images.
_MAX_IMAGES = 20_000
_BEFORE = timedelta(days=30)
_PLAN = TypeAdapter(policy.Plan)
_Text = Annotated[str, StringConstraints(max_length=500, pattern=r"^[^\x00]*$")]
_EARLIEST, _LATEST = datetime(2000, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)
_Count = Annotated[int, Field(ge=0, lt=2**31)]
_ShareLimit = Annotated[float, Field(ge=0, le=1)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ReleaseState(_Message):
    """A release in force, since when, the number that the line `refused` and why, or what it waits for.

    Of the answers that were `compared` with those of the versions before, `agreed` were the same; None if the release
    replaced no version.
    """

    number: Number
    since: Annotated[AwareDatetime, Field(ge=_EARLIEST, le=_LATEST)]
    refused: Number | None = None
    problem: _Text | None = None
    waits: _Text | None = None
    compared: _Count | None = None
    agreed: _Count | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if (self.compared is None) != (self.agreed is None) or (self.agreed or 0) > (self.compared or 0):
            raise ValueError("`agreed` must come with `compared` and be at most as large")
        return self


class Report(_Message):
    in_force: Annotated[dict[ReleaseName, ReleaseState], Field(max_length=100)]


class Start(_Message):
    """A roll-out as a person asks for it; the fields from `images` on are those of `Conditions`."""

    name: ReleaseName
    number: Number
    canary: LineName
    by: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    images: Annotated[int, Field(ge=1, le=_MAX_IMAGES)]
    escapes: _ShareLimit | None = None
    false_calls: _ShareLimit | None = None
    fail_change: _ShareLimit | None = None
    p95_ratio: Annotated[float, Field(gt=0, le=1000)] | None = None
    agreement: _ShareLimit | None = None


def rollout_router(hub: Hub) -> APIRouter:
    """Return the routes where people start and stop roll-outs, and lines report and ask."""
    router, store = APIRouter(), Store(hub.settings.releases)

    @router.get("/rollouts", dependencies=[Depends(partial(require_reader, hub))])
    def list_rollouts() -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        with hub.engine.connect() as connection:
            newest = select(rollouts).order_by(rollouts.c.rollout_id.desc()).limit(100)
            rows = [dict(row) for row in connection.execute(newest).mappings()]
            lines = [dict(row) for row in connection.execute(select(line_releases)).mappings()]
        return {"rollouts": rows, "lines": lines}

    change = [Depends(partial(require_administrator, hub))]

    @router.post("/rollouts", status_code=201, dependencies=change)
    def start_rollout(start: Annotated[Start, Depends(json_body(Start))]) -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        with hub.engine.begin() as connection:
            plan = _plan(connection, store, start)
            values = {"name": start.name, "number": start.number, "started_by": start.by, "plan": asdict(plan)}
            new = upsert(rollouts).values(values).on_conflict_do_nothing().returning(rollouts.c.rollout_id)
            key = connection.execute(new).scalar()
            if key is None:
                raise HTTPException(409, f"a roll-out of {start.name} is running already: stop it, or wait for its end")
            _add_event(connection, f"{start.name}/{start.number}: {start.by} rolls it out, first to {start.canary}")
        return {"rollout_id": key, "steps": plan.steps}

    @router.post("/rollouts/{name}/stop", dependencies=change)
    def stop_rollout(name: str, by: str = "an unknown user", give_up: bool = False) -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        with hub.engine.begin() as connection:
            row = _running(connection, [name])
            if not row:
                raise HTTPException(
                    409, f"no roll-out of {name[:64]} is running: coserve plant rollout status lists them"
                )
            if give_up:
                ended = {"state": "given_up", "ended_at": func.now(), "reason": f"given up by {by[:128]}"}
                connection.execute(update(rollouts).where(rollouts.c.rollout_id == row[0].rollout_id).values(ended))
            elif row[0].direction == "forward":
                now = _now(connection)
                _store(connection, row[0], _progress(row[0]).back(f"stopped by {by[:128]}", now.timestamp()), now)
        return {"rollout_id": row[0].rollout_id}

    @router.post("/line-releases")
    def report(  # pyright: ignore[reportUnusedFunction]
        line: Annotated[str, Depends(partial(line_of, hub))], report: Annotated[Report, Depends(json_body(Report))]
    ) -> dict[str, Any]:
        with hub.engine.begin() as connection:
            _store_report(connection, line, report)
            wanted, compare = _wishes(connection, line, report)
        return {"wanted": wanted, "compare": compare, "revoked": store.revoked()}

    return router


def _plan(connection: Connection, store: Store, start: Start) -> policy.Plan:
    """Return the plan of a roll-out that can go back on every line. Raises ReleaseError, NoPlanError."""
    manifest = decode(store.manifest(start.name, start.number).data, f"{start.name}/{start.number}")
    query = select(line_releases.c.line, line_releases.c.number).where(line_releases.c.name == start.name)
    present = {row.line: row.number for row in connection.execute(query.order_by(line_releases.c.line))}
    conditions = policy.Conditions(**start.model_dump(include={field.name for field in fields(policy.Conditions)}))
    return policy.plan_rollout(start.number, manifest.back_to, start.canary, present, conditions)


def _wishes(connection: Connection, line: str, report: Report) -> tuple[dict[str, int], list[str]]:
    """Return what a line should have now, and of which of these it should compare answers with the versions before."""
    wanted: dict[str, int] = {}
    compare: list[str] = []
    for row in _running(connection, sorted(report.in_force)):
        plan = _PLAN.validate_python(row.plan)
        progress = _advance(connection, row, plan)
        if line in (numbers := policy.wanted_numbers(plan, progress)):
            wanted[row.name] = numbers[line]
        if policy.must_compare(plan, progress, line, report.in_force[row.name].number):
            compare.append(row.name)
    return wanted, compare


def _progress(row: Row[Any]) -> policy.Progress:
    return policy.Progress(row.step, row.since.timestamp(), row.direction, row.reason, row.waits)


def _running(connection: Connection, names: Sequence[str]) -> Sequence[Row[Any]]:
    """Return the running roll-outs of these names, locked until the transaction ends."""
    query = select(rollouts).where(rollouts.c.state == "running", rollouts.c.name.in_(names))
    return connection.execute(query.order_by(rollouts.c.rollout_id).with_for_update()).all()


def _now(connection: Connection) -> datetime:
    return connection.execute(select(func.clock_timestamp())).scalar_one()


def _store_report(connection: Connection, line: str, report: Report) -> None:
    for name, state in report.in_force.items():
        values = state.model_dump()
        row = upsert(line_releases).values(line=line, name=name, **values)
        newer = {**values, "reported_at": func.now()}
        connection.execute(row.on_conflict_do_update(index_elements=["line", "name"], set_=newer))


def _advance(connection: Connection, row: Row[Any], plan: policy.Plan) -> policy.Progress:
    """Carry out the policy's next action, if it is time to decide again; return how far the roll-out is."""
    now, progress = _now(connection), _progress(row)
    if row.looked_at is not None and now - row.looked_at < _DECIDE_EVERY:
        return progress
    lines = select(line_releases).where(line_releases.c.name == row.name, line_releases.c.line.in_(plan.before))
    reports: dict[str, policy.LineReport] = {}
    for line in connection.execute(lines):
        has_it = line.number == plan.number and progress.direction == "forward"
        figures = _figures(connection, line) if has_it else ()
        problem = line.problem if line.refused == plan.number else None
        # A pull takes minutes, and the line reports again only afterwards.
        may_be_taking = progress.direction == "back" and row.started_at <= line.reported_at <= row.since
        reports[line.line] = policy.LineReport(line.number, problem, *figures, may_be_taking=may_be_taking)
    after = policy.decide(plan, progress, reports, now.timestamp())
    _store(connection, row, after, now)
    return after


def _store(connection: Connection, row: Row[Any], after: policy.Progress, now: datetime) -> None:
    """Store how far a roll-out is, and an event if it went on."""
    values = asdict(after) | {"since": datetime.fromtimestamp(after.since_s, UTC), "looked_at": now}
    del values["since_s"]
    words = None
    if after.state != "running":
        values["ended_at"] = now
        words = "is on all lines" if after.state == "all_new" else "all lines have what they had"
    elif after.direction != row.direction:
        words = f"goes back on every line: {after.reason}"
    elif after.step != row.step:
        words = f"step {after.step + 1} begins"
    if words is not None:
        _add_event(connection, f"{row.name}/{row.number}: {words}")
    connection.execute(update(rollouts).where(rollouts.c.rollout_id == row.rollout_id).values(values))


def _add_event(connection: Connection, sentence: str) -> None:
    connection.execute(insert(events).values(kind="rollout", text=sentence))


_JUDGED = text(
    "SELECT count(*) AS images, count(*) FILTER (WHERE verdict <> 'pass') AS failed,"
    " percentile_cont(0.95) WITHIN GROUP (ORDER BY latency_ms) AS p95_ms"
    " FROM (SELECT verdict, latency_ms FROM inspections WHERE line = :line AND at >= :begin AND at < :until"
    " ORDER BY at DESC LIMIT :most) AS newest"
)
_REVIEWED = text(
    "SELECT count(*) FILTER (WHERE by_line = 'pass') AS passes,"
    " count(*) FILTER (WHERE by_line = 'pass' AND verdict = 'fail') AS escapes,"
    " count(*) FILTER (WHERE by_line = 'fail') AS fails,"
    " count(*) FILTER (WHERE by_line = 'fail' AND verdict = 'pass') AS false_calls"
    " FROM (SELECT DISTINCT ON (r.epoch, r.inspection_id) r.verdict, i.verdict AS by_line FROM reviews r"
    " JOIN inspections i ON (i.line, i.epoch, i.inspection_id) = (r.line, r.epoch, r.inspection_id)"
    " WHERE r.line = :line AND r.at >= :begin AND i.at >= :begin AND i.at < :until"
    " ORDER BY r.epoch, r.inspection_id, r.seq DESC) AS newest"
)


def _figures(connection: Connection, has: Row[Any]) -> tuple[policy.Figures, policy.Figures]:
    """Return the figures of a line, a row of `line_releases`, since it has the release, and of the 30 days before."""
    since, agreed = has.since, None if has.compared is None else policy.Share(has.agreed, has.compared)
    windows = (since, datetime.max.replace(tzinfo=since.tzinfo)), (since - _BEFORE, since)
    figures: list[policy.Figures] = []
    for begin, until in windows:
        values: Mapping[str, Any] = {"line": has.line, "begin": begin, "until": until, "most": _MAX_IMAGES}
        judged = connection.execute(_JUDGED, values).one()
        reviewed = connection.execute(_REVIEWED, values).one()
        escapes = policy.Share(reviewed.escapes, reviewed.passes)
        false_calls = policy.Share(reviewed.false_calls, reviewed.fails)
        figures.append(policy.Figures(policy.Share(judged.failed, judged.images), escapes, false_calls, judged.p95_ms))
    return replace(figures[0], agreed=agreed), figures[1]
