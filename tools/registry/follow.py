"""Take part in roll-outs with a line: report to the hub what it has in force, and pull what the hub wants."""

import time
from collections.abc import Callable
from pathlib import Path

from daemon.registry.hub_store import HubStore
from daemon.registry.manifest import NotNowError, ReleaseError
from experts.versions import VersionsBusyError, VersionsError
from tools.experts.line import ExpertsLine, open_line
from tools.registry.line_releases import LineReleases
from tools.registry.pull import PullOptions, pull

_MAX_TEXT = 500


class Follower:
    """One line. It remembers, for each name, the release that it refused and why, or what it waits for."""

    def __init__(self, config: Path, hub: HubStore, within_s: float, say: Callable[[str], None]) -> None:
        self._config, self._hub, self._say = config, hub, say
        self._options = PullOptions(within_s, is_return=True)
        self._refused: dict[str, tuple[int, str]] = {}
        self._waits: dict[str, str] = {}
        self._not_compared: dict[str, str] = {}
        self._revoked: list[Path] = []

    def turn(self) -> None:
        """Report once, and pull what is wanted. The configuration is read each time: signers may change."""
        line = open_line(self._config)
        releases = LineReleases(line)
        wanted, compare = self._report(releases)
        for name, facts in releases.in_force().items():
            is_unsettled = releases.unsettled(name).exists()
            number = wanted.get(name, facts.number if is_unsettled else None)
            if number is None or self._refused.get(name, (0, ""))[0] == number:
                continue  # until the hub wants another
            self._refused.pop(name, None)
            waited = self._waits.pop(name, None)
            if facts.number != number or is_unsettled:
                self._pull(line, name, number, waited, is_back=number <= facts.number)
                compare = self._report(releases)[1]
        for name, facts in releases.in_force().items():
            if (name in compare) != facts.is_compared:
                self._compare(releases, name, is_compared=name in compare)

    def _compare(self, releases: LineReleases, name: str, *, is_compared: bool) -> None:
        try:
            releases.compare(name, is_compared=is_compared)
            self._not_compared.pop(name, None)
        except VersionsError as error:
            text = f"the versions before cannot answer in shadow: {error}"[:_MAX_TEXT]
            if self._not_compared.get(name) != text:
                self._say(f"{name}: {text}")
            self._not_compared[name] = text

    def _pull(self, line: ExpertsLine, name: str, number: int, waited: str | None, *, is_back: bool) -> None:
        """Pull a release. One that fails is refused; a way back is tried again, for nothing else can take its place.

        `waited` is what the last try waited for, which is not said twice.
        """
        try:
            pulled = pull(line, self._hub, name, number, self._options)
        except (ReleaseError, VersionsError, OSError) as error:
            text = str(error)[:_MAX_TEXT]
            if not is_back and not isinstance(error, NotNowError | VersionsBusyError):
                self._refused[name] = number, text
                self._say(f"{name}/{number} refused: {error}")
                return
            self._waits[name] = text
            if text != waited:
                self._say(f"{name}/{number} waits: {error}")
        else:
            self._say(f"{pulled.manifest.release} is in force, signed by {pulled.signer}")

    def _report(self, releases: LineReleases) -> tuple[dict[str, int], list[str]]:
        """Tell the hub what is in force; return the numbers that it wants, and of what it wants answers compared."""
        in_force: dict[str, dict[str, object]] = {}
        for name, facts in releases.in_force().items():
            is_revoked = facts.signer in (file.name for file in self._revoked)
            revoked = f"its signer {facts.signer} is revoked" if is_revoked else None
            number, problem = self._refused.get(name, (None, revoked))
            waits = self._waits.get(name, self._not_compared.get(name))
            outcome = {"refused": number, "problem": problem, "waits": waits, **releases.agreement(name)}
            in_force[name] = {"number": facts.number, "since": facts.at, **outcome}
        answer = self._hub.ask_json("POST", "/line-releases", {"in_force": in_force})
        revoked = releases.revoked(answer["revoked"])
        for signer in sorted(file.name for file in {*revoked} - {*self._revoked}):
            signed = [f"{name}/{facts.number}" for name, facts in releases.in_force().items() if facts.signer == signer]
            self._say(
                f"REVOKED: {signer}: this line takes no release that it signed; in force:"
                f" {', '.join(signed) or 'none of them'}"
            )
        self._revoked = revoked
        return {name: number for name, number in answer["wanted"].items() if name in in_force}, answer["compare"]


def follow(follower: Follower, every_s: float, say: Callable[[str], None]) -> None:
    """Take part until the process ends. While the hub does not answer, the line keeps what it has."""
    last_problem = ""
    while True:
        try:
            follower.turn()
            last_problem = ""
        except (ReleaseError, VersionsError, OSError) as error:
            if str(error) != last_problem:
                say(f"the line keeps what it has: {error}")
            last_problem = str(error)
        time.sleep(every_s)
