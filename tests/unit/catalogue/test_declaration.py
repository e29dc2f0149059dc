"""What is refused, where it is said to be, and that everything is found at once."""

from pathlib import Path

import pytest

from roundhouse.catalogue.declaration import parse
from roundhouse.catalogue.problems import DeclarationRefused
from roundhouse.catalogue.yaml_document import BYTES_MAX, DEPTH_MAX
from tests.unit.catalogue.files import GOOD, write_models

LINES = GOOD.splitlines()


def refused(text: str, base_dir: Path) -> list[str]:
    """Every problem of a text as a compiler would print it."""
    with pytest.raises(DeclarationRefused) as caught:
        parse(text, "c.yaml", base_dir)
    return [str(problem) for problem in caught.value.problems]


def line_of(text: str, whole: str) -> int:
    """The line in which a text stands, counted from 1."""
    return next(number for number, line in enumerate(whole.splitlines(), start=1) if text in line)


def test_a_right_declaration_is_taken(tmp_path: Path) -> None:
    """What is written is what is read."""
    declaration = parse(GOOD, "c.yaml", write_models(tmp_path))
    assert [tenant.name for tenant in declaration.tenants.values()] == ["acme", "globex"]
    assert [model.name for model in declaration.models.values()] == ["chat", "tagger"]
    assert [adapter.name for adapter in declaration.adapters.values()] == ["chat-acme"]


BROKEN = {
    "a YAML error": ("weight: 2", "weight: [2", "not YAML"),
    "an unknown key": ("weight: 2", "wieght: 2", "unknown key `wieght`, did you mean `weight`?"),
    "an unknown key deep inside": ("{pinned: true", "{pined: true", "unknown key `pined`, did you mean `pinned`?"),
    "a scalar where a map belongs": (
        "limits: {requests_per_minute: 600, tokens_per_minute: 200000}",
        "limits: 600",
        "`limits` must be a map with keys, not the number 600",
    ),
    "a scalar where a list belongs": ('models: ["*"]', "models: all", "`models` must be a list, not the text 'all'"),
    "a map where a scalar belongs": ("engine: onnx", "engine: {onnx: 1}", "`engine` must be"),
    "a negative limit": (
        "requests_per_minute: 600",
        "requests_per_minute: -1",
        "`requests_per_minute` must not be negative",
    ),
    "a limit that is no number": (
        "requests_per_minute: 600",
        "requests_per_minute: many",
        "`requests_per_minute` must be a whole number, not the text 'many'",
    ),
    "a limit that is true": (
        "requests_per_minute: 600",
        "requests_per_minute: yes",
        "`requests_per_minute` must be a whole number, not true",
    ),
    "half a slot": ("slots: 2", "slots: 2.5", "`slots` must be a whole number"),
    "a weight of zero": ("weight: 2", "weight: 0", "`weight` must be more than 0"),
    "a weight without end": ("weight: 2", "weight: .inf", "`weight` must be"),
    "a class that there is not": (
        "class: interactive",
        "class: urgent",
        "`class` must be 'interactive', 'standard' or",
    ),
    "a path that is not there": ("path: models/chat", "path: models/gone", "there is no "),
    "a second model of the name": ("name: tagger", "name: chat", "the name `chat` is taken by line 11"),
    "an adapter with a model's name": ("name: chat-acme", "name: tagger", "the name `tagger` is taken by line 20"),
    "a second tenant of the name": ("name: globex", "name: acme", "the name `acme` is taken by line 3"),
    "a key twice": ("    slots: 2", "    slots: 2\n    slots: 3", "the key `slots` is here twice"),
    "a tenant that is not declared": ("tenants: [acme]", "tenants: [acme, other]", "there is no tenant `other`"),
    "an adapter's tenant that is not declared": ("tenant: acme", "tenant: other", "there is no tenant `other`"),
    "a base that is not declared": ("base: chat", "base: other", "there is no model `other`"),
    "a base that takes no adapters": ("base: chat", "base: tagger", "the model `tagger` takes no adapters"),
    "a name with a slash": ("name: globex", "name: glo/bex", "`name` must be 1 to 128 letters"),
    "a name with a brace": ("name: globex", "name: 'glo}bex'", "`name` must be 1 to 128 letters"),
    "a name with a line end": ("name: globex", 'name: "globex\\n"', "`name` must be 1 to 128 letters"),
    "a name that is too long": ("name: globex", f"name: {'x' * 129}", "`name` must be 1 to 128 letters"),
    "a name that YAML takes for a truth": ("name: globex", "name: no", "`name` must be text, not false"),
    "a missing key": ("    engine: onnx\n", "", "`engine` is missing"),
    "a size that is none": ("device: 64MiB", "device: 64 elephants", "must be `auto` or a size such as 64MiB"),
    "a size below zero": ("device: 64MiB", "device: -1", "must be `auto` or a size such as 64MiB"),
    "money below zero": ("output: 0.60", "output: -0.60", "must be an amount that is not negative"),
    "money that is none": ("output: 0.60", "output: cheap", "must be an amount such as 0.15"),
    "money that is not a number": ("output: 0.60", "output: .nan", "must be an amount"),
    "a currency that is none": ("currency: EUR", "currency: euros", "`currency` must be a currency code"),
    "another version of the format": ("version: 1", "version: 2", "`version` must be 1"),
    "a tag": ("name: globex", "name: !!python/name:os.system globex", "the tag"),
    "a fallback that is not declared": (
        "engine: onnx",
        "engine: onnx\n    fallback: other",
        "there is no other model `other`",
    ),
    "a fallback to itself": (
        "engine: onnx",
        "engine: onnx\n    fallback: tagger",
        "there is no other model `tagger`",
    ),
    "a fallback that is called otherwise": (
        "engine: onnx",
        "engine: onnx\n    fallback: chat",
        "the model `chat` is called in another way",
    ),
    "no device at all": ("engine: onnx", "engine: onnx\n    tensor_parallel: 0", "`tensor_parallel` must be"),
    "an engine that is called otherwise": (
        "engine: onnx",
        "engine: onnx\n    interface: llm",
        "the engine `onnx` is called as `tensors`",
    ),
}


def test_adapters_need_room_in_a_vllm_base(tmp_path: Path) -> None:
    """Refused where the adapter names its base; with room it is taken. More room than requests, or room in an engine
    that finds it by itself, is a mistake."""
    root = write_models(tmp_path)
    found = refused(GOOD.replace("engine: reference", "engine: vllm", 1), root)
    assert len(found) == 1, found
    assert "the model `chat` (vllm) has no room for adapters: give it `adapter_slots`" in found[0]
    assert int(found[0].split(":")[1]) == line_of("base: chat", GOOD)
    parse(GOOD.replace("engine: reference", "engine: vllm\n    adapter_slots: 2", 1), "c.yaml", root)
    for text, reason in (
        ("engine: vllm\n    adapter_slots: 200", "more adapters than the"),
        ("engine: reference\n    adapter_slots: 2", "only `vllm` is told"),
    ):
        (problem,) = refused(GOOD.replace("engine: reference", text, 1), root)
        assert reason in problem


@pytest.mark.parametrize("broken", BROKEN)
def test_what_is_wrong_is_refused_at_its_place(tmp_path: Path, broken: str) -> None:
    """B44: each kind of mistake is refused with the line that it stands in, and never a default instead."""
    right, wrong, reason = BROKEN[broken]
    assert right in GOOD
    found = refused(GOOD.replace(right, wrong, 1), write_models(tmp_path))
    assert len(found) == 1, found
    assert reason in found[0]
    expected = line_of(right.strip(), GOOD)
    line = int(found[0].split(":")[1])
    if broken == "a YAML error":
        assert line in (expected, expected + 1)  # a parser notices an open bracket where the next key begins
    elif broken == "a missing key":
        assert line == line_of("name: tagger", GOOD)
    elif "\n" in wrong:
        assert line == expected + 1
    else:
        assert line == expected


def test_the_column_is_that_of_the_value_or_key(tmp_path: Path) -> None:
    """An editor jumps to the very word."""
    text = GOOD.replace("requests_per_minute: 600", "requests_per_minute: -1").replace("weight: 2", "wieght: 2")
    found = refused(text, write_models(tmp_path))
    row = LINES[5].replace("600", "-1")
    assert found == [
        "c.yaml:4:5: unknown key `wieght`, did you mean `weight`?",
        f"c.yaml:6:{row.index('-1') + 1}: `requests_per_minute` must not be negative",
    ]


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    """B44: who mends a file should not need a try for each mistake; a bad item makes no second one."""
    text = (
        GOOD.replace("version: 1", "version: 7")
        .replace("weight: 2", "wieght: 2")
        .replace("path: models/chat", "path: models/gone")
        .replace("name: tagger", "name: chat")
        .replace("base: chat", "base: other")
    )
    found = refused(text, write_models(tmp_path))
    lines = [int(problem.split(":")[1]) for problem in found]
    assert lines == [1, 4, 12, 20, 26]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "c.yaml:1:1: the file is empty"),
        ("\n# nothing\n", "c.yaml:1:1: the file is empty"),
        ("---\n", "must be a map with keys, not nothing"),
        ("just text", "must be a map with keys, not the text 'just text'"),
        ("- 1", "must be a map with keys, not a list"),
        ("version: 1\nmodels: 5", "c.yaml:2:9: `models` must be a list, not the number 5"),
        ("version: 1\nmodels: [5]", "must be a map with keys, not the number 5"),
        ("version: 1\n? [a]\n: b", "c.yaml:2:3: a key must be text"),
        ("a: 1\n---\nb: 2", "not YAML: expected a single document"),
        ("version: \0", "not YAML"),
        ("x: " + "[" * (DEPTH_MAX + 5) + "]" * (DEPTH_MAX + 5), "nested too deeply"),
        ("x" * (BYTES_MAX + 1), "larger than"),
    ],
)
def test_what_is_no_declaration_at_all(tmp_path: Path, text: str, reason: str) -> None:
    """B44: empty, of another shape, or made to exhaust the reader."""
    assert any(reason in problem for problem in refused(text, tmp_path)), refused(text, tmp_path)


def test_aliases_cannot_make_a_small_file_large(tmp_path: Path) -> None:
    """Nine levels of nine aliases would be 387 million values; the reader stops long before."""
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for level in range(1, 9):
        levels.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]")
    assert "values" in refused("\n".join(levels), tmp_path)[0]


def test_paths_are_relative_to_the_declaration(tmp_path: Path) -> None:
    """B44: the same file means the same wherever it is applied from."""
    declaration = parse(GOOD, "c.yaml", write_models(tmp_path))
    assert declaration.path_of("../x/./y") == tmp_path.parent / "x" / "y"
    assert declaration.path_of("/abs") == Path("/abs")


def test_a_language_model_needs_its_files(tmp_path: Path) -> None:
    """A checkpoint without config.json or tokenizer.json is refused now, not when the first tenant calls."""
    write_models(tmp_path)
    (tmp_path / "models" / "chat" / "config.json").unlink()
    (tmp_path / "models" / "chat" / "tokenizer.json").unlink()
    found = refused(GOOD, tmp_path)
    assert ["config.json" in problem or "tokenizer.json" in problem for problem in found] == [True, True]


def test_a_catalogue_may_be_empty_of_things(tmp_path: Path) -> None:
    """A version alone is a right file: no tenants, no models."""
    assert parse("version: 1", "c.yaml", tmp_path).models == {}
