"""Reading YAML: every value keeps its place, and nothing a file holds can hurt the reader."""

from pathlib import Path

import pytest

from routing_rules.document import MAX_DEPTH, Document
from routing_rules.load import read_yaml, read_yaml_text

BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def a_document(text: str) -> Document:
    return read_yaml_text(text, "a.yaml")


def the_problem(text: str) -> str:
    problems = a_document(text).problems
    assert len(problems) == 1, problems
    return str(problems[0])


def test_booleans_are_those_of_yaml_1_2() -> None:
    data = a_document("[NO, no, Off, ON, yes, y, true, False, null, ~]").data
    assert data == ["NO", "no", "Off", "ON", "yes", "y", True, False, None, None]


def test_numbers_are_those_of_yaml_1_2() -> None:
    data = a_document("[12, -3, 010, 0x1F, 0o17, 1.5, .5, 1e3, 20:30, 1_000, .inf, .nan, 1e999, 2026-11-21]").data
    assert data == [12, -3, 10, 31, 15, 1.5, 0.5, 1000.0, "20:30", "1_000", ".inf", ".nan", "1e999", "2026-11-21"]


def test_quoted_scalars_are_text() -> None:
    assert a_document("""["1", '2', "true", !!str 3]""").data == ["1", "2", "true", "3"]


def test_keys_are_the_text_as_written() -> None:
    assert a_document("{0402: 1, NO: 2, 1e3: 3, null: 4, true: 5, ~: 6}").data == {
        "0402": 1,
        "NO": 2,
        "1e3": 3,
        "null": 4,
        "true": 5,
        "~": 6,
    }


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


def test_duplicate_keys_are_mistakes_at_their_second_place() -> None:
    assert the_problem("a: 1\nb: {c: 1, d: 2, c: 3}\n") == (
        "a.yaml:2:17: duplicate key `c`: it is already in line 2; keep one of them"
    )


def test_all_duplicate_keys_are_found_at_once() -> None:
    problems = a_document("a: 1\na: 2\nb:\n  c: 1\n  c: 2\n").problems
    assert [(problem.line, problem.column) for problem in problems] == [(2, 1), (5, 3)]


def test_aliases_give_the_value_and_the_place_of_their_anchor() -> None:
    document = a_document("a: &x {k: 1}\nb: *x\n")
    assert document.data == {"a": {"k": 1}, "b": {"k": 1}}
    assert document.where(("b", "k")) == (1, 11)
    assert document.where(("b",), key=True) == (2, 1)


def test_an_alias_bomb_is_refused_before_it_grows() -> None:
    assert "aliases expanded" in the_problem(BOMB)


def test_an_alias_that_contains_itself_is_refused() -> None:
    assert the_problem("a: &x [1, *x]") == "a.yaml:1:11: `*x` contains itself"


def test_an_alias_to_nothing_is_refused() -> None:
    assert the_problem("a: *x").startswith("a.yaml:1:4: `*x` refers to nothing")


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? "])
def test_deep_nesting_is_refused_without_recursion(opening: str) -> None:
    problem = str(a_document(opening * 50_000).problems[0])
    assert f"deeper than {MAX_DEPTH}" in problem or "not YAML" in problem


def test_nesting_by_aliases_is_as_deep_as_it_looks_to_a_reader_of_the_data() -> None:
    text = "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [[*a{n - 1}]]\n" for n in range(1, 40))
    assert "deeper than" in the_problem(text)


@pytest.mark.parametrize(
    ("text", "place"),
    [("a: [1, 2\nb: 3\n", "2:2"), ("a: 1\n\tb: 2\n", "2:1"), ("a: b: c\n", "1:5"), ("a: 'open\n", "2:1")],
)
def test_text_that_is_not_yaml_is_one_problem_with_its_place(text: str, place: str) -> None:
    assert the_problem(text).startswith(f"a.yaml:{place}: not YAML: ")


def test_a_tab_is_named_as_the_cause() -> None:
    assert "indent with spaces" in the_problem("a:\n\tb: 2\n")


def test_control_characters_have_their_place() -> None:
    assert the_problem("a: ü\nb: \x00").startswith("a.yaml:2:4: not YAML: ")


@pytest.mark.parametrize("text", ["a: !!python/object/apply:os.system [ls]", "a: !include b.yaml", "a: !!int 3"])
def test_tags_are_refused(text: str) -> None:
    assert "a tag" in the_problem(text)
    assert the_problem(text).startswith("a.yaml:1:4: ")


def test_a_second_document_is_refused() -> None:
    assert the_problem("a: 1\n---\nb: 2\n").startswith("a.yaml:2:1: a second document")


def test_keys_must_be_text() -> None:
    assert the_problem("expert: {{component}: 1}").startswith("a.yaml:1:10: a key must be text")


def test_lone_surrogates_are_a_problem_not_an_exception() -> None:
    assert the_problem("a: \ud800").startswith("a.yaml:1:4: ")


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "~"])
def test_an_empty_file_has_no_data_and_no_problem(text: str) -> None:
    document = a_document(text)
    assert document.data is None
    assert document.problems == ()


def test_a_file_that_is_missing_says_so(tmp_path: Path) -> None:
    document = read_yaml(tmp_path / "no.yaml")
    assert str(document.problems[0]) == f"{tmp_path}/no.yaml:1:1: cannot read the file: No such file or directory"


def test_a_folder_instead_of_a_file_says_so(tmp_path: Path) -> None:
    assert "Is a directory" in str(read_yaml(tmp_path).problems[0])


def test_a_file_that_is_not_utf_8_names_the_first_wrong_byte(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("a: 1\nb: ü".encode("latin-1"))
    assert str(read_yaml(path).problems[0]).startswith(f"{path}:2:4: not UTF-8")


def test_a_byte_order_mark_and_windows_line_ends_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "windows.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")
    document = read_yaml(path)
    assert document.data == {"a": 1, "b": 2}
    assert document.where(("b",)) == (2, 4)


def test_a_huge_file_is_refused_by_its_size(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    with path.open("wb") as file:
        file.truncate(9 * 1024 * 1024)
    assert "larger than 8 MiB" in str(read_yaml(path).problems[0])
