"""Releases through a hub over HTTP: who may add and read them, and what a damaged file there does to a line."""

import shutil
from pathlib import Path
from typing import Any

from daemon.registry.store import Store
from tests.contract.client import Line
from tests.daemon.plant.test_slow_links import serving
from tests.editions import files_in_force
from tests.lines import COSERVE_RUN
from tests.tools.run_commands import coserve
from tools.experts.line import open_line

RULES = """\
boards:
  pair: {components: {P: 2, Q: 1}}
classifiers:
  "*": {expert: "{component}", pass: [ok], review_below: 0.0}
"""


def test_a_hub_takes_releases_with_its_token_and_a_line_takes_them_whole(
    tmp_path: Path, version_folders: tuple[Path, Path]
) -> None:
    coserve("keys", "new", "anna", "--sign", "--dir", tmp_path / "keys")
    for name in ("hub", "line-1"):
        (tmp_path / name).write_text(name)
    plant: dict[str, Any] = {"plant": {"signers": ["../keys/anna.sign"]}, "memory": "100MB"}
    a = Line(tmp_path / "a", version_folders[0], RULES, COSERVE_RUN, **plant).config
    b = Line(tmp_path / "b", version_folders[1], RULES.replace(", Q: 1", ""), COSERVE_RUN, **plant).config
    files_in_force(a)

    def versions(config: Path) -> list[str | None]:
        return [expert.version for expert in open_line(config).experts().values()]

    with serving(tmp_path) as (host, port):
        url = f"http://{host}:{port}"

        def push(who: str, status: int = 0) -> str:
            secret = tmp_path / "keys" / "anna.sign_secret"
            words = ("--to", url, "--key", secret, "--token", tmp_path / who)
            return " ".join(coserve("plant", "push", a, *words, status=status).output.split())

        def pull(*words: str, status: int = 0) -> str:
            done = coserve("plant", "pull", b, "--from", url, "--token", tmp_path / "line-1", *words, status=status)
            return " ".join(done.output.split())

        assert "releases are changed with the hub's http_token" in push("line-1", status=1)
        push("hub")
        store, before = Store(tmp_path / "releases"), versions(b)
        for file in (store.folder / "objects").rglob("*"):
            if file.is_file():
                shutil.copy(file, tmp_path / file.name)
                file.write_bytes(file.read_bytes()[:-1] + b"?")
        assert "is damaged" in pull("--newest", status=1)
        assert versions(b) == before
        for file in (store.folder / "objects").rglob("*"):
            if file.is_file():
                shutil.copy(tmp_path / file.name, file)
        assert "line/1, signed by anna.sign" in pull("--newest")
        assert versions(b) == versions(a) != before
        assert f"this line has had line/1: {url} has nothing newer" in pull("--newest")
