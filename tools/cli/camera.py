"""`coserve camera`: every way in which pictures come to the line, and their account at the end.

Files and rendered boards are published as they are; a watched folder and a camera go on until they are stopped.
"""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn
from urllib.parse import quote

import typer

from tools.cli.console import AsJson, errors, fail, print_json, print_table

if TYPE_CHECKING:
    from coserve_client import CurveClient
    from tools.camera.frame_source import FrameSource
    from tools.camera.layout import Layout
    from tools.camera.serials import Serials, Trigger

#: Where a video ended, its last answers are waited for so long; where somebody stopped us, so long.
_END_S, _STOP_S = 60.0, 10.0
_PICTURES = "Pictures of whole boards"
_ELSEWHERE = "From another PC"


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command()(camera)


def camera(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG", help="The line's coserve.yaml; or its endpoint, tcp://HOST:PORT.", show_default=False
        ),
    ],
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="Images: FOLDER/BOARD_TYPE/SERIAL/DESIGNATOR.COMPONENT.png (or .jpg, .bmp, .tif); with --layout"
            " whole boards: SERIAL.png",
            show_default=False,
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Stay, and publish what is dropped into FOLDER.")] = False,
    move_to: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --watch: where accepted files go; else they stay.")
    ] = None,
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
    video: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Boards in a video; with --render, make one.", rich_help_panel=_PICTURES),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="DEVICE", help="A V4L2 camera: /dev/video0, or 0.", rich_help_panel=_PICTURES),
    ] = None,
    size: Annotated[
        str | None, typer.Option(metavar="WxH", help="Ask the camera for this size.", rich_help_panel=_PICTURES)
    ] = None,
    fps: Annotated[float | None, typer.Option(help="Ask the camera for this rate.", rich_help_panel=_PICTURES)] = None,
    layout: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the parts lie in a picture.", rich_help_panel=_PICTURES)
    ] = None,
    serial: Annotated[
        str | None, typer.Option(metavar="SERIAL", help="Every picture is this board.", rich_help_panel=_PICTURES)
    ] = None,
    serials_from: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|-",
            help="A serial on each line; - is standard input (a barcode reader), each line takes a picture.",
            rich_help_panel=_PICTURES,
        ),
    ] = None,
    every: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Take every Nth picture.", rich_help_panel=_PICTURES)
    ] = None,
    interval: Annotated[
        float | None, typer.Option(min=0.01, metavar="S", help="Take one every S seconds.", rich_help_panel=_PICTURES)
    ] = None,
    on_enter: Annotated[
        bool, typer.Option("--on-enter", help="Take one when Enter is pressed.", rich_help_panel=_PICTURES)
    ] = False,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="What waits for the daemon, what was sent; camera/SOURCE beside CONFIG without it."
        ),
    ] = None,
    server_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The daemon's .key.", rich_help_panel=_ELSEWHERE)
    ] = None,
    client_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Our .key_secret.", rich_help_panel=_ELSEWHERE)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Publish images to the daemon, with an account of its answers at the end.

    Exit status 1 if an image was rejected or not taken, or the daemon stopped answering.

    Example: coserve camera demo/coserve.yaml --render 5 --rate 50
    """
    asked = _Asked(config, source, lot, state, server_key, client_key, as_json)
    how = [name for name, value in (("FOLDER", folder), ("--video", video), ("--device", device)) if value is not None]
    if render is not None:
        others = {"--watch": watch, "--layout": layout, "--serial": serial, "--serials-from": serials_from}
        others |= {"--every": every, "--interval": interval, "--on-enter": on_enter}
        _only([*how, *(name for name, value in others.items() if value)], {"--video"}, "--render")
        # From the clock: the same picture twice is no other part, to the line as little as to who looks at it.
        _render(asked, render, video, rate=rate, seed=int(time.time()) if seed is None else seed, prefix=serials)
    if len(how) != 1:
        fail("name one of: a FOLDER of images, --watch with it, --video FILE, --device DEVICE, --render N", status=2)
    if folder is not None:
        if serial or serials_from or every or interval or on_enter:
            fail("a FOLDER says the serials, and a file is the trigger: they are for --video and --device", status=2)
        _folder(asked, folder, layout, watch=watch, move_to=move_to, rate=rate)
    if layout is None:
        fail("--layout FILE says where the parts lie in the picture (docs/cameras.md)", status=2)
    if watch or move_to or rate:
        fail("--watch, --move-to and --rate are for a FOLDER of images", status=2)
    when = _When(serial, serials, serials_from, every, interval, on_enter)
    _station(asked, video, device, _size_of(size), fps, layout, when)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Whom to publish to, under which name."""

    config: str
    source: str
    lot: str | None
    state: Path | None
    server_key: Path | None
    client_key: Path | None
    as_json: bool

    @property
    def is_endpoint(self) -> bool:
        return self.config.startswith(("tcp://", "ipc://"))

    def endpoint(self) -> str:
        from tools.camera.command import endpoint_of

        return self.config if self.is_endpoint else endpoint_of(Path(self.config))

    def curve(self) -> "CurveClient | None":
        from coserve_client import CurveClient

        if (self.server_key is None) != (self.client_key is None):
            fail("--server-key and --client-key belong together (docs/security.md)", status=2)
        if self.server_key is None or self.client_key is None:
            return None
        for file in (self.server_key, self.client_key):
            if not file.is_file():
                fail(f"no key file {file}: coserve keys new makes a pair", status=2)
        return CurveClient(self.server_key, self.client_key)

    def folder(self) -> Path:
        """Where this camera keeps what it has to remember; made."""
        beside = Path() if self.is_endpoint else Path(self.config).parent
        folder = self.state or beside / "camera" / quote(self.source, safe="")
        try:
            folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        except OSError as error:
            fail(f"--state {folder} cannot be made: {error.strerror}", status=2)
        return folder

    def leave(self, account: dict[str, int], *, is_well: bool) -> NoReturn:
        if self.as_json:
            print_json(account)
        else:
            print_table(f"Account of {self.source}", ("answer", "images"), list(account.items()))
        raise SystemExit(0 if is_well else 1)


@dataclass(frozen=True, slots=True)
class _When:
    """Which board, and which picture of it."""

    serial: str | None
    prefix: str | None
    serials_from: str | None
    every: int | None
    interval: float | None
    on_enter: bool

    def check(self) -> None:
        if [self.serial, self.prefix, self.serials_from].count(None) != 2:
            fail("name one of --serial SERIAL, --serials PREFIX, --serials-from FILE|-", status=2)
        triggers = [self.every is not None, self.interval is not None, self.on_enter, self.serials_from == "-"]
        if sum(triggers) != 1:
            fail("name one trigger: --every N, --interval S, --on-enter, or --serials-from -", status=2)

    def serials(self, state: Path, typed: "Serials | None") -> "Serials":
        from tools.camera.serials import Counted, Listed, Same

        if self.serial is not None:
            return Same(self.serial)
        if self.prefix is not None:
            return Counted(self.prefix, state / "serials.json")
        if typed is not None and self.serials_from == "-":
            return typed
        return Listed(Path(self.serials_from or ""), _say)

    def trigger(self) -> "Trigger":
        from tools.camera.serials import EveryPicture, Interval, Typed

        if self.every is not None:
            return EveryPicture(self.every)
        return Typed(sys.stdin, _say) if self.interval is None else Interval(self.interval)


def _render(
    asked: _Asked, boards: int, video: Path | None, *, rate: float | None, seed: int, prefix: str | None
) -> NoReturn:
    from tools.camera.command import publish_rendered, write_video

    if video is not None:
        try:
            layout, serials = write_video(video, boards, seed, prefix)
        except (ValueError, OSError) as error:
            fail(str(error), status=2)
        print(f"{video}: {boards} boards; layout {layout}, serials {serials}")
        raise SystemExit(0)
    account = publish_rendered(
        asked.endpoint(), boards, rate=rate, source=asked.source, seed=seed, lot=asked.lot, prefix=prefix
    )
    asked.leave(account.as_dict(), is_well=account.complete)


def _folder(
    asked: _Asked, folder: Path, layout_file: Path | None, *, watch: bool, move_to: Path | None, rate: float | None
) -> NoReturn:
    from tools.camera.command import publish_folder

    layout = None if layout_file is None else _layout_of(layout_file)
    if watch:
        if rate is not None:
            fail("--rate is for a folder that is there; a watched one gives what it gets", status=2)
        _watch(asked, folder, layout, move_to)
    if move_to is not None:
        fail("--move-to is for --watch", status=2)
    account = publish_folder(
        asked.endpoint(),
        folder,
        rate=rate,
        source=asked.source,
        lot=asked.lot,
        curve=asked.curve(),
        layout=layout,
    )
    asked.leave(account.as_dict(), is_well=account.complete)


def _watch(asked: _Asked, folder: Path, layout: "Layout | None", move_to: Path | None) -> NoReturn:
    from coserve_client import CoserveError
    from tools.camera import files
    from tools.camera.watch_folder import Remembered, WatchedFolder
    from tools.camera.watching import Watcher

    if not folder.is_dir():
        fail(f"no folder {folder}", status=2)
    if move_to is not None and move_to.resolve().is_relative_to(folder.resolve()):
        fail(f"--move-to {move_to} lies in {folder}, which is watched: name a folder beside it", status=2)
    images_of = files.parts(asked.lot) if layout is None else files.whole_boards(layout, asked.lot)
    endpoint = asked.endpoint()
    try:
        remembered = Remembered(asked.folder() / "sent.jsonl", folder)
        watched = WatchedFolder(folder, remembered, move_to, _say)
        stop = threading.Event()
        watcher = Watcher(endpoint, asked.source, watched, images_of, _say, stop, asked.curve())
    except (OSError, CoserveError, ValueError) as error:
        fail(str(error), status=2)
    _say(f"watching {folder}; Ctrl-C or SIGTERM ends it")
    with _set_by_signals(stop):
        watcher.run()
        watcher.close()
    done, account = watcher.files, watcher.account
    table = {"files accepted": done.accepted, "files refused": done.refused, "files not sent": done.unfit}
    table["files not sent"] += watched.incomplete
    asked.leave(table | account.as_dict(), is_well=not (done.refused or done.unfit or watched.incomplete))


def _station(
    asked: _Asked,
    video: Path | None,
    device: str | None,
    size: tuple[int, int] | None,
    fps: float | None,
    layout_file: Path,
    when: _When,
) -> NoReturn:
    from coserve_client import CoserveError, SpoolingPublisher
    from tools.camera.frame_source import SourceError
    from tools.camera.serials import Typed
    from tools.camera.station import Seen, Station

    when.check()
    endpoint, curve, layout, state = asked.endpoint(), asked.curve(), _layout_of(layout_file), asked.folder()
    trigger, stop = when.trigger(), threading.Event()
    try:
        serials = when.serials(state, trigger if isinstance(trigger, Typed) else None)
        source = _source_of(video, device, size, fps, stop)
        publisher = SpoolingPublisher(endpoint, asked.source, state / "spool", curve=curve)
    except (SourceError, OSError, CoserveError, ValueError) as error:
        fail(str(error), status=2)
    seen, problem = Seen(), ""
    if publisher.account.recovered:
        _say(f"{publisher.account.recovered} images of an earlier run wait in {state / 'spool'}: they are sent first")
    with _set_by_signals(stop):
        try:
            Station(source, layout, trigger, serials, publisher, _say, asked.lot, stop).run(seen)
        except (SourceError, OSError) as error:
            problem = str(error)
        source.close()
        try:
            account = publisher.close(_STOP_S if stop.is_set() else _END_S)
        except CoserveError as error:
            account, problem = publisher.account, str(error)
    for text in (*account.refusals, *([problem] if problem else [])):
        _say(text)
    if account.spooled:
        _say(f"{account.spooled} images wait in {state / 'spool'}: the next run sends them first. {publisher.trouble}")
    table = {"pictures": seen.pictures, "boards": seen.boards, "boards not sent": seen.failed} | account.as_dict()
    asked.leave(table, is_well=account.complete and not (problem or seen.failed))


def _source_of(
    video: Path | None, device: str | None, size: tuple[int, int] | None, fps: float | None, stop: threading.Event
) -> "FrameSource":
    from tools.camera.frame_source import Device, VideoFile, v4l2

    if video is not None:
        return VideoFile(video)
    assert device is not None
    name = f"/dev/video{device}" if device.isdigit() else device
    if not Path(name).exists():
        there = ", ".join(sorted(str(path) for path in Path("/dev").glob("video*"))) or "none"
        fail(f"no camera {name}; cameras here: {there}", status=2)
    return Device(v4l2(device, size, fps), name, _say, stop)


def _layout_of(file: Path) -> "Layout":
    from daemon.errors import ConfigError
    from tools.camera.layout import load_layout

    if not file.is_file():
        fail(f"no layout {file}: docs/cameras.md shows one", status=2)
    try:
        return load_layout(file)
    except ConfigError as error:
        fail(str(error), status=2)


def _size_of(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    width, _, height = text.lower().partition("x")
    if not (width.isdigit() and height.isdigit() and int(width) and int(height)):
        fail(f"--size {text}: expected WIDTHxHEIGHT, for example 1920x1080", status=2)
    return int(width), int(height)


def _only(given: list[str], allowed: set[str], option: str) -> None:
    if wrong := [name for name in given if name not in allowed]:
        fail(f"{option} does not go with {wrong[0]}", status=2)


@contextmanager
def _set_by_signals(stop: threading.Event) -> Iterator[None]:
    """Ctrl-C and SIGTERM set `stop`, so that nothing is left half done; a second one ends what hangs."""

    def heard(_signal: int, _frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, heard) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    errors.print(text, markup=False)
