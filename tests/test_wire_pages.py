"""docs/protocol.md, results.md and cameras.md are complete: what the code says and stores, no more and no less."""

import ast
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import pytest

from daemon import operations
from daemon.storage.database import rows
from daemon.storage.database.schema import VIEWS, metadata
from daemon.storage.database.store import Store
from daemon.wire import messages
from daemon.wire.messages import Code
from tests import ROOT
from tests.tools.client.scripted_daemon import ScriptedDaemon
from tests.tools.run_commands import coserve
from tests.waiting import PATIENCE_S
from tools.camera.layout import load_layout

DOCS = ROOT / "docs"
PROTOCOL, RESULTS, CAMERAS = (
    (DOCS / name).read_text(encoding="utf-8") for name in ("protocol.md", "results.md", "cameras.md")
)


def words(text: str) -> set[str]:
    return set(re.findall(r"`([^`\s]+)`", text))


def section(page: str, heading: str) -> str:
    """Return a section with everything below its heading, up to the next one of its level."""
    level = heading.split(maxsplit=1)[0]
    _, _, rest = page.partition(f"\n{heading}")
    assert rest, heading
    return re.split(rf"^#{{1,{len(level)}}} ", rest, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("table", sorted(metadata.tables))
def test_every_column_of_a_table_is_on_the_page(table: str) -> None:
    columns = {column.name for column in metadata.tables[table].columns}
    heading = f"### `{table}`"
    if heading in RESULTS:
        first_cells = "\n".join(
            line.split("|")[1] for line in section(RESULTS, heading).splitlines() if line.startswith("|")
        )
        assert words(first_cells) == columns
    else:
        (listed,) = re.findall(rf"`{table}` \(([^)]*)\)", section(RESULTS, "### The daemon's own"))
        assert words(listed) == columns


def test_every_view_has_its_columns_on_the_page_and_there_is_no_other(tmp_path: Path) -> None:
    Store(f"sqlite:///{tmp_path}/inspection.db").close()
    rows = {
        row[1]: row[3] for row in (line.split("|") for line in section(RESULTS, "## Views").splitlines() if "|" in line)
    }
    rows = {name.strip(" `"): columns for name, columns in rows.items() if name.strip().startswith("`")}
    assert sorted(rows) == sorted(VIEWS)
    with closing(sqlite3.connect(tmp_path / "inspection.db")) as database:
        for view, listed in rows.items():
            columns = [column[1] for column in database.execute(f"PRAGMA table_info({view})")]
            without_notes = re.sub(r"\([^)]*\)", "", listed)
            assert re.findall(r"`(\w+)`", without_notes) == columns, view


def test_every_code_and_type_and_field_of_the_wire_is_on_the_page() -> None:
    assert set(get_args(Code)) == words("\n".join(line.split("|")[1] for line in _rows(PROTOCOL, "| `code` |")))
    assert set(messages._KINDS) <= words(PROTOCOL)
    fields = _asked_fields()
    assert {"id", "source", "board", "component", "designator", "captured_at", "deadline_ms", "sha256"} <= fields
    assert fields <= words(PROTOCOL), fields - words(PROTOCOL)


def _rows(page: str, head: str) -> list[str]:
    _, _, rest = page.partition(f"\n{head}")
    return [line for line in rest.split("\n\n")[0].splitlines()[2:] if line.startswith("|")]


def _asked_fields() -> set[str]:
    """Return the fields that messages.py reads of a header, or of a board in it."""
    tree = ast.parse(Path(messages.__file__).read_text(encoding="utf-8"))
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute))
    readers = {"key", "name", "name_or_none", "integer", "one_of", "flag", "time", "shape", "needed", "string", "inner"}
    return {
        call.args[0].value
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in readers
        and call.args
        and isinstance(call.args[0], ast.Constant)
        and isinstance(call.args[0].value, str)
    }


class _AnyRow(dict[str, Any]):
    def __missing__(self, key: str) -> Any:
        return {"seq": 1, "failed": "[]", "missing": "[]", "board_type": "b", "serial": "s", "source": "s"}.get(key)


def test_every_field_of_a_result_is_on_the_page() -> None:
    stage = _AnyRow(step=0)
    box = _AnyRow(step=0)
    shown = section(PROTOCOL, "## Results stream")
    message = rows.inspection_message(_AnyRow(), [stage], [box]).body
    for fields in (message, message["stages"][0], message["stages"][0]["detections"][0]):
        assert set(fields) <= words(shown), set(fields) - words(shown)
    for body in (rows.board_message(_AnyRow()).body, rows.generation_message(_AnyRow()).body):
        assert set(body) <= words(shown), set(body) - words(shown)


def test_every_request_of_control_is_on_the_page() -> None:
    tree = ast.parse(Path(operations.__file__).read_text(encoding="utf-8"))
    (handlers,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "handlers"]
    (table,) = [node for node in ast.walk(handlers) if isinstance(node, ast.Return)]
    assert isinstance(table.value, ast.Dict)
    kinds = {key.value for key in table.value.keys if isinstance(key, ast.Constant)}
    kinds |= set(operations._ASKED_OF_THE_DRIVE)
    listed = words("\n".join(line.split("|")[1] for line in _rows(section(PROTOCOL, "## Control"), "| `type` |")))
    assert listed == kinds


def test_every_option_that_the_page_on_cameras_shows_exists_and_none_is_left_out() -> None:
    told = coserve("camera", "--help", COLUMNS="200", NO_COLOR="1").stdout
    options = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", told))
    of_others = {"--no-index", "--find-links", "--list-formats-ext"}
    shown = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", CAMERAS)) - of_others
    assert shown == options - {"--help", "--seed"}


def test_the_layout_of_the_page_is_one(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", CAMERAS, re.DOTALL | re.MULTILINE)
    (tmp_path / "sensor.yaml").write_text(block, encoding="utf-8")
    assert set(load_layout(tmp_path / "sensor.yaml").parts) == {"R1", "U1"}


def test_the_python_of_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", CAMERAS, re.DOTALL | re.MULTILINE)
    assert len([line for line in block.splitlines() if line.strip()]) <= 20
    before = "def my_camera():\n    return [('A1', b'x'), ('A1', b'y')]\n"
    with ScriptedDaemon() as daemon:
        done = subprocess.run(
            [sys.executable, "-c", before + block.replace("tcp://127.0.0.1:5570", daemon.endpoint)],
            cwd=tmp_path,
            env={"PYTHONPATH": str(DOCS.parent)},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    assert done.stdout == "{'published': 2, 'accepted': 2}\n", done.stderr
