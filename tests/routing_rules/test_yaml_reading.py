"""Reading YAML: every value keeps its place, and nothing a file holds can hurt the reader."""

from pathlib import Path

import pytest

from routing_rules.document import MAX_DEPTH, Document
from routing_rules.load import read_yaml, read_yaml_text

#: A small text of nested aliases that stands for a billion values.
BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
#: Nesting by aliases counts as deep as it is in the data.
NESTED = "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [[*a{n - 1}]]\n" for n in range(1, 40))


def a_document(text: str) -> Document:
    return read_yaml_text(text, "a.yaml")


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("[NO, no, Off, ON, yes, y]", ["NO", "no", "Off", "ON", "yes", "y"]),
        ("[true, False, null, ~]", [True, False, None, None]),
        ("[12, -3, 010, 0x1F, 0o17, 1.5, .5, 1e3]", [12, -3, 10, 31, 15, 1.5, 0.5, 1000.0]),
        ("[20:30, 1_000, .inf, .nan, 1e999, 2026-11-21]", ["20:30", "1_000", ".inf", ".nan", "1e999", "2026-11-21"]),
        ("""["1", '2', "true", !!str 3]""", ["1", "2", "true", "3"]),
        ("{0402: 1, NO: 2, 1e3: 3, null: 4, ~: 5}", {"0402": 1, "NO": 2, "1e3": 3, "null": 4, "~": 5}),
    ],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2_and_keys_the_text_as_written(text: str, data: object) -> None:
    assert a_document(text).data == data


def test_values_are_the_text_as_written_where_they_are_names() -> None:
    text = "names: [0402, NO, true, 1e3, ~, 'x']\nnc: 0x6\n"
    read = read_yaml_text(text, "a.yaml", as_written=True).data
    assert read == {"names": ["0402", "NO", "true", "1e3", None, "x"], "nc": "0x6"}


def test_text_is_read_in_nfc() -> None:
    assert a_document("e\u0301: e\u0301\n").data == {"\xe9": "\xe9"}
    assert "duplicate key" in str(a_document("e\u0301: 1\n\xe9: 2\n").problems[0])


def test_every_key_and_value_knows_its_line_and_column() -> None:
    document = a_document("boards:\n  a:\n    components: {R: 1, Ü: [U1, U2]}\n")
    assert document.where(("boards",), key=True) == (1, 1)
    assert document.where(("boards",)) == (2, 3)
    assert document.where(("boards", "a", "components")) == (3, 17)
    assert document.where(("boards", "a", "components", "R"), key=True) == (3, 18)
    assert document.where(("boards", "a", "components", "R")) == (3, 21)
    assert document.where(("boards", "a", "components", "Ü", 1)) == (3, 32)


def test_an_absent_value_is_shown_at_the_key_that_should_hold_it() -> None:
    document = a_document("boards:\n  a:\n    components: {R: 1}\n")
    assert document.where(("boards", "a", "time_limit")) == (2, 3)
    assert document.where(("nothing", "at", "all")) == (1, 1)


def test_aliases_give_the_value_and_the_place_of_their_anchor() -> None:
    document = a_document("a: &x {k: 1}\nb: *x\n")
    assert document.data == {"a": {"k": 1}, "b": {"k": 1}}
    assert document.where(("b", "k")) == (1, 11)
    assert document.where(("b",), key=True) == (2, 1)


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("a: 1\nb: {c: 1, d: 2, c: 3}\n", "2:17", "duplicate key `c`: it is already in line 2; keep one of them"),
        (BOMB, "6:8", "aliases expanded"),
        (NESTED, "20:13", "deeper than"),
        ("a: &x [1, *x]", "1:11", "`*x` contains itself"),
        ("a: *x", "1:4", "`*x` refers to nothing"),
        ("a: [1, 2\nb: 3\n", "2:2", "not YAML: "),
        ("a: 1\n\tb: 2\n", "2:1", "not YAML: "),
        ("a: b: c\n", "1:5", "not YAML: "),
        ("a: 'open\n", "2:1", "not YAML: "),
        ("a:\n\tb: 2\n", "2:1", "indent with spaces"),
        ("a: ü\nb: \x00", "2:4", "not YAML: "),
        ("a: !!python/object/apply:os.system [ls]", "1:4", "a tag"),
        ("a: !include b.yaml", "1:4", "a tag"),
        ("a: !!int 3", "1:4", "a tag"),
        ("a: 1\n---\nb: 2\n", "2:1", "a second document"),
        ("expert: {{component}: 1}", "1:10", "a key must be text"),
        ("a: \ud800", "1:4", ""),
    ],
)  # fmt: skip
def test_text_that_cannot_be_read_is_one_problem_with_its_place(text: str, place: str, message: str) -> None:
    (problem,) = map(str, a_document(text).problems)
    assert problem.startswith(f"a.yaml:{place}: ")
    assert message in problem


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, ": cannot read the file: No such file or directory"),
        ("a folder", ": cannot read the file: Is a directory"),
        ("a: 1\nb: ü".encode("latin-1"), ":2:4: not UTF-8"),
        (bytes(9 * 1024 * 1024), ":1:1: the file is larger than 8 MiB"),
    ],
)
def test_a_file_that_cannot_be_read_says_so(tmp_path: Path, content: bytes | str | None, message: str) -> None:
    path = tmp_path if content == "a folder" else tmp_path / "rules.yaml"
    if isinstance(content, bytes):
        path.write_bytes(content)
    (problem,) = map(str, read_yaml(path).problems)
    assert problem.startswith(f"{path}{message}")


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? "])
def test_deep_nesting_is_refused_without_recursion(opening: str) -> None:
    problem = str(a_document(opening * 50_000).problems[0])
    assert f"deeper than {MAX_DEPTH}" in problem or "not YAML" in problem


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "~"])
def test_an_empty_file_has_no_data_and_no_problem(text: str) -> None:
    document = a_document(text)
    assert document.data is None
    assert document.problems == ()


def test_a_byte_order_mark_and_windows_line_ends_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "windows.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")
    document = read_yaml(path)
    assert document.data == {"a": 1, "b": 2}
    assert document.where(("b",)) == (2, 4)


@pytest.mark.parametrize("code", [0x7F, 0x9B, 0x61C, 0x200B, 0x200D, 0x200E, 0x202E, 0x2060, 0x2066, 0x2069, 0xFEFF])
@pytest.mark.parametrize("quoted", [True, False])
def test_a_file_with_a_character_that_is_not_seen_is_refused_at_its_place(
    tmp_path: Path, code: int, quoted: bool
) -> None:
    escape = chr(code).encode("unicode_escape").decode()
    path = tmp_path / "rules.yaml"
    for text in ('boards:\n  "m{}a": {{}}\n', 'boards:\n  "k{}": x\n', 'boards:\n  [ "{}U1"]\n'):
        path.write_text(text.format(f"\\u{code:04x}" if quoted else chr(code)), encoding="utf-8")
        if not quoted and code in (0x7F, 0x9B):
            assert read_yaml(path).problems  # YAML itself refuses it
            continue
        (problem,) = read_yaml(path).problems
        assert (problem.line, escape in problem.message) == (2, True), str(problem)
        assert chr(code) not in str(problem)


def test_rules_that_were_kept_before_are_read_whatever_their_names_hold() -> None:
    assert a_document('{"m\u202ea": 1}').data == {"m\u202ea": 1}
