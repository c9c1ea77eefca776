"""`coserve experts …`: where each is resident, its versions, and switching them; `coserve rejudge`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from daemon.config.plant_time import PlantTime
from daemon.units import count_text, size_text
from tools.cli.results import VerdictOption
from tools.terminal.console import (
    DEFAULT_CONFIG,
    AsJson,
    Bars,
    ConfigOption,
    ConfigPath,
    as_typed,
    console,
    errors,
    fail,
    need_folder,
    print_json,
    print_rows,
    print_table,
    say,
)
from tools.terminal.open_line import ask_daemon, plant_time, settings_of
from tools.terminal.option_values import Commands, Discard, Note, shift_option, since_option, time_window, until_option

if TYPE_CHECKING:
    from tools.experts.line import ExpertsLine

_LISTED = 20
#: More overflows when it is multiplied.
_MAX_COST = 1e12
experts_app = typer.Typer(cls=Commands)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The expert's id in the catalog.", show_default=False)]
Names = Annotated[list[str] | None, typer.Argument(metavar="[NAME]…", help="Only these; default: all.")]
Version = Annotated[
    str, typer.Argument(metavar="VERSION", help="Its name in `show`, or its first four letters or more.")
]
#: Versions stay on one line, so that they can be copied.
_VERSIONS = ("version", "before", "settings")


@experts_app.callback(invoke_without_command=True)
def experts(context: typer.Context, config: ConfigOption = DEFAULT_CONFIG, as_json: AsJson = False) -> None:
    """Experts: where each is resident, its versions and their verdicts, and switching versions.

    Without a sub-command the daemon is asked: residency, pins, demand and usage probability of every expert. The
    sub-commands read the line's files, and need no daemon.

    Example: coserve experts --config demo/coserve.yaml
    """
    if context.invoked_subcommand is not None:
        return
    rows = ask_daemon(settings_of(config), "experts")["experts"]
    columns = (
        *("expert", "architecture", ("MB", lambda row: f"{row['bytes'] / 1e6:,.1f}")),
        *(("usage", lambda row: f"{row['usage']:.3f}"), ("resident", _places), "queued", "failed"),
    )
    print_rows("Experts", rows if as_json else sorted(rows, key=lambda row: -row["usage"]), columns, as_json=as_json)


def _line(config: Path) -> "ExpertsLine":
    from tools.experts.line import open_line

    return open_line(config)


def _places(expert: Mapping[str, Any]) -> list[str]:
    pinned = [f"{device} (pinned)" if device in expert["pinned"] else device for device in expert["resident"]]
    return [*pinned, *(f"{device} (loading)" for device in expert["loading"])]


@experts_app.command("list")
def list_experts(config: ConfigOption = DEFAULT_CONFIG, as_json: AsJson = False) -> None:
    """Every expert of the catalog: architecture, classes, version in force, others kept, verdicts given.

    Example: coserve experts list --config demo/coserve.yaml
    """
    from tools.experts.look import list_experts as list_rows

    line = _line(config)
    rows, plant = list_rows(line), line.config.plant.clock()
    columns = (
        *("expert", ("version", lambda row: row["version"] or "none in force"), "settings", "network", "verdicts"),
        *(("kept", lambda row: len(row["kept"]) or None), ("labels", lambda row: len(row["classes"]))),
        ("MB", lambda row: f"{row['bytes'] / 1e6:.1f}" if row["bytes"] is not None else "unreadable"),
        ("used since", lambda row: plant_time(plant, row["first_used_at"], "date")),
    )
    more = "--json has them"
    print_rows("Experts of the catalog", rows, columns, as_json=as_json, unbroken=_VERSIONS, more=more)


@experts_app.command("show")
def show(name: Name, config: ConfigOption = DEFAULT_CONFIG, as_json: AsJson = False) -> None:
    """Everything of one expert: its versions and who changed them, rules, false calls and escapes, drift, residency.

    Example: coserve experts show R0402 --config demo/coserve.yaml
    """
    from tools.experts.look import describe_expert

    line = _line(config)
    facts = describe_expert(line, name)
    if as_json:
        print_json(facts)
    else:
        _print_facts(facts, line.config.plant.clock())


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
    from tools.experts.change import verify_versions

    rows = verify_versions(_line(config), names or (), forward=forward)
    bad = [row for row in rows if row["problems"]]
    versions, count = count_text(len(rows), "version"), len({row["expert"] for row in rows})
    sound = f"{versions} of {count_text(count, 'expert')} {'matches' if len(rows) == 1 else 'match'} the catalog"
    problems = [f"{row['expert']} {row['version']}: {problem}" for row in bad for problem in row["problems"]]
    say({"ok": not bad, "versions": rows}, "\n".join(problems) or sound, as_json=as_json)
    raise SystemExit(1 if bad else 0)


@experts_app.command("put")
def put(
    name: Name,
    source: Annotated[
        Path, typer.Argument(metavar="FROM", help="A folder as train and import write it, or a weights file of one.")
    ],
    config: ConfigOption = DEFAULT_CONFIG,
    note: Note = None,
    as_json: AsJson = False,
) -> None:
    """Check another version of an expert completely, and keep it beside the present one as a candidate.

    What is in force does not change: see what it would change with `coserve rejudge`, then `coserve experts promote`.
    Exit status 1 where it is refused, with the reason.

    Example: coserve experts put R0402 /tmp/new --config demo/coserve.yaml
    """
    from tools.experts import change

    line = _line(config)
    version = change.put(line, name, source, note)
    if as_json:
        print_json({"expert": name, "version": version})
        return
    if line.expert(name).version == version:  # the file in the store was damaged or gone
        console.print(f"{name} {version} is in force, and its weights are here again: {as_typed(f'reload {config}')}")
        return
    console.print(f"{name} {version} is kept as a candidate")
    console.print(f"next: {as_typed(f'rejudge --expert {name}={version} --config {config}')}")
    console.print(f"then: {as_typed(f'experts promote {name} {version} --config {config}')}")


@experts_app.command("shadow")
def shadow(
    name: Name,
    version: Annotated[str, typer.Argument(metavar="[VERSION]", help="The version; without it: compare.")] = "",
    images: Annotated[int, typer.Option(min=1, max=20_000, help="Images that it has to answer.")] = 1000,
    agreement: Annotated[float, typer.Option(min=0, max=1, help="What its 95 % interval has to reach.")] = 0.98,
    off: Annotated[bool, typer.Option("--off", help="End it; its answers stay.")] = False,
    config: ConfigOption = DEFAULT_CONFIG,
    note: Note = None,
    as_json: AsJson = False,
) -> None:
    """Let a version that is kept answer beside the one in force, on spare capacity, and see what it would change.

    It changes no verdict, and no image waits for it. Without VERSION its answers are compared with those in force and
    people's decisions; exit status 1 while it has not answered --images, or does not reach --agreement.

    Example: coserve experts shadow R0402 5c1e --config demo/coserve.yaml
    """
    from tools.experts import change
    from tools.experts.look import describe_shadow

    line = _line(config)
    if off or version:
        marked = change.mark_shadow(line, name, version * (not off), note, images=images, agreement=agreement)
        sentence = f"{name}: {marked or 'no version'} is in shadow"
        say({"expert": name, "shadow": marked}, sentence, as_json=as_json)
        return
    report = describe_shadow(line, name)
    if report is None:
        fail(f"no version of {name} is in shadow, or there are no results yet: coserve experts show {name}", status=1)
    if as_json:
        print_json(report)
    else:
        _print_shadow(report)
    raise SystemExit(0 if report["holds"] else 1)


def _print_shadow(report: dict[str, Any]) -> None:
    from daemon.shadow.comparison import EFFECTS

    sentence, eligible, agreement = report["sentence"], report["eligible"], report["agreement"] or 0.0
    console.print(f"{report['expert']} {report['shadow']}, in shadow of {report['in_force']}, {sentence}")
    if report["problem"]:
        console.print(f"it does not answer: {report['problem']}")
    console.print(
        f"agreement {agreement:.2%}, 95 % interval {report['low']:.2%} to {report['high']:.2%}, on {report['images']}"
        f" of {count_text(eligible, 'image')} since its first"
    )
    print_rows("What would change", report["outcomes"], ("in_service", ("in shadow", "shadow"), "images"))
    effects = [(words, report["effects"][name]) for name, words in EFFECTS.items()]
    print_table(f"Of {count_text(report['reviewed'], 'reviewed image')}", ("effect", "images"), effects)


@experts_app.command("promote")
def promote(
    name: Name,
    version: Version,
    config: ConfigOption = DEFAULT_CONFIG,
    discard: Discard = False,
    note: Note = None,
    as_json: AsJson = False,
) -> None:
    """Put a stored version in force: a new edition that differs from the one in force in this expert alone.

    Boards that have begun are judged to their end by the edition in which they began. Exit status 1 where it is
    refused (then nothing has changed), or where a running daemon did not adopt it.

    Example: coserve experts promote R0402 5c1e --config demo/coserve.yaml
    """
    _switch(config, name, version, note, discard=discard, as_json=as_json)


@experts_app.command("rollback")
def rollback(
    name: Name,
    config: ConfigOption = DEFAULT_CONFIG,
    discard: Discard = False,
    note: Note = None,
    as_json: AsJson = False,
) -> None:
    """Bring back the version of an expert that was in force before; repeat it to go further back.

    The rules and the other experts stay: `coserve rollback` brings a whole edition back.

    Example: coserve experts rollback R0402 --config demo/coserve.yaml
    """
    _switch(config, name, None, note, discard=discard, as_json=as_json)


@experts_app.command("prune")
def prune(
    config: ConfigOption = DEFAULT_CONFIG,
    keep: Annotated[int, typer.Option(min=1, help="Editions to go back to that stay.")] = 2,
    note: Note = None,
    as_json: AsJson = False,
) -> None:
    """Delete weights that nobody needs any more, and editions that no stored board names.

    Kept are the weights of the edition in force, the newest --keep before it, open boards and candidates.

    Example: coserve experts prune --keep 1 --config demo/coserve.yaml
    """
    from tools.experts import change

    pruned = change.prune(_line(config), keep, note)
    columns = ("expert", "version", ("freed", lambda row: size_text(row["freed_bytes"])))
    if pruned or as_json:
        print_rows("Pruned", pruned, columns, as_json=as_json, unbroken=_VERSIONS)
    else:
        console.print("nothing to prune")


@experts_app.command("measure")
def measure(
    name: Name,
    images: Annotated[Path, typer.Argument(metavar="IMAGES", help="A folder of images that it was not trained on.")],
    config: ConfigOption = DEFAULT_CONFIG,
    discard: Discard = False,
    as_json: AsJson = False,
) -> None:
    """Store how sure the version in force is of IMAGES, in a new edition: `show` compares recent answers with it.

    Training writes it by itself; this is for experts that were imported, or trained by an earlier CoServe. Use a few
    hundred ordinary images of the line, of which you know that they are as they should be.

    Example: coserve experts measure R0402 images/R0402 --config demo/coserve.yaml
    """
    from tools.experts.measure import measure_in_force

    measured = measure_in_force(_line(config), name, images, discard=discard)
    if as_json:
        print_json(measured)
        return
    rows = [(label, sum(counts), _bars(counts)) for label, counts in measured["confidences"].items()]
    print_table(f"{name} {measured['version']}: how sure it was", ("answered", "images", "confidence 0 … 1"), rows)


@experts_app.command("threshold")
def threshold(
    name: Name,
    escape_cost: Annotated[float, typer.Option(min=0, help="What a defect that passes costs.")],
    false_call_cost: Annotated[float, typer.Option(min=0, help="What a good part costs that a person looks at.")],
    label: Annotated[str | None, typer.Option(metavar="LABEL", help="Of a detector: the label of `fail_on`.")] = None,
    pictures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A classifier's pictures, not trained on, in DIR/LABEL.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the curve is drawn.")] = Path(),
    config: ConfigOption = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Find the threshold at which escapes and false calls cost least, from people's decisions, or from pictures.

    Exit status 1 where too few images are decided; it says how many more of which kind are needed.

    Example: coserve experts threshold R0402 --escape-cost 200 --false-call-cost 1 --config demo/coserve.yaml
    """
    if not all(cost <= _MAX_COST for cost in (escape_cost, false_call_cost)):
        fail(f"--escape-cost and --false-call-cost: expected numbers from 0 to {_MAX_COST:g}", status=2)
    from tools.experts.threshold import cheapest, draw, in_words

    result = cheapest(_line(config), name, label, escape_cost, false_call_cost, pictures)
    result["file"] = str(draw(result, out))
    if as_json:
        print_json(result)
        return
    rows = [(f"{at:g}", *(f"{cost:.1f}" for cost in costs)) for at, *costs in result["curve"]]
    print_table("Cost of 1,000 images", (result["key"], "cost", "95 % from", "to"), rows[:: max(1, len(rows) // 20)])
    console.print("\n".join([*in_words(result), f"the curve: {result['file']}"]))


def _switch(config: Path, name: str, version: str | None, note: str | None, *, discard: bool, as_json: bool) -> None:
    from tools.experts import change

    done = change.switch(_line(config), name, version, note, discard=discard)
    where = f"in edition {done['edition']}"
    where = f"in force, {where}, which the daemon judges by" if done["heard"] else where
    sentence = f"{name} {done['version']} is {where}; before: {done['before'] or 'none'}"
    warnings = [f"warning: {warning}" for warning in done["warnings"]]
    say(done, "\n".join(filter(None, (sentence, done["shadow"], done["note"], *warnings))), as_json=as_json)


def _print_facts(facts: dict[str, Any], plant: PlantTime) -> None:
    entry, serving = facts["entry"], facts["serving"]
    settings = f" with settings {facts['settings']}" if facts["settings"] else ""
    console.print(f"{facts['expert']}, version {facts['version'] or 'none'}{settings} in force", style="bold")
    if entry:
        classes = f", classes {', '.join(entry['classes'])}" if entry["classes"] else ""
        console.print(f"{facts['network']}, {entry['input_size']} pixels{classes}")
        if stored := entry["stored"]:
            sizes = size_text(stored["bytes"]), size_text(stored["slot_bytes"])
            precision = stored["mean_precision"]
            labels = f"{stored['same_labels']} of {stored['images']} {stored['on']}"
            console.print(
                f"stored as {stored['form']}: {sizes[0]} on the disk, {sizes[1]} in memory; at import the same labels"
                f" as the original on {labels}, confidence within {stored['confidence']:.1e}"
                + ("" if precision is None else f", mean precision {precision:.4f} of its boxes")
            )
    if serving is None:
        console.print("residency: no daemon runs here, or it does not know this expert")
    else:
        where = ", ".join(serving["resident"]) or "nowhere now"
        console.print(
            f"the daemon serves {serving['version']} with settings {serving['settings']}, resident {where},"
            f" {serving['queued']} queued"
        )
        if (serving["version"], serving["settings"]) != (str(facts["version"]).partition("+")[0], facts["settings"]):
            waits = f"{facts['version']} with settings {facts['settings']}"
            console.print(f"it has not adopted the edition in force: {waits} waits for `coserve reload`")
        if serving["failed"]:
            console.print(f"it failed: {serving['failed']}")
    columns = ("version", "state", "verdicts", "reviewed", "false_calls", "escapes")
    print_rows("Versions", facts["versions"], columns, unbroken=(*_VERSIONS, "state"))
    for row in facts["versions"]:
        if row["differs"]:
            console.print(f"{row['version']}, then → in force: {', '.join(row['differs'])}")
    columns = ("at", "what", "version", "before", "by")
    history = [(plant_time(plant, at, "short"), *rest) for at, *rest in _history(facts)]
    print_table(f"History; times of {plant.timezone}", columns, history, unbroken=(*_VERSIONS, "at"))
    step = ("step", lambda use: f"{use['step']}: {use['name']}")
    print_rows("Rules that use it", facts["rules"], (("board", "board_type"), "components", step, ("how", "judges")))
    if facts["drift"] is None:
        measure = as_typed(f"experts measure {facts['expert']} IMAGES")
        console.print(f"drift: not known, the catalog has no confidences of it: {measure}")
    else:
        _print_drift(facts["expert"], facts["drift"])


def _history(facts: dict[str, Any]) -> list[tuple[Any, ...]]:
    steps = facts["steps"] if len(facts["steps"]) > 1 else []  # a single step is the first look at the catalog
    rows = [(step["at"], step["did"], step["version"], step["before"], step["by"]) for step in steps]
    rows += [
        (row["first_used_at"], "first verdict", row["version"], None, None)
        for row in facts["versions"]
        if row["first_used_at"] is not None
    ]
    return sorted(rows, key=lambda row: row[0][:19])


def _print_drift(name: str, drift: dict[str, Any]) -> None:
    grade = f"{drift['grade']}, index {drift['value']:.3f} (by chance alone {drift['noise']:.3f})"
    if drift["grade"] == "too few":
        grade = f"too few {drift['lacks']} to say"
    answers, held_out = count_text(drift["answers"], "recent answer"), count_text(drift["held_out"], "image")
    console.print(f"drift: {grade}; {answers} against {held_out} held out")
    if drift["lacks"] == "images held out":
        measure = as_typed(f"experts measure {name} IMAGES")
        console.print(f"measure it on more ordinary images of the line: {measure}")
    rows: list[tuple[Any, ...]] = []
    for label in dict.fromkeys((*drift["training"], *drift["recent"])):
        training, recent = drift["training"].get(label, ()), drift["recent"].get(label, ())
        rows.append((label, sum(training), _bars(training), sum(recent), _bars(recent)))
    print_table("Confidence, 0 to 1", ("answered", "held out", "then", "recent", "now"), rows)


def _bars(counts: Sequence[int]) -> str:
    highest = max(counts, default=0)
    return "".join(" ▁▂▃▄▅▆▇█"[0 if not n else 1 + (7 * n) // highest] for n in counts) if highest else ""


def rejudge(
    config: ConfigPath,
    rules: Annotated[Path | None, typer.Option(metavar="FILE", help="Other rules than those of CONFIG.")] = None,
    expert: Annotated[
        list[str] | None,
        typer.Option("--expert", metavar="NAME=VERSION", help="A version that was put in, or NAME=FOLDER of one."),
    ] = None,
    lot: Annotated[str | None, typer.Option(help="Only images of this lot.")] = None,
    since: Annotated[str | None, since_option("Only images judged then or later")] = None,
    until: Annotated[str | None, until_option("Only images judged before")] = None,
    shift: Annotated[str | None, shift_option("Only images judged")] = None,
    component: Annotated[str | None, typer.Option(help="Only this component type.")] = None,
    verdict: Annotated[VerdictOption | None, typer.Option(help="Only images that got this verdict.")] = None,
    sample: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="N images chosen at random; default: all.", show_default=False),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Processor threads; the line needs the others.")] = 1,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write a row per change to FILE.")] = None,
    as_json: AsJson = False,
) -> None:
    """Judge stored images again, with other rules or experts, and list what would change. Changes nothing itself.

    Images are judged exactly as by the daemon, in a process of its own at low priority. With --expert alone only images
    that this expert answered are taken: the others cannot change. Exit status 0: nothing would change; 1: something
    would; 2: wrong use. Reviewers' decisions say whether a change is for the better.

    Example: coserve rejudge demo/coserve.yaml --expert R0402=5c1e --since 2d --csv changes.csv
    """
    from tools.backup.gentle import step_back
    from tools.query.formats import write_csv
    from tools.query.rejudge import COLUMNS, rejudge_line
    from tools.query.rows import RowFilters

    if csv is not None:
        need_folder(csv.absolute().parent)
    step_back()
    since, until = time_window(config, since, until, shift)
    equal = {"component": component, "daemon_verdict": verdict, "lot": lot}
    filters = RowFilters({name: [value] for name, value in equal.items() if value}, since, until)
    with Bars(console=errors, transient=True) as bars:
        task = bars.add_task("judging again", total=None)
        summary, changes = rejudge_line(
            _line(config),
            filters,
            expert or (),
            rules=rules,
            sample=sample,
            threads=threads,
            on_progress=lambda total: bars.update(task, advance=1, total=total),
        )
    if csv is not None:
        with csv.open("w", encoding="utf-8", newline="") as file:
            write_csv(file, COLUMNS, ([change[name] for name in COLUMNS] for change in changes))
    if as_json:
        print_json({**summary, "list": changes})
    else:
        print_summary(summary, changes, None if csv is not None else "--csv FILE, or --json")
    raise SystemExit(1 if changes else 0)


def print_summary(summary: dict[str, Any], changes: list[dict[str, Any]], more: str | None) -> None:
    """Print what `rejudge_line` returned; `more` says where all changes are."""
    from tools.query.rejudge import EFFECTS

    console.print(
        f"{count_text(summary['rejudged'], 'image')} judged again: {summary['unchanged']} as before,"
        f" {summary['changed']} would change, on {count_text(summary['boards'], 'board')}"
    )
    for sentence in summary["notes"]:
        console.print(f"note: {sentence}")
    if summary["differences"]:
        print_rows("Different from then", summary["differences"], (("then → now", "what"), "images"))
    if not changes:
        return
    would_be = ("would be", lambda row: row["to"] if row["to"] != row["from"] else "other defect")
    print_rows("What would change", summary["changes"], (("was", "from"), ("", lambda _: "→"), would_be, "images"))
    if summary["reviewed"]:
        effects = [(words, summary["effects"][name]) for name, words in EFFECTS.items()]
        print_table(f"Against {count_text(summary['reviewed'], 'reviewed image')}", ("what", "images"), effects)
    keys = ("inspection_id", "serial", "designator", "component", "verdict", "would_be", "final_verdict")
    title = f"The newest {_LISTED} changes" if len(changes) > _LISTED else "Changes"
    columns = ("image", "board", "place", "component", "was", "would be", "reviewer said")
    rows = [[_with_defect(row, key) for key in keys] for row in changes[:_LISTED]]
    print_table(title, columns, rows, unbroken=("image",))
    if len(changes) > _LISTED and more is not None:
        console.print(f"all of them: {more}")


def _with_defect(row: dict[str, Any], key: str) -> Any:
    defect = {"verdict": "defect", "would_be": "would_be_defect"}.get(key)
    return f"{row[key]} {row[defect]}" if defect and row[defect] else row[key]
