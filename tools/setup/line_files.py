"""The files of a new line, with comments for what a person will want to change next."""

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

import psutil
import yaml

from daemon.host.folders import make_folder
from routing_rules.document import read_yaml_text
from tools.setup.answers import Answers, Components, free_floor, size

PORT = 9470
TOKEN = Path("keys/http_token")
CATALOG = Path("experts/catalog.yaml")
_SECRET_MODE = 0o600
_HTTP_HOSTS = {"here": "127.0.0.1", "network": "0.0.0.0"}  # noqa: S104 - asked for, and behind a token


def write_line(folder: Path, answers: Answers) -> list[Path]:
    """Write missing files and return them. FileExistsError if `coserve.yaml` or `rules.yaml` is there."""
    texts = {folder / "coserve.yaml": config_text(folder, answers), folder / "rules.yaml": rules_text(answers.boards)}
    for path in texts:
        if path.exists():
            raise FileExistsError(f"{path} is there already, and is never overwritten: name another folder")
    make_folder(folder)
    written_files = list(texts)
    for path, text in texts.items():
        _write(path, text)
    if not (folder / CATALOG).exists():
        make_folder((folder / CATALOG).parent)
        _write(folder / CATALOG, CATALOG_TEXT)
        written_files.append(folder / CATALOG)
    for name in ("journal", "images"):
        make_folder(folder / answers.data / name)
    written_files.append(folder / answers.data)
    if answers.dashboard == "network" and not (folder / TOKEN).exists():
        make_folder((folder / TOKEN).parent)
        (folder / TOKEN).touch(mode=_SECRET_MODE, exist_ok=False)
        (folder / TOKEN).write_text(secrets.token_hex(32) + "\n", encoding="ascii")
        written_files.append(folder / TOKEN)
    return written_files


def _write(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(text)


_SECURITY = f"""\
security:
  http_token: {TOKEN}      # to open the dashboard from another PC, type the content of this file
"""
CATALOG_TEXT = """\
# Which experts there are. `coserve train` and `coserve import` add each one with its file.
experts: {}
"""


def config_text(folder: Path, answers: Answers) -> str:
    data, is_off = answers.data, answers.dashboard == "no"
    http = f"  {'# ' if is_off else ''}http: http://{_HTTP_HOSTS.get(answers.dashboard, '127.0.0.1')}:{PORT}"
    values = {
        "config": folder / "coserve.yaml",
        "http": f"{http:<63}# the dashboard, and /metrics for Prometheus",
        "database": _flow(f"sqlite:///{data / 'inspection.db'}"),
        "journal": _flow(str(data / "journal")),
        "images": _flow(str(data / "images")),
        "catalog": CATALOG,
        "devices": _device_lines(answers.memory),
        "keep": f", images_for: {answers.keep}" if answers.keep else "",
        "free": size(free_floor(folder / data)),
        "security": _SECURITY if answers.dashboard == "network" else "",
    }
    return Template(_template("line.yaml")).substitute(values).rstrip("\n") + "\n"


def _template(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _device_lines(memory: Mapping[str, int]) -> str:
    cores = psutil.cpu_count() or 1
    threads = max(1, (cores - 1) // 2)
    lines: list[str] = []
    for device, budget in memory.items():
        lines.append(f"  {device}:\n    expert_memory: {size(budget)}    # for experts; they are switched within it\n")
        if device == "cpu":
            lines.append(f"    executors: {min(cores, 2)}          # measured instead of guessed: coserve profile\n")
            lines.append(f"    threads: {threads}\n")
        else:
            cache = size(max(10**8, psutil.virtual_memory().total // 4 // len(memory) // 10**8 * 10**8))
            lines.append(f"    host_cache: {cache}       # experts that wait in RAM for this GPU\n")
    return "".join(lines).rstrip("\n")


def rules_text(boards: Mapping[str, Components]) -> str:
    lines = [
        "# Which expert looks at which component, and what passes: docs/rules.md",
        "# After a change:  coserve rules check rules.yaml  and  coserve reload",
        "boards:",
    ]
    for board, components in boards.items():
        lines += [f"  {_flow(board)}:", "    time_limit: 60s   # what is missing then is unknown"]
        lines.append("    components:")
        lines += [f"      {_flow(component)}: {_flow(amount)}" for component, amount in components.items()]
    return "\n".join(lines) + "\n\n" + _template("classifiers.yaml")


def _flow(value: Any) -> str:
    """Return a value on one line, quoted where rules need it: to YAML 1.2, `1e3` is a number."""
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6).removesuffix("...\n").strip()
    return text if read_yaml_text(text, "").data == value else json.dumps(value, ensure_ascii=False)
