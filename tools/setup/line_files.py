"""The files of a new line, as a person would write them: with a comment for what will be asked next."""

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
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
    """Write what is not there yet; what was made. FileExistsError where `coserve.yaml` or `rules.yaml` is there."""
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


CATALOG_TEXT = """\
# Which experts there are. `coserve train` and `coserve import` add each one with its file.
experts: {}
"""


def config_text(folder: Path, answers: Answers) -> str:
    """`coserve.yaml`."""
    data = answers.data
    keeping = f", images_for: {answers.keep}" if answers.keep else ""
    return f"""\
# This line's configuration; every key and its default: docs/configuration.md.
# After a change:  coserve check {folder / "coserve.yaml"}
endpoints:
  intake: ["ipc://run/intake.sock", "tcp://127.0.0.1:5570"]   # cameras; beyond this PC only with keys: docs/security.md
  results: tcp://127.0.0.1:5571                                # verdicts as they come
  control: ipc://run/control.sock                              # coserve status, top, reload, …
{_http_lines(answers)}\
database: {_flow(f"sqlite:///{data / 'inspection.db'}")}
journal: {_flow(str(data / "journal"))}        # accepted images, until they have a verdict
images: {_flow(str(data / "images"))}          # images that are kept
rules: rules.yaml
catalog: {CATALOG}
devices:
{_device_lines(answers.memory)}\
policy: coserve-plus
# Below this much free space the oldest images go, evidence last: docs/retention.md
retention: {{keep: [fail, review, unknown]{keeping}, free: {size(free_floor(folder / data))}}}
{_security_lines(answers)}"""


def _http_lines(answers: Answers) -> str:
    is_off = answers.dashboard == "no"
    line = f"  {'# ' if is_off else ''}http: http://{_HTTP_HOSTS.get(answers.dashboard, '127.0.0.1')}:{PORT}"
    return f"{line:<63}# the dashboard, and /metrics for Prometheus\n"


def _security_lines(answers: Answers) -> str:
    if answers.dashboard != "network":
        return ""
    return f"""\
security:
  http_token: {TOKEN}      # who opens the dashboard from another PC types what this file holds
"""


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
    return "".join(lines)


def rules_text(boards: Mapping[str, Components]) -> str:
    """`rules.yaml`: a classifier for each component type."""
    lines = [
        "# Which expert looks at which component, and what passes: docs/rules.md",
        "# After a change:  coserve rules check rules.yaml  and  coserve reload",
        "boards:",
    ]
    for board, components in boards.items():
        lines += [f"  {_flow(board)}:", "    time_limit: 60s   # what is missing then is unknown"]
        lines.append("    components:")
        lines += [f"      {_flow(component)}: {_flow(amount)}" for component, amount in components.items()]
    return "\n".join(lines) + CLASSIFIERS


CLASSIFIERS = """

classifiers:   # the first pattern that matches a component type
  "*":
    expert: "{component}"      # R0402 goes to the expert R0402
    pass: [ok]                 # every other label fails, and names the defect
    review_below: 0.85         # less sure than this: a person looks
    # then: solder             # what passes goes on to a detector:

# detectors:
#   solder: {expert: yolo-solder, fail_on: {bridge: 0.40, void: 0.55}}
# defects: {missing: D101, bridge: D201}    # your codes
"""


def _flow(value: Any) -> str:
    """A value on one line, quoted where the reader of rules needs it: to YAML 1.2, `1e3` is a number."""
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6).removesuffix("...\n").strip()
    return text if read_yaml_text(text, "").data == value else json.dumps(value, ensure_ascii=False)
