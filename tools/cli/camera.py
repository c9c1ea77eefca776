"""Pictures in and out: `coserve camera` publishes them to the daemon, `coserve dataset` exports and imports them."""

import codecs
import io
import itertools
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast, get_args
from urllib.parse import quote

import typer

from coserve_client import (
    CameraImage,
    CoserveError,
    CurveClient,
    PublishAccount,
    Publisher,
    SpoolingPublisher,
    publish_images,
)
from daemon.errors import ConfigError
from daemon.units import count_text
from tools.cli.results import Texts, VerdictOption
from tools.cli.setup import must_be_a_checkout
from tools.dataset import Format
from tools.terminal.console import (
    DEFAULT_CONFIG,
    AsJson,
    Bars,
    CommandError,
    ConfigOption,
    console,
    errors,
    exit_on,
    fail,
    need_file,
    need_folder,
    os_errors_end,
    print_json,
    print_table,
)
from tools.terminal.names import legal_name
from tools.terminal.open_line import opened, reading, settings_of
from tools.terminal.option_values import Commands, shift_option, since_option, time_window, until_option

if TYPE_CHECKING:
    from tools.camera.layout import BoardLayout, PictureFiles, TrainingFolder
    from tools.camera.station import FrameSource, ScannedLines, Trigger

#: The wait for the last answers at the end of a video, and after Ctrl-C or SIGTERM.
_END_S, _STOP_S = 60.0, 10.0
#: A person at a terminal waits less long for a daemon that does not answer than a camera does.
_PATIENCE_S = 10.0
_NOTICE_S = 1.8
#: Signals within this time are one.
_AT_ONCE_S = 1.0
_PICTURES = "Pictures of whole boards"
_ELSEWHERE = "From another PC"
#: Errors whose sentence says what a person can do.
_ERRORS = (CoserveError, ConfigError, OSError, ValueError)
_say: Callable[[str], None] = errors.print


def _option(metavar: str, help_text: str, *, panel: str = _PICTURES, **more: Any) -> Any:
    return typer.Option(metavar=metavar, help=help_text, rich_help_panel=panel, **more)


def camera(
    ctx: typer.Context,
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG", help="The line's coserve.yaml; or its endpoint, tcp://HOST:PORT.", show_default=False
        ),
    ],
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="Images: FOLDER/BOARD_TYPE/SERIAL/DESIGNATOR.COMPONENT.png (or .jpg, .bmp, .tif, .webp); with"
            " --layout whole boards: SERIAL.png",
            show_default=False,
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Stay, and publish what is dropped into FOLDER.")] = False,
    move_to: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --watch: where accepted files go; else they stay.")
    ] = None,
    upright: Annotated[
        bool, typer.Option("--upright", help="Turn FOLDER's pictures by their EXIF mark, which is ignored else.")
    ] = False,
    render: Annotated[int | None, typer.Option(min=1, metavar="N", help="Render N boards of the demo instead.")] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.01, help="Images per second; without it, as fast as the daemon takes them.")
    ] = None,
    source: Annotated[str, typer.Option(help="The camera's name.")] = "camera",
    seed: Annotated[
        int | None, typer.Option(help="Which boards --render draws; without it others each time.", show_default=False)
    ] = None,
    lot: Annotated[str | None, typer.Option(help="The lot that the boards belong to.")] = None,
    serials: Annotated[
        str | None, typer.Option(metavar="PREFIX", help="Serials begin so, and count up: PREFIX-000001.")
    ] = None,
    video: Annotated[Path | None, _option("FILE", "Boards in a video; with --render, make one.")] = None,
    device: Annotated[str | None, _option("DEVICE", "A V4L2 camera: /dev/video0, or 0.")] = None,
    size: Annotated[str | None, _option("WxH", "Ask the camera for this size.")] = None,
    fps: Annotated[float | None, typer.Option(help="Ask the camera for this rate.", rich_help_panel=_PICTURES)] = None,
    layout: Annotated[Path | None, _option("FILE", "Where the parts lie in a picture.")] = None,
    serial: Annotated[str | None, _option("SERIAL", "Every picture is this board.")] = None,
    serials_from: Annotated[
        str | None,
        _option("FILE|-", "A serial on each line; - is standard input (a barcode reader), each line takes a picture."),
    ] = None,
    encoding: Annotated[str | None, _option("NAME", "Of --serials-from, if not UTF-8: windows-1252, utf-16.")] = None,
    every: Annotated[int | None, _option("N", "Take every Nth picture.", min=1)] = None,
    interval: Annotated[float | None, _option("S", "Take one every S seconds.", min=0.01)] = None,
    on_enter: Annotated[
        bool, typer.Option("--on-enter", help="Take one when Enter is pressed.", rich_help_panel=_PICTURES)
    ] = False,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="What waits for the daemon, what was sent; camera/SOURCE beside CONFIG without it."
        ),
    ] = None,
    server_key: Annotated[Path | None, _option("FILE", "The daemon's .key.", panel=_ELSEWHERE)] = None,
    client_key: Annotated[Path | None, _option("FILE", "Our .key_secret.", panel=_ELSEWHERE)] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Publish nothing: write the images to DIR/COMPONENT, to train experts with."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Publish images to the daemon, with an account of its answers at the end.

    Exit status 1 if an image was rejected or not taken, or the daemon stopped answering.

    Example: coserve camera demo/coserve.yaml --render 5 --rate 50
    """
    values = {f"--{name.replace('_', '-')}": value for name, value in ctx.params.items()}
    given = {name for name, value in values.items() if value is not None and value is not False}  # 0 is a value
    mode = _mode(given | ({"FOLDER"} if folder else set()))
    named = {"--lot": lot, "--serial": serial, "--serials": serials}
    with exit_on(CommandError, status=2):
        lot, serial, serials = (None if text is None else legal_name(text, name) for name, text in named.items())
    # From the clock: a picture that was sent before would count as a repetition of that part.
    seed = int(time.time()) if seed is None else seed
    if mode == "--render" and video is not None:
        _render_video(video, render or 0, seed, serials)
    stop = ctx.with_resource(_stop_on_signals())
    options = _LineOptions(config, source, lot, state, server_key, client_key, save, as_json, stop)
    if mode == "--render":
        _render(options, render or 0, seed, serials, rate)
    if folder is not None:
        need_folder(folder)
        board_layout = None if layout is None else _load_layout(layout)
        from tools.camera.layout import PictureFiles

        pictures = PictureFiles(board_layout, lot, upright, _say)
        _watch(options, folder, pictures, move_to) if watch else _folder(options, folder, pictures, rate)
    if layout is None:
        fail("--layout FILE says where the parts lie in the picture (docs/cameras.md)", status=2)
    if [serial, serials, serials_from].count(None) != 2:
        fail("name one of --serial SERIAL, --serials PREFIX, --serials-from FILE|-", status=2)
    if [every is not None, interval is not None, on_enter, serials_from == "-"].count(True) != 1:
        fail("name one trigger: --every N, --interval S, --on-enter, or --serials-from -", status=2)
    if encoding is not None and serials_from is None:
        fail("--encoding goes with --serials-from", status=2)
    endpoint, board_layout = options.endpoint(), _load_layout(layout)
    with exit_on(*_ERRORS, CommandError, LookupError, status=2):
        codecs.lookup(encoding or "utf-8")
        trigger, names = _choose(options, serial, serials, serials_from, encoding, every, interval)
        frames = _open_source(video, device, _size_of(size), fps, stop)
        next_attempt = None if serial is None or save else _count_attempts(options, board_layout.board, serial)
    _station(options, endpoint, frames, board_layout, trigger, names, next_attempt)


_BOARD_OPTIONS = {"--save", "--layout", "--serial", "--serials", "--serials-from", "--encoding"}
_BOARD_OPTIONS |= {"--every", "--interval", "--on-enter"}
#: The options that each source of pictures takes.
_OPTIONS = {
    "--render": {"--video", "--serials", "--seed", "--rate", "--save"},
    "--watch": {"FOLDER", "--layout", "--move-to", "--upright"},
    "FOLDER": {"--layout", "--rate", "--save", "--upright"},
    "--video": _BOARD_OPTIONS,
    "--device": {"--size", "--fps", *_BOARD_OPTIONS},
}


def _mode(names: set[str]) -> str:
    """Return the option that names the source of pictures; leave with status 2 if another does not go with it."""
    mode = next((name for name in _OPTIONS if name in names), None)
    if mode is None or (mode == "--watch" and "FOLDER" not in names):
        fail("name one of: a FOLDER of images, --watch with it, --video FILE, --device DEVICE, --render N", status=2)
    if wrong := sorted(names & {*_OPTIONS}.union(*_OPTIONS.values()) - _OPTIONS[mode] - {mode}):
        fail(f"{wrong[0]} does not go with {mode}: coserve camera --help", status=2)
    return mode


@dataclass(frozen=True, slots=True)
class _LineOptions:
    config: str
    source: str
    lot: str | None
    state: Path | None
    server_key: Path | None
    client_key: Path | None
    save: Path | None
    as_json: bool
    stop: threading.Event

    @property
    def is_endpoint(self) -> bool:
        return self.config.startswith(("tcp://", "ipc://"))

    def endpoint(self) -> str:
        return self.config if self.is_endpoint else settings_of(Path(self.config)).endpoints.intake[0]

    def curve(self) -> CurveClient | None:
        if (self.server_key is None) != (self.client_key is None):
            fail("--server-key and --client-key belong together (docs/security.md)", status=2)
        if self.server_key is None or self.client_key is None:
            return None
        for file in (self.server_key, self.client_key):
            need_file(file, "coserve keys new makes a pair")
        return CurveClient(self.server_key, self.client_key)

    def folder(self) -> Path:
        beside = Path() if self.is_endpoint else Path(self.config).parent
        folder = self.state or beside / "camera" / quote(self.source, safe="")
        try:
            folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        except OSError as error:
            fail(f"--state {folder} cannot be made: {error.strerror}", status=2)
        return folder

    def publish(
        self, images: Iterable[CameraImage], total: int, rate: float | None, pictures: "PictureFiles"
    ) -> NoReturn:
        """Publish or save `images`, of which there should be `total`; leave with an account whatever happens."""
        if self.save is not None:
            from tools.camera.layout import TrainingFolder

            training = TrainingFolder(self.save)
            with _ended_early() as ends:
                for image in images:
                    self.end_if_stopped()
                    training.publish(
                        image.image_id, image.payload, board=image.board, component=image.component, **image.more
                    )
            self.finish_saving(training, "; ".join(ends), pictures)
        endpoint, tell_trouble = self.endpoint(), _TroubleNotice()
        with exit_on(*_ERRORS, status=1):
            publisher = Publisher(endpoint, self.source, patience_s=_PATIENCE_S, curve=self.curve())
        with _ended_early() as ends, Bars(console=errors) as bar, publisher:
            task = bar.add_task(f"publishing {count_text(total, 'image')} to {endpoint}", total=total)

            def on_progress(account: PublishAccount) -> None:
                bar.update(task, completed=account.answered)
                tell_trouble(publisher.trouble)
                self.end_if_stopped()

            publish_images(publisher, images, rate=rate, progress=on_progress)
        account = publisher.account
        if ends:
            missing = f"no answer from the daemon for {total - account.answered:,} of {count_text(total, 'image')}"
            ends.append(f"{missing}: the same command sends them again")
        for text in (*account.refusals, *ends):
            _say(text)
        rows = account.as_dict() | ({"not sent": total - account.sent} if total > account.sent else {})
        self.finish(rows | _left_out(pictures.left_out), is_complete=account.complete and account.sent == total)

    def end_if_stopped(self) -> None:
        if self.stop.is_set():
            raise KeyboardInterrupt

    def finish_saving(
        self, training: "TrainingFolder", problem: str, pictures: "PictureFiles | None" = None
    ) -> NoReturn:
        if problem:
            _say(problem)
        rows, not_sent = {"saved": training.images}, pictures.not_sent if pictures else 0
        if pictures:
            rows |= ({"files not sent": not_sent} if not_sent else {}) | _left_out(pictures.left_out)
        self.finish(rows, is_complete=training.images > 0 and not (problem or not_sent))

    def finish(self, account: dict[str, int], *, is_complete: bool) -> NoReturn:
        if self.as_json:
            print_json(account)
        else:
            print_table(f"Account of {self.source}", ("answer", "images"), list(account.items()))
        raise SystemExit(0 if is_complete else 1)


def _choose(
    options: _LineOptions,
    serial: str | None,
    prefix: str | None,
    serials_from: str | None,
    encoding: str | None,
    every: int | None,
    interval: float | None,
) -> "tuple[Trigger | ScannedLines, Iterator[str]]":
    """Return the trigger and the serials; OSError or CommandError for wrong ones, or a file that cannot be read."""
    from tools.camera.station import ScannedLines, counted_serials, every_nth, interval_of, listed_serials

    lines = None
    if every is not None:
        trigger = every_nth(every)
    elif interval is not None:
        trigger = interval_of(interval)
    else:
        if isinstance(sys.stdin, io.TextIOWrapper):  # one scan that is no text must not end the others
            sys.stdin.reconfigure(encoding=encoding or "utf-8-sig", errors="surrogateescape")
        trigger = lines = ScannedLines(sys.stdin, _say)
    if serial is not None:
        return trigger, itertools.repeat(serial)
    if prefix is not None:
        return trigger, counted_serials(prefix, options.folder() / "serials.json")
    if lines is not None and serials_from == "-":
        return trigger, lines.serials()
    return trigger, listed_serials(Path(serials_from or ""), encoding)


def _count_attempts(options: _LineOptions, board_type: str, serial: str) -> Callable[[], int]:
    """Count on from the line's last attempt, or that of an earlier run: each picture is a test of its own."""
    from tools.camera.station import counter
    from tools.query.reading import last_attempt

    count, newest = counter(options.folder() / "attempts.json"), 0
    if not options.is_endpoint:
        settings = settings_of(Path(options.config))
        if Path(settings.database.removeprefix("sqlite:///")).exists():
            with reading(settings) as engine, engine.connect() as connection:
                newest = last_attempt(connection, board_type, serial)
    return lambda: count(f"{board_type}/{serial}", newest)


def _render(options: _LineOptions, boards: int, seed: int, prefix: str | None, rate: float | None) -> NoReturn:
    must_be_a_checkout()
    from tools.camera.layout import PictureFiles
    from tools.camera.render import images as rendered

    images = rendered.rendered_images(boards, seed, prefix or rendered.new_prefix(), options.lot)
    options.publish(images, rendered.count_parts(boards), rate, PictureFiles())


def _render_video(video: Path, boards: int, seed: int, prefix: str | None) -> NoReturn:
    must_be_a_checkout()
    from tools.camera.render import images as rendered

    with exit_on(*_ERRORS, status=2):
        layout, serials = rendered.write_video(video, boards, seed, prefix or rendered.new_prefix())
    console.print(f"{video}: {count_text(boards, 'board')}; layout {layout}, serials {serials}")
    raise SystemExit(0)


def _folder(options: _LineOptions, folder: Path, pictures: "PictureFiles", rate: float | None) -> NoReturn:
    from tools.camera.layout import PART_FILE

    with exit_on(OSError, status=2):
        files, layout = pictures.find(folder), pictures.layout
    total = (len(files) + pictures.not_sent) * (1 if layout is None else len(layout.parts))
    if not total:
        _left_out(pictures.left_out)
        fail(f"{folder} holds no image named {PART_FILE if layout is None else 'SERIAL.png (or .jpg, …)'}", status=2)
    options.publish(pictures.read(folder, files), total, rate, pictures)


def _watch(options: _LineOptions, folder: Path, pictures: "PictureFiles", move_to: Path | None) -> NoReturn:
    from tools.camera.watch_folder import FolderPublisher, SentFiles, WatchedFolder

    if move_to is not None and move_to.resolve().is_relative_to(folder.resolve()):
        fail(f"--move-to {move_to} lies in {folder}, which is watched: name a folder beside it", status=2)
    endpoint, curve = options.endpoint(), options.curve()
    tell_trouble = _TroubleNotice(f"Pictures wait in {folder}.")
    with exit_on(*_ERRORS, status=2):
        sent = SentFiles(options.folder() / "sent.jsonl", folder)
        watched = WatchedFolder(folder, sent, move_to, pictures)
        publisher = FolderPublisher(endpoint, options.source, watched, options.stop, curve, tell_trouble)
    _say(f"watching {folder}; Ctrl-C or SIGTERM ends it")
    publisher.run()
    refused, not_sent = publisher.files["refused"], pictures.not_sent
    table = {"files accepted": publisher.files["accepted"], "files refused": refused, "files not sent": not_sent}
    table |= {"files waiting": watched.waiting} | _left_out(pictures.left_out) | publisher.account.as_dict()
    options.finish(table, is_complete=not (refused or not_sent or watched.waiting))


def _left_out(left_out: Mapping[str, int]) -> dict[str, int]:
    """Say which files were left out, and return their number as a row of the account."""
    from tools.pictures import left_out_lines

    for line in left_out_lines(left_out):
        _say(line)
    return {"files left out": sum(left_out.values())} if left_out else {}


def _station(
    options: _LineOptions,
    endpoint: str,
    source: "FrameSource",
    layout: "BoardLayout",
    trigger: "Trigger | ScannedLines",
    serials: Iterator[str],
    next_attempt: Callable[[], int] | None,
) -> NoReturn:
    from tools.camera.layout import TrainingFolder
    from tools.camera.station import Station

    spool = options.folder() / "spool"
    with exit_on(*_ERRORS, status=2):
        saving = None if options.save is None else TrainingFolder(options.save)
        tell_trouble = _TroubleNotice(f"Images wait in {spool}.")
        publisher = saving or SpoolingPublisher(endpoint, options.source, spool, curve=options.curve())
    if not isinstance(publisher, TrainingFolder) and publisher.account.recovered:
        _say(f"{publisher.account.recovered} images of an earlier run wait in {spool}: they are sent first")
    at_station = Station(
        source, layout, trigger, serials, publisher, _say, options.lot, tell_trouble, next_attempt, options.stop
    )
    problem = ""
    try:
        at_station.run()
    except OSError as error:
        problem = str(error)
    source.close()
    if isinstance(publisher, TrainingFolder):
        options.finish_saving(publisher, problem)
    if not publisher.wait(_NOTICE_S):
        tell_trouble(publisher.trouble)
    try:
        account = publisher.close(_STOP_S if options.stop.is_set() else _END_S)
    except CoserveError as error:
        account, problem = publisher.account, str(error)
    for text in (*account.refusals, *([problem] if problem else [])):
        _say(text)
    if account.spooled:
        _say(f"{account.spooled} images wait in {spool}: the next run sends them first. {publisher.trouble}")
    counts = at_station.counts
    table = {"pictures": counts["pictures"], "boards": counts["boards"], "boards not sent": counts["failed"]}
    options.finish(table | account.as_dict(), is_complete=account.complete and not (problem or counts["failed"]))


def _open_source(
    video: Path | None, device: str | None, size: tuple[int, int] | None, fps: float | None, stop: threading.Event
) -> "FrameSource":
    from tools.camera.station import CameraDevice, VideoFile, v4l2

    if video is not None:
        return VideoFile(video)
    assert device is not None
    name = f"/dev/video{device}" if device.isdigit() else device
    if not Path(name).exists():
        cameras = ", ".join(sorted(str(path) for path in Path("/dev").glob("video*"))) or "none"
        fail(f"no camera {name}; cameras here: {cameras}", status=2)
    return CameraDevice(v4l2(device, size, fps), name, _say, stop)


def _load_layout(file: Path) -> "BoardLayout":
    from tools.camera.layout import load_layout

    need_file(file, "docs/cameras.md shows a layout")
    with exit_on(*_ERRORS, status=2):
        return load_layout(file)


def _size_of(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    width, _, height = text.lower().partition("x")
    if not (width.isdigit() and height.isdigit() and int(width) and int(height)):
        fail(f"--size {text}: expected WIDTHxHEIGHT, for example 1920x1080", status=2)
    return int(width), int(height)


@contextmanager
def _stop_on_signals() -> Iterator[threading.Event]:
    """Yield what Ctrl-C and SIGTERM set, so that nothing is left half done, and an account follows.

    One that comes later than at once (`timeout` sends two) interrupts.
    """
    stop, may_interrupt_s = threading.Event(), 0.0

    def handle(_signal: int, _frame: Any) -> None:
        nonlocal may_interrupt_s
        if not stop.is_set():
            may_interrupt_s = time.monotonic() + _AT_ONCE_S
            stop.set()
        elif time.monotonic() > may_interrupt_s:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _ended_early() -> Iterator[list[str]]:
    """Yield a list for the error or the signal that ends the block, so that an account can follow."""
    ends: list[str] = []
    try:
        yield ends
    except KeyboardInterrupt:
        ends.append("ended by a signal before all images were sent")
    except _ERRORS as error:
        ends.append(str(error))


class _TroubleNotice:
    """Tells a person when images begin to wait, why, and when they go on; not when only a figure changes."""

    def __init__(self, waiting: str = "") -> None:
        self._waiting = waiting
        self._told = ""

    def __call__(self, trouble: str) -> None:
        words = re.sub(r"[\d.]+", "", trouble)
        if words != self._told:
            self._told = words
            sentence = trouble if trouble.endswith("?") else f"{trouble.rstrip('.')}."
            _say(f"{sentence} {self._waiting}".rstrip() if trouble else "the daemon takes images again")


Out = Annotated[Path, typer.Option(metavar="DIR", help="A new or empty folder.", show_default=False)]

dataset_app = typer.Typer(
    cls=Commands, no_args_is_help=True, help="Export pictures as data sets, import annotated ones."
)


@dataset_app.command("export")
def export_dataset(
    out: Out,
    form: Annotated[Format, typer.Option("--format", help="folders: as coserve train reads them.", show_default=False)],
    config: ConfigOption = DEFAULT_CONFIG,
    reviewed: Annotated[bool, typer.Option("--reviewed", help="Only what a person has decided.")] = False,
    verdict: Annotated[VerdictOption | None, typer.Option(help="Only with this final verdict.")] = None,
    low_confidence: Annotated[bool, typer.Option("--low-confidence", help="Only where an expert was unsure.")] = False,
    below: Annotated[float | None, typer.Option(min=0, max=1, help="For --low-confidence; default: 0.8.")] = None,
    lot: Annotated[Texts, typer.Option(metavar="LOT", help="Of this lot; repeat for several.")] = None,
    serial: Annotated[Texts, typer.Option(metavar="SERIAL", help="Of boards of this serial.")] = None,
    board_type: Annotated[Texts, typer.Option("--type", metavar="TYPE", help="Of boards of this type.")] = None,
    component: Annotated[Texts, typer.Option(metavar="COMPONENT", help="Of this component type.")] = None,
    expert: Annotated[Texts, typer.Option(metavar="EXPERT", help="Judged by this expert.")] = None,
    since: Annotated[str | None, since_option("Judged then or later")] = None,
    until: Annotated[str | None, until_option("Judged before")] = None,
    shift: Annotated[str | None, shift_option("Judged")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Refuse more pictures than this.")] = 10_000,
    as_json: AsJson = False,
) -> None:
    """Write stored pictures with people's decisions and boxes; DIR is complete, or it is not there.

    Example: coserve dataset export --out training --format folders --since 7d --config demo/coserve.yaml
    """
    if below is not None and not low_confidence:
        fail("--below goes with --low-confidence: add it, or leave --below out", status=2)
    from daemon.line.line import load_rules_and_catalog, served_by
    from tools.backup.gentle import step_back
    from tools.dataset.stored import read_pictures
    from tools.dataset.write import write_dataset
    from tools.query.formats import clean_up_on_signals
    from tools.query.rows import RowFilters
    from tools.terminal.new_files import need_room

    equal = {"lot": lot, "serial": serial, "board_type": board_type, "component": component, "expert": expert}
    equal = {name: values for name, values in {**equal, "verdict": [verdict] if verdict else None}.items() if values}
    filters = RowFilters(equal, *time_window(config, since, until, shift))
    below = 0.8 if low_confidence and below is None else below
    step_back()
    clean_up_on_signals()
    with opened(config) as (settings, engine), os_errors_end(out):
        served = served_by(settings)
        routes, catalog = (served.routes, served.catalog) if served else load_rules_and_catalog(settings)
        pictures = read_pictures(
            engine, filters, settings.images, routes, catalog, limit, reviewed=reviewed, below=below
        )
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        size_bytes = sum(each.file.stat().st_size for each in pictures if each.file.is_file())
        need_room(settings, out, size_bytes, "a data set")
        _print_dataset(out, *write_dataset(pictures, form, out), as_json=as_json)


@dataset_app.command("import")
def import_dataset(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="annotations.json, data.yaml, or a folder.")],
    form: Annotated[
        str, typer.Option("--format", metavar="[folders|yolo|coco]", help="Its format.", show_default=False)
    ],
    out: Out,
    images: Annotated[Path | None, typer.Option(metavar="DIR", help="Its pictures; default: images beside it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Turn an annotated data set into a folder for `coserve train detector` (boxes) or `coserve train classifier`.

    Example: coserve dataset import annotations.json --format coco --out training
    """
    if (form := form.lower()) not in get_args(Format):
        fail(f"--format {form} is not read: export as COCO or YOLO there (docs/experts.md has the menus)", status=2)
    if images is not None and form != "coco":
        fail(f"--images goes with coco; {form} says itself where pictures are", status=2)
    if form == "folders":
        need_folder(file)
    else:
        need_file(file, "name the file of the data set")
    from tools.dataset.read import read_dataset
    from tools.dataset.write import write_dataset

    with os_errors_end(out):
        pictures = read_dataset(file, cast("Format", form), images, _say)
        has_boxes = any(each.boxes for each in pictures)
        _print_dataset(out, *write_dataset(pictures, "yolo" if has_boxes else "folders", out), as_json=as_json)


def _print_dataset(
    out: Path, counts: Mapping[tuple[str, str], int], left_out: Mapping[str, int], *, as_json: bool
) -> None:
    columns, rows = ("component", "label", "pictures"), [(*names, number) for names, number in sorted(counts.items())]
    if as_json:
        listed = [dict(zip(columns, row, strict=True)) for row in rows]
        print_json({"folder": str(out), "pictures": listed, "left_out": left_out})
        return
    print_table(f"Pictures in {out}", columns, rows)
    for reason, number in left_out.items():
        console.print(f"{count_text(number, 'picture')} left out: {reason}")
