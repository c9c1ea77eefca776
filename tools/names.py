"""Names that people bring in lists and as file names, and names made of them for files and for ids on the wire."""

import codecs
import hashlib
import re
import unicodedata
from pathlib import Path

from routing_rules.names import NAME_EXPECTED, name_in_use

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_NOT_IN_FILE_NAME = re.compile(r"[/\\\x00]")
_FILE_NAME_BYTES = 120


def read_text(file: Path, encoding: str = "utf-8-sig") -> str:
    """Return the text of a file. A byte-order mark says more than `encoding`.

    Raises ValueError with the line of what is no text, LookupError for an encoding that nobody knows, OSError.
    """
    content = file.read_bytes()
    if content.startswith(codecs.BOM_UTF8):
        encoding = "utf-8-sig"
    elif content.startswith(_UTF16):
        encoding = "utf-16"
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        known = encoding.removesuffix("-sig").upper()
        raise ValueError(f"{file}:{line}: is not {known} text: save the file as UTF-8") from None


def legal_name(text: str) -> str:
    """Return a name as the wire has it, in NFC and without blanks around it. Raises ValueError."""
    if (name := name_in_use(text.strip())) is not None:
        return name
    if any("\udc80" <= sign <= "\udcff" for sign in text):
        raise ValueError(f"{text!a} is not UTF-8")
    raise ValueError(f"{text[:40]!a} is not {NAME_EXPECTED}")


def file_name(name: str) -> str:
    """Return a file name of at most 120 bytes that stays in its folder; names that differ have other file names."""
    name = unicodedata.normalize("NFC", name)
    legal = _NOT_IN_FILE_NAME.sub("_", name).lstrip(".").encode("utf-8", "ignore")
    if 0 < len(legal) <= _FILE_NAME_BYTES and legal == name.encode("utf-8", "surrogatepass"):
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{legal[: _FILE_NAME_BYTES - 9].decode(errors='ignore')}-{digest}"
