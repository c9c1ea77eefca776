"""`coserve experts …`: who is resident, which experts and versions there are, another version in and out of force."""

from pathlib import Path
from typing import Annotated, Any

import typer

from daemon.units import size_text
from tools.cli.console import DEFAULT_CONFIG, AsJson, ConfigOption, as_typed, console, fail, print_json
from tools.experts.tables import table_of

experts_app = typer.Typer()

Name = Annotated[str, typer.Argument(metavar="NAME", help="The expert's id in the catalog.", show_default=False)]
Names = Annotated[list[str] | None, typer.Argument(metavar="[NAME]…", help="Only these; all without.")]


def register(app: typer.Typer) -> None:
    """Add the group to `app`."""
    app.add_typer(experts_app, name="experts")


@experts_app.callback(invoke_without_command=True)
def experts(context: typer.Context, config: ConfigOption = DEFAULT_CONFIG, as_json: AsJson = False) -> None:
    """Experts: where each is resident; versions, what became of their answers; another version in and out of force.

    Without a sub-command the daemon is asked: residency, pins, demand and usage probability of every expert. The
    sub-commands read the line's files, and need no daemon.

    Example: coserve experts --config demo/coserve.yaml
    """
    if context.invoked_subcommand is not None:
        return
    from tools.cli.line import residency

    residency(config, as_json=as_json)


@experts_app.command("list")
def list_experts(config: ConfigOption = DEFAULT_CONFIG, as_json: AsJson = False) -> None:
    """Every expert of the catalog: architecture, classes, version in force, others kept, verdicts given.

    Example: coserve experts list --config demo/coserve.yaml
    """
    from tools.experts.line import open_line
    from tools.experts.look import listed
    from tools.query.table import print_rows

    rows = listed(open_line(config))
    if as_json:
        print_json(rows)
        return
    cells = [
        (
            row["expert"],
            row["version"] or "none in force",
            row["architecture"],
            row["verdicts"],
            len(row["kept"]) or None,
            len(row["classes"]),
            f"{row['bytes'] / 1e6:.1f}" if row["bytes"] is not None else "unreadable",
            (row["first_used_at"] or "")[:10] or None,
        )
        for row in rows
    ]
    columns = ("expert", "version", "network", "verdicts", "kept", "labels", "MB", "used since")
    print_rows("Experts of the catalog", columns, cells, all_columns=False, more="--json has them")


@experts_app.command("show")
def show(name: Name, config: ConfigOption = DEFAULT_CONFIG, as_json: AsJson = False) -> None:
    """Everything of one expert: its versions and who changed them, rules, false calls and escapes, drift, residency.

    Example: coserve experts show R0402 --config demo/coserve.yaml
    """
    from tools.experts.line import open_line
    from tools.experts.look import shown

    line = open_line(config)
    experts = line.experts()
    if name not in experts:
        fail(f"there is no expert {name}; there are {', '.join(experts)}", status=1)
    found = shown(line, experts[name])
    if as_json:
        print_json(found)
    else:
        _print_shown(found)


@experts_app.command("verify")
def verify(
    names: Names = None,
    config: ConfigOption = DEFAULT_CONFIG,
    forward: Annotated[bool, typer.Option("--forward", help="Also run two images through each.")] = False,
    as_json: AsJson = False,
) -> None:
    """Load the weights of every version and compare them with their entries: header, shapes, sha256, finite numbers.

    Exit status 1 where one differs; it is named with its file and with what differs.

    Example: coserve experts verify --forward --config demo/coserve.yaml
    """
    from tools.experts.line import open_line
    from tools.experts.verify import entry_problems

    line = open_line(config)
    experts = line.experts()
    for name in names or ():
        if name not in experts:
            fail(f"there is no expert {name}; there are {', '.join(experts)}", status=1)
    rows: list[dict[str, Any]] = []
    for expert in (experts[name] for name in names or experts):
        entries = {version: kept.entry for version, kept in expert.kept.items()}
        entries |= {expert.version: expert.in_force} if expert.in_force is not None and expert.version else {}
        for version, entry in entries.items():
            problems = entry_problems(expert.name, entry, line.versions.folder, forward=forward)
            row = {"expert": expert.name, "version": version, "in_force": version == expert.version}
            rows.append(row | {"file": str(line.versions.folder / entry.file), "problems": problems})
    bad = [row for row in rows if row["problems"]]
    if as_json:
        print_json({"ok": not bad, "versions": rows})
    else:
        for row in bad:
            for problem in row["problems"]:
                console.print(f"{row['expert']} {row['version']}: {problem}", markup=False)
        if not bad:
            console.print(f"{len(rows)} versions of {len(names or experts)} experts are what the catalog says")
    raise SystemExit(1 if bad else 0)


@experts_app.command("put")
def put(
    name: Name,
    source: Annotated[
        Path, typer.Argument(metavar="FROM", help="A folder as train and import write it, or a weights file of one.")
    ],
    config: ConfigOption = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Check another version of an expert completely, and keep it beside the present one as a candidate.

    What is in force does not change: see what it would change with `coserve rejudge`, then `coserve experts promote`.
    Exit status 1 where it is refused, with the reason.

    Example: coserve experts put R0402 /tmp/new --config demo/coserve.yaml
    """
    from experts.versions import VersionsError
    from tools.experts import change
    from tools.experts.line import open_line

    try:
        version, note = change.put(open_line(config), name, source)
    except VersionsError as error:
        fail(str(error), status=1)
    if as_json:
        print_json({"expert": name, "version": version, "note": note})
        return
    console.print(f"{name} {version} is kept as a candidate{f' ({note})' if note else ''}", markup=False)
    console.print(f"next: {as_typed(f'rejudge {config} --expert {name}={version}')}", markup=False)
    console.print(f"then: {as_typed(f'experts promote {name} {version} --config {config}')}", markup=False)


Version = Annotated[str, typer.Argument(metavar="VERSION", help="Its 12 letters, or the first four or more.")]


@experts_app.command("promote")
def promote(name: Name, version: Version, config: ConfigOption = DEFAULT_CONFIG, as_json: AsJson = False) -> None:
    """Put a version that is kept in force: in the catalog at once and whole, and in a daemon that runs.

    Images under way end with the version that they began a step with or with the new one, and name which. Exit status
    1 where it is refused (then nothing has changed), or where a daemon runs and could not be told.

    Example: coserve experts promote R0402 5c1e --config demo/coserve.yaml
    """
    _switch(config, name, version, as_json=as_json)


@experts_app.command("rollback")
def rollback(name: Name, config: ConfigOption = DEFAULT_CONFIG, as_json: AsJson = False) -> None:
    """Put the version that was in force before back in force; again goes further back.

    Example: coserve experts rollback R0402 --config demo/coserve.yaml
    """
    _switch(config, name, None, as_json=as_json)


@experts_app.command("prune")
def prune(
    names: Names = None,
    config: ConfigOption = DEFAULT_CONFIG,
    keep: Annotated[int, typer.Option(min=1, help="Versions to go back to that stay.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Delete weights of versions that were in force once and that nobody goes back to any more.

    What is in force stays, what a running daemon serves, the newest --keep before it, and candidates.

    Example: coserve experts prune R0402 --keep 1 --config demo/coserve.yaml
    """
    from experts.versions import VersionsError
    from tools.experts.change import prunable
    from tools.experts.line import open_line

    line = open_line(config)
    pruned: list[dict[str, Any]] = []
    try:
        with line.versions.changing() as change:
            for name in names or list(change.experts):
                for version in prunable(line, change.expert(name), keep):
                    freed = change.prune(name, version)
                    pruned.append({"expert": name, "version": version, "freed_bytes": freed})
    except VersionsError as error:
        fail(str(error), status=1)
    if as_json:
        print_json(pruned)
    elif not pruned:
        console.print("nothing to prune")
    else:
        rows = [(row["expert"], row["version"], size_text(row["freed_bytes"])) for row in pruned]
        table_of("Pruned", ("expert", "version", "freed"), rows)


@experts_app.command("measure")
def measure(
    name: Name,
    images: Annotated[Path, typer.Argument(metavar="IMAGES", help="A folder of images that it was not trained on.")],
    config: ConfigOption = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Write into the catalog how sure the version in force is of IMAGES: what `show` compares recent answers with.

    Training writes it by itself; this is for experts that were imported, or trained by an earlier CoServe. Use a few
    hundred ordinary images of the line, of which you know that they are as they should be.

    Example: coserve experts measure R0402 images/R0402 --config demo/coserve.yaml
    """
    from experts.versions import VersionsError
    from tools.experts.line import open_line
    from tools.experts.measure import MeasureError, measure_in_force

    try:
        found = measure_in_force(open_line(config), name, images)
    except (VersionsError, MeasureError) as error:
        fail(str(error), status=1)
    if as_json:
        print_json(found)
        return
    rows = [(label, sum(counts), _spark(counts)) for label, counts in found["confidences"].items()]
    table_of(f"{name} {found['version']}: how sure it was", ("answered", "images", "confidence 0 … 1"), rows)


def _switch(config: Path, name: str, version: str | None, *, as_json: bool) -> None:
    from dataclasses import asdict

    from experts.versions import VersionsError
    from tools.experts.change import switch
    from tools.experts.line import open_line

    try:
        done = switch(open_line(config), name, version)
    except VersionsError as error:
        fail(str(error), status=1)
    if as_json:
        print_json(asdict(done))
    else:
        where = "in force, and served by the daemon" if done.heard else "in force in the catalog"
        console.print(f"{name} {done.version} is {where}; before: {done.before or 'none'}", markup=False)
        if done.lost_comments:
            console.print("the catalog was written anew: its form allows no edit, so its comments are gone")
        if done.note:
            console.print(done.note, markup=False)
    raise SystemExit(0 if done.is_well else 1)


def _print_shown(found: dict[str, Any]) -> None:
    entry = found["entry"]
    console.print(f"[bold]{found['expert']}[/bold], version {found['version'] or 'none'} in force")
    if entry:
        console.print(
            f"{entry['architecture']}, {entry['input_size']} pixels, classes {', '.join(entry['classes'])}",
            markup=False,
        )
    serving = found["serving"]
    if serving is None:
        console.print("residency: no daemon runs here, or it does not know this expert")
    else:
        where = ", ".join(serving["resident"]) or "nowhere now"
        console.print(
            f"the daemon serves {serving['version']}, resident {where}, {serving['queued']} queued", markup=False
        )
        if serving["version"] != found["version"]:
            console.print(f"it has not read the catalog since: {found['version']} waits for `coserve reload`")
        if serving["failed"]:
            console.print(f"it failed: {serving['failed']}", markup=False)
    columns = ("version", "state", "verdicts", "reviewed", "false calls", "escapes")
    keys = ("version", "state", "verdicts", "reviewed", "false_calls", "escapes")
    table_of("Versions", columns, [[row[key] for key in keys] for row in found["versions"]])
    table_of("What was done", ("at", "what", "version", "before", "by"), _told(found))
    uses = [
        (use["board_type"], ", ".join(use["components"]), f"{use['step']}: {use['name']}", use["judges"])
        for use in found["rules"]
    ]
    table_of("Rules that use it", ("board", "components", "step", "how"), uses)
    _print_drift(found["expert"], found["drift"])


def _told(found: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Who put what in and in force, and when each version gave its first verdict, oldest first."""
    steps = found["steps"] if len(found["steps"]) > 1 else []  # else somebody only looked
    rows = [(step["at"], step["did"], step["version"], step["before"], step["by"]) for step in steps]
    rows += [
        (row["first_used_at"], "first verdict", row["version"], None, None)
        for row in found["versions"]
        if row["first_used_at"] is not None
    ]
    return sorted(rows, key=lambda row: row[0][:19])


def _print_drift(name: str, drift: dict[str, Any] | None) -> None:
    if drift is None:
        console.print(
            f"drift: not known, the catalog has no confidences of it: {as_typed(f'experts measure {name} IMAGES')}",
            markup=False,
        )
        return
    said = f"{drift['grade']}, index {drift['value']:.3f} (by chance alone {drift['noise']:.3f})"
    if drift["grade"] == "too few":
        said = f"too few {drift['lacks']} to say"
    console.print(f"drift: {said}; {drift['answers']} recent answers against {drift['held_out']} images held out")
    if drift["lacks"] == "images held out":
        console.print(
            f"measure it on more ordinary images of the line: {as_typed(f'experts measure {name} IMAGES')}",
            markup=False,
        )
    labels = dict.fromkeys((*drift["training"], *drift["recent"]))
    rows = [
        (
            label,
            sum(drift["training"].get(label, ())),
            _spark(drift["training"].get(label, ())),
            sum(drift["recent"].get(label, ())),
            _spark(drift["recent"].get(label, ())),
        )
        for label in labels
    ]
    table_of("Confidence, 0 to 1", ("answered", "held out", "then", "recent", "now"), rows)


def _spark(counts: Any) -> str:
    """Counts as a row of bars of eight heights."""
    most = max(counts, default=0)
    return "".join(" ▁▂▃▄▅▆▇█"[0 if not n else 1 + (7 * n) // most] for n in counts) if most else ""
