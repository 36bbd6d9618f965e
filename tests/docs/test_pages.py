"""Links, anchors, commands, settings, scripts and messages on the pages exist, and mkdocs knows
every page."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel
from support.pages import DOCS, PAGES, ROOT, anchors, blocks, commands, links, prose

from megatron_stare.algorithms import METHODS
from megatron_stare.cli import parser
from megatron_stare.config.schema import Config
from megatron_stare.registry import resolve

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
SECTIONS = "|".join(Config.model_fields)
# what looks like a setting and is the name of a file, of SGLang's code, or of a method's argument
OTHER_NAMES = re.compile(
    r"\.(json|jsonl|yaml|safetensors|index)\b|^sglang\.(srt|launch)|^batch\.(log_prob|surprisal|selected_by)$"
)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links(page):
        if re.match(r"https?:|mailto:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if page.is_relative_to(DOCS) and target.suffix == ".md":
            assert target.is_relative_to(DOCS), f"{link}: the site has no such page"
        if anchor:
            for maker, known in anchors(target).items():
                assert anchor in known, f"{link}: {maker} knows {sorted(known)}"


def written(page: Path) -> str:
    """The page without what tools write into it."""
    made = {"docs/configuration.md", "docs/metrics.md"}
    if str(page.relative_to(ROOT)) in made:
        return ""
    return re.sub(
        r"<!-- (?:house|rules|made by)[^>]*-->.*?<!-- (?:/|to here)[^>]*-->",
        "",
        page.read_text(),
        flags=re.DOTALL,
    )


def test_pages_are_not_longer_together_than_one_reads() -> None:
    words = {page: len(written(page).split()) for page in DOCS.rglob("*.md")}
    assert sum(words.values()) <= 45_000, sorted(words.items(), key=lambda item: -item[1])[:10]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_lines_are_100_columns_wide(page: Path) -> None:
    """Tables, pictures, addresses and code are exempt."""
    code = False
    for number, line in enumerate(written(page).splitlines(), 1):
        code ^= line.startswith("```")
        exempt = code or line.startswith(("|", "    ", "![")) or "http" in line
        assert len(line) <= 100 or exempt, f"{page}:{number}"


def test_a_link_that_leads_nowhere_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b` c\n\n[x](gone.md#there) and"
        " [y](#a-b-c)\n\n```bash\n[no](link.md)\n```\n`[no](b.md)`\n"
    )
    assert links(page) == ["gone.md#there", "#a-b-c"]
    assert anchors(page) == {"GitHub": {"a-b-c"}, "mkdocs": {"a-b-c"}}


def settings(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The full name of every setting, sections in sections too."""
    for key, info in section.model_fields.items():
        yield prefix + key
        for kind in (info.annotation, *get_args(info.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from settings(kind, f"{prefix}{key}.")


@pytest.fixture(scope="module")
def known() -> set[str]:
    of_methods = {
        f"algorithm.{field}"
        for path in METHODS.values()
        for field in resolve(path, {}, "").__dataclass_fields__
    }
    return {*settings(Config), *of_methods, "algorithm.name"}


def unknown_settings(text: str, known: set[str]) -> list[str]:
    """Names that a text sets as code and that look like settings, but are none."""
    named = re.findall(rf"`((?:{SECTIONS})\.[a-z][a-z_0-9.]*[a-z_0-9])[`=:]", text)
    return [name for name in named if name not in known and not OTHER_NAMES.search(name)]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_setting_that_is_named_exists(page: Path, known: set[str]) -> None:
    text = prose(page)
    # of a table's rows, what comes after the other project's names
    if page.stem.startswith("from_"):
        text = re.sub(r"^\| [^|]* \|", "|", text, flags=re.MULTILINE)
    assert unknown_settings(text, known) == []


def fault_of(line: str, known: set[str]) -> str | None:
    """Fault of a command on a page, or None where there is none or the command is not ours. Faults
    are a missing script or configuration, and an option or setting that does not exist."""
    if not re.search(r"(^|[/ ])(megatron-stare|scripts/\S+\.sh) ", f"{line} "):
        return None
    words = [word for word in shlex.split(line) if not re.match(r"[A-Z_]+=", word)]
    if missing := [
        w for w in words if re.fullmatch(r"scripts/[\w./-]+\.sh", w) and not (ROOT / w).is_file()
    ]:
        return f"no script {missing[0]}"
    # of a method of the page's own
    own = {key for key in re.findall(r"(algorithm\.\w+)=", line) if "my_" in line}
    settings = {key for word in words for key in re.findall(r"^([a-z_]+\.[a-z_.]+)=", word)}
    if unknown := settings - own - known:
        return f"no setting {sorted(unknown)[0]}"
    if Path(words[0]).name != "megatron-stare" or "..." in words:
        return None
    words = words[1 : words.index(">") if ">" in words else None]
    try:
        args, rest = parser().parse_known_args([word for word in words if word != "[CONFIG]"])
    except SystemExit:
        return "not a command line"
    if options := [word for word in rest if word.startswith("-")]:
        return f"no option {options[0]}"
    config = str(getattr(args, "config", None) or "")
    if config.startswith("configs/") and not (ROOT / config).is_file():
        return f"no configuration {config}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_is_one(page: Path, known: set[str]) -> None:
    assert {line: fault for line in commands(page) if (fault := fault_of(line, known))} == {}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("megatron-stare train configs/quickstart.yaml run.steps=2 --dry-run > out", None),
        ("megatron-stare train configs/quickstart.yaml run.stepz=2", "no setting run.stepz"),
        ("megatron-stare train configs/quickstep.yaml", "no configuration configs/quickstep.yaml"),
        ("megatron-stare train my.yaml --dryrun", "no option --dryrun"),
        ("megatron-stare trian my.yaml", "not a command line"),
        ("A=1 bash scripts/run_7b.sh", "no script scripts/run_7b.sh"),
        ("bash scripts/quickstart.sh eval.promts=1", "no setting eval.promts"),
        ("echo scripts are files", None),
    ],
)
def test_what_is_wrong_with_a_command_is_seen(
    line: str, fault: str | None, known: set[str]
) -> None:
    assert fault_of(line, known) == fault


def test_a_setting_that_does_not_exist_is_seen(known: set[str]) -> None:
    text = (
        "`run.steps`, `run.stepz`, `algorithm.entropy_target: 0.3`, `rollout.tokens=3`,"
        " `eval.jsonl`, run.nothing"
    )
    assert unknown_settings(text, known) == ["run.stepz", "rollout.tokens"]


def test_mkdocs_has_every_page_in_its_contents() -> None:
    def files(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for below in entry.values() if isinstance(entry, dict) else entry:
                yield from files(below)

    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = list(files(site["nav"]))
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def unquoted(text: str) -> str:
    """Source code as the text that it prints, as far as parts of one message go: joined strings,
    numbers as {}."""
    joined = re.sub(r'"\s*\n\s*f?"', "", text)
    return re.sub(r"\{[^{}]*\}", "{}", joined)


@pytest.fixture(scope="module")
def source() -> str:
    folders = ("megatron_stare", "scripts", "tools")
    return "\n".join(
        unquoted(f.read_text())
        for d in folders
        for f in (ROOT / d).rglob("*")
        if f.suffix in (".py", ".sh")
    )


def symptoms() -> list[str]:
    """The headings of the page that are messages; `...` stands for what differs."""
    return re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)


def test_symptoms_are_found() -> None:
    assert len(symptoms()) >= 20 and len(set(symptoms())) == len(symptoms())


@pytest.mark.parametrize("symptom", symptoms())
def test_a_symptom_is_what_the_code_prints(symptom: str, source: str) -> None:
    pieces = [piece.strip() for piece in symptom.split("...")]
    pattern = r"(?:\{\}|[^\n\"]){0,80}?".join(re.escape(piece) for piece in pieces if piece)
    assert sum(map(len, pieces)) > 12, "too short to say which message it is"
    assert re.search(pattern, source), symptom


@pytest.mark.parametrize("page", sorted(DOCS.glob("from_*.md")), ids=lambda page: page.stem)
def test_settings_tables_name_settings(page: Path, known: set[str]) -> None:
    """The last column of every row is about settings of ours that exist, or says that there is
    none."""
    rows = [row for row in page.read_text().splitlines() if row.startswith("| `")]
    assert len(rows) >= 20
    for row in rows:
        ours = row.split(" | ")[1]
        assert ours.startswith("none") or any(
            name in known for name in re.findall(r"`([a-z_.0-9]+)", ours)
        ), row


def test_yaml_blocks_are_configurations() -> None:
    """Sections and keys of every block of YAML exist; a method's settings are looked at when it is
    read."""
    for page in PAGES:
        for block in blocks(page):
            if block.language != "yaml":
                continue
            tree = yaml.safe_load(block.text)
            for section, values in tree.items():
                assert section == "defaults" or section in Config.model_fields, (
                    f"{page}:{block.line}"
                )
                model = Config.model_fields[section].annotation if section != "defaults" else None
                if (
                    isinstance(values, dict)
                    and isinstance(model, type)
                    and issubclass(model, BaseModel)
                ):
                    assert section == "algorithm" or values.keys() <= model.model_fields.keys(), (
                        f"{page}:{block.line}"
                    )
