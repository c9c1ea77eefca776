"""Texts and names that people bring in lists, data sets and as file names, and file names made of names."""

import codecs
import hashlib
import re
from pathlib import Path
from unicodedata import normalize

from daemon.wire.messages import NAME_EXPECTED, name_in_use
from tools.terminal.console import CommandError

_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_FILE_NAME_BYTES = 120


def read_text(file: Path, encoding: str = "utf-8") -> str:
    """Return the text of a file. A byte-order mark overrides `encoding`. Raises CommandError with the line."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise CommandError(f"{file}: cannot be read ({error.strerror})") from error
    encoding = next((name for mark, name in _MARKS.items() if content.startswith(mark)), encoding)
    try:
        text, at = content.decode(encoding), content.find(b"\0")
    except UnicodeDecodeError as error:
        text, at = "\0", error.start
    if "\0" not in text:  # UTF-16 without a mark is text of UTF-8 and Windows-1252, too
        return text
    line, remedy = content[:at].count(b"\n") + 1, "save it as UTF-8 (serials: or name their --encoding)"
    raise CommandError(f"{file}:{line}: is not {encoding.upper()} text: {remedy}")


def legal_name(text: str, where: object) -> str:
    """Return a name as the wire has it, in NFC and without blanks around it. CommandError begins with `where`."""
    if (name := name_in_use(text.strip())) is not None:
        return name
    is_utf8 = not any("\udc80" <= sign <= "\udcff" for sign in text)
    expected = NAME_EXPECTED if is_utf8 else "UTF-8"
    raise CommandError(f"{where}: {text[:40]!a} is not {expected}: correct it")


def file_name(name: str) -> str:
    """Return a file name of at most 120 bytes that stays in its folder; names that differ have other file names."""
    name = normalize("NFC", name)
    legal = re.sub(r"[/\\\x00]", "_", name).lstrip(".").encode("utf-8", "ignore")
    if 0 < len(legal) <= _FILE_NAME_BYTES and legal == name.encode("utf-8", "surrogatepass"):
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{legal[: _FILE_NAME_BYTES - 9].decode(errors='ignore')}-{digest}"
