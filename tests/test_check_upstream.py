"""tools/check_upstream.py on made-up releases: every kind of change is named, and what does not concern us is not."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import check_upstream  # noqa: E402
from upstream.compare import Comparison  # noqa: E402
from upstream.declared import CONCRETE, CONTENT, DECLARED  # noqa: E402
from upstream.definitions import Definitions  # noqa: E402
from upstream.own_source import OwnSource  # noqa: E402
from upstream.project import uses_of  # noqa: E402
from upstream.release import open_release, pinned_release  # noqa: E402
from upstream.uses import Arguments, Use  # noqa: E402

Files = dict[str, str]


def wheel(folder: Path, version: str, files: Files, name: str = "megatron_core") -> Path:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in ({"megatron/core/__init__.py": ""} if name == "megatron_core" else {}).items():
            archive.writestr(file, text)
        for file, text in files.items():
            archive.writestr(file, text)
        archive.writestr(f"{name}-{version}.dist-info/METADATA", f"Name: {name}\nVersion: {version}\n")
    return path


def named(tmp_path: Path, ours: str, before: Files, after: Files, name: str = "megatron_core") -> list[str]:
    """What the tool names, "kind name: what" with names below the package."""
    old = Definitions(open_release(wheel(tmp_path, "1.0", before, name)))
    new = Definitions(open_release(wheel(tmp_path, "2.0", after, name)))
    (tmp_path / "ours.py").write_text(ours)
    uses = uses_of(ROOT, old, (tmp_path / "ours.py",), alone=True)
    found = Comparison(old, new, CONCRETE).findings(uses)
    package = "megatron.core." if name == "megatron_core" else "sglang.srt."
    return [f"{each.kind} {each.name.removeprefix(package)}: {each.what}" for each in found]


def of_core(text: str) -> Files:
    return {"megatron/core/a.py": text}


IMPORT = "from megatron.core.a import f\n"
CLASS = "from megatron.core.a import C\n"
SUBCLASS = "from megatron.core.a import C\nclass Ours(C):\n    def m(self, x): return super().m(x)\n"
DATA = "from dataclasses import dataclass\n@dataclass\n"
MADE_ELSEWHERE = "def config(self): return {'y': 1} | {'z': 2}\n" + CLASS + "C(x=1, **of(shape).config(shape))"
SUBSTITUTE = (
    "from megatron.core import a\nfrom megatron_stare.megatron.backend.cpu_backend import substituted\n"
    "with substituted(a, 'f', None): pass"
)
READ = "def g(): return f()\n"

# ours, before, after, what must be named
CHANGES = {
    "a function is gone": (IMPORT, "def f(): ...", "", ["gone a.f: from a"]),
    "renamed": (
        "from megatron.core.a import _get_queue",
        "def _get_queue(): ...",
        "def get_queue(): ...\ndef other(): ...",
        ["gone a._get_queue: perhaps get_queue now, which is new there"],
    ),
    "a keyword is gone": (IMPORT + "f(x=1)", "def f(x): ...", "def f(): ...", ["signature a.f: no longer takes x"]),
    "a keyword is renamed": (
        IMPORT + "f(use_it=1)",
        "def f(use_it=0): ...",
        "def f(it=0, other=0): ...",
        ["signature a.f: no longer takes use_it, perhaps it now"],
    ),
    "a keyword is taken by any name": (
        IMPORT + "f(x=1)",
        "def f(x): ...",
        "def f(**rest): ...",
        ["signature a.f: no longer takes x, only any name"],
    ),
    "arguments change places": (
        IMPORT + "f(1, 2)",
        "def f(x, y): ...",
        "def f(y, x): ...",
        ["signature a.f: argument 1 is y, was x", "signature a.f: argument 2 is x, was y"],
    ),
    "fewer are taken by position": (
        IMPORT + "f(1, 2)",
        "def f(x, y=0): ...",
        "def f(x, *, y=0): ...",
        ["signature a.f: takes y by name alone"],
    ),
    "one more is required": (IMPORT + "f(1)", "def f(x): ...", "def f(x, y): ...", ["signature a.f: requires y"]),
    "a default is gone": (IMPORT + "f(1)", "def f(x, y=1): ...", "def f(x, y): ...", ["signature a.f: requires y"]),
    "a default is another": (IMPORT + "f(1)", "def f(x, y=1): ...", "def f(x, y=2): ...", ["default a.f: y: 1 → 2"]),
    "another answer": (
        IMPORT + "f()",
        "def f() -> int: ...",
        "def f() -> str: ...",
        ["signature a.f: returns str, was int"],
    ),
    "a class is a function": (
        CLASS + "C()",
        "class C: ...",
        "def C(): ...",
        ["signature a.C: was a class, is a function"],
    ),
    "a constant": ("from megatron.core.a import N", "N = 'x'", "N = 'y'", ["default a.N: 'x' → 'y'"]),
    "a decorator that we count on": (
        CLASS + "C.m.cache_clear()",
        "class C:\n @cache\n def m(self): ...",
        "class C:\n def m(self): ...",
        ["signature a.C.m: decorated with nothing, was with cache"],
    ),
    "a method of what we are given": (
        CLASS + "def g(x: list[C | None]):\n    for each in x: each.m(1)",
        "class B:\n def m(self, x): ...\nclass C(B): ...",
        "class C: ...",
        ["gone a.C.m: from C"],
    ),
    "a method of what a static method is given": (
        CLASS + "class Ours:\n @staticmethod\n def g(x: C): x.m()",
        "class C:\n def m(self): ...",
        "class C: ...",
        ["gone a.C.m: from C"],
    ),
    "a method of what we made": (
        CLASS + "x, y = C(1), 2\nx.m(1)",
        "class C:\n def __init__(self, n): ...\n def m(self, x): ...",
        "class C:\n def __init__(self, n): ...\n def m(self): ...",
        ["signature a.C.m: no longer takes x"],
    ),
    "of what a function of theirs answers": (
        IMPORT + "f().part.m()",
        "class D:\n def m(self): ...\nclass C:\n def __init__(self): self.part = D()\ndef f() -> 'C': ...",
        "class D: ...\nclass C:\n def __init__(self): self.part = D()\ndef f() -> 'C': ...",
        ["gone a.D.m: from D"],
    ),
    "of what a function of ours answers": (
        CLASS + "def g() -> tuple[C, int]: ...\na, b = g()\na.n",
        "class C:\n n: int = 0",
        "class C: ...",
        ["gone a.C.n: from C"],
    ),
    "what we ask for": (
        CLASS + "def g(x: C): getattr(x, 'n', None)",
        "class C:\n n = 0",
        "class C: ...",
        ["gone a.C.n: we ask whether it is there, and it is not any more"],
    ),
    "a field of a config": (
        CLASS + "C(x=1)",
        DATA + "class B:\n x: int = 0\n@dataclass\nclass C(B): ...",
        DATA + "class B:\n z: int = 0\n@dataclass\nclass C(B): ...",
        ["signature a.C: no longer takes x"],
    ),
    "a field that is new and required": (
        CLASS + "C(x=1)",
        DATA + "class C:\n x: int",
        DATA + "class C:\n x: int\n y: int",
        ["signature a.C: requires y"],
    ),
    "a field out of a dict that is made elsewhere": (
        MADE_ELSEWHERE,
        DATA + "class C:\n x: int = 0\n y: int = 0\n z: int = 0",
        DATA + "class C:\n x: int = 0\n z: int = 1",
        ["signature a.C: no longer takes y"],
    ),
    "of a class of ours that has it as its base": (
        CLASS + "@dataclass\nclass Ours(C):\n mine: int = 0\nOurs(x=1, mine=2)",
        DATA + "class C:\n x: int = 0",
        DATA + "class C:\n y: int = 0\n mine: int = 0",
        ["signature a.C: no longer takes x", "new a.C: has a mine of its own, which ours hides"],
    ),
    "an overridden method": (
        SUBCLASS,
        "class C:\n def m(self, x): return x",
        "class C:\n def m(self, x, y=0): return y",
        ["signature a.C.m: takes y=0", "body a.C.m: its code: 2 of 2 lines taken out, 2 put in"],
    ),
    "an overridden method is gone": (
        SUBCLASS,
        "class C:\n def m(self, x): ...",
        "class C: ...",
        ["gone a.C.m: from C"],
    ),
    "a new duty": (
        SUBCLASS,
        "class C:\n def m(self, x): ...",
        "class C:\n def m(self, x): ...\n def must(self):\n  'It must.'\n  raise NotImplementedError",
        ["signature a.C: asks its subclasses for must"],
    ),
    "what is substituted": (
        SUBSTITUTE,
        "def f(): return 1\n" + READ,
        "def f(): return 2\n" + READ,
        ["body a.f: its code: 1 of 2 lines taken out, 1 put in"],
    ),
    "what is substituted is read no more": (
        SUBSTITUTE,
        "def f(): return 1\n" + READ,
        "def f(): return 1\n",
        ["gone a.f: is no longer read in a, so a substitute does nothing"],
    ),
    "what a text names": (
        "HOOKS = ('megatron.core.a.f', None)",
        "def f(): return 1",
        "def f(): return 2",
        ["body a.f: its code: 1 of 2 lines taken out, 1 put in"],
    ),
    "what a script in a text uses": (
        "run('''\n    from megatron.core.a import f\n    f(1)\n''')",
        "def f(x): ...",
        "def f(): ...",
        ["signature a.f: no longer takes x"],
    ),
    "a name that the older has not": (IMPORT, "", "def f(): ...", ["new a.f: not in megatron-core 1.0"]),
}

SAME = {
    "new and optional": (IMPORT + "f(1)", "def f(x): ...", "def f(x, y=0, *z, **w): ..."),
    "a default that we do not leave out": (IMPORT + "f(y=3)", "def f(y=1): ...", "def f(y=2): ..."),
    "by position": (IMPORT + "f(1, 3)", "def f(x, y=1): ...", "def f(x, y=2): ..."),
    "a default that a dict may bring": (
        MADE_ELSEWHERE,
        DATA + "class C:\n x: int = 0\n y: int = 0",
        DATA + "class C:\n x: int = 0\n y: int = 1",
    ),
    "the inside of what we call": (IMPORT + "f()", "def f(): return 1", "def f(): return 2"),
    "comments, docstrings and annotations of what we override": (
        SUBCLASS,
        "class C:\n def m(self, x):\n  'Old.'\n  y = x  # old\n  return y",
        "class C:\n def m(self, x: int):\n  'New.'\n  y: int = x\n  return y",
    ),
    "another spelling of the answer": (
        IMPORT + "f()",
        "def f() -> Optional[Dict[str, 'T']]: ...",
        "def f() -> dict[str, a.T] | None: ...",
    ),
    "behind another definition": (
        IMPORT + "f(x=1)",
        "def f(x): ...",
        "def copy_signature(of): ...\ndef g(x): ...\n@copy_signature(g)\ndef f(*args, **kwargs): ...",
    ),
    "in a branch": (
        IMPORT + "f(x=1)",
        "def f(x): ...",
        "try:\n    from b import f\nexcept ImportError:\n    def f(x): ...",
    ),
    "the default of a field that is read": (
        CLASS + "def g(x: C): x.n",
        "class C:\n n: int = 0",
        "class C:\n n: int = 1",
    ),
    "not used": (IMPORT, "def f(): ...\ndef g(x): ...", "def f(): ..."),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_of_what_we_use_is_named(tmp_path: Path, case: str) -> None:
    ours, before, after, expected = CHANGES[case]
    assert named(tmp_path, ours, of_core(before), of_core(after)) == expected


@pytest.mark.parametrize("case", SAME)
def test_what_does_not_concern_us_is_not_named(tmp_path: Path, case: str) -> None:
    ours, before, after = SAME[case]
    assert named(tmp_path, ours, of_core(before), of_core(after)) == []


def test_what_has_moved_is_named_with_its_new_place(tmp_path: Path) -> None:
    """And is compared there; another of the same name, which was there before, is not taken for it."""
    ours = "from megatron.core.a import f\nfrom megatron.core.a import C\nf(1)"
    before = {"megatron/core/a.py": "def f(x): ...\nclass C: ...", "megatron/core/other.py": "class C: ..."}
    after = {
        "megatron/core/b/c.py": "def f(y, x): ...",
        "megatron/core/a.py": "",
        "megatron/core/other.py": "class C: ...",
    }
    assert named(tmp_path, ours, before, after) == [
        "gone a.C: from a",
        "moved a.f: to megatron.core.b.c.f",
        "signature a.f: argument 1 is y, was x",
    ]


def test_names_are_followed_to_where_they_are_handed_on_from(tmp_path: Path) -> None:
    """A function of a package, named as the module that it is from, and moved to another behind it."""
    ours = "from megatron.core.pack import f, g\nf(x=1)\ng(1)"
    package = "megatron/core/pack/__init__.py"
    before = {package: "from .f import f\nfrom .f import *", "megatron/core/pack/f.py": "def f(x): ...\ndef g(x): ..."}
    after = {
        package: "from .f import f\nfrom ..other import inner as g",
        "megatron/core/pack/f.py": "from megatron.core.other import f",
        "megatron/core/other.py": "def f(x): ...\ndef inner(x): ...",
    }
    assert named(tmp_path, ours, before, after) == []
    after["megatron/core/other.py"] = "def f(): ...\ndef inner(x, y): ..."
    assert named(tmp_path, ours, before, after) == [
        "signature pack.f: no longer takes x",
        "signature pack.g: requires y",
    ]


def test_a_change_is_named_once_with_all_places(tmp_path: Path) -> None:
    old = Definitions(open_release(wheel(tmp_path, "1.0", of_core("def f(x): ..."))))
    new = Definitions(open_release(wheel(tmp_path, "2.0", of_core("def f(): ..."))))
    uses = [Use("call", "megatron.core.a.f", where, Arguments(1)) for where in ("x.py:1", "x.py:9", "x.py:1")]
    (found,) = Comparison(old, new, {}).findings(uses)
    assert found.where == ("x.py:1", "x.py:9")


def test_calls_of_a_base_are_held_against_the_classes_that_objects_are_of(tmp_path: Path) -> None:
    base = "class B:\n def m(self, x): ...\n def n(self): ...\n"
    old = Definitions(open_release(wheel(tmp_path, "1.0", of_core(base + "class C(B):\n def m(self, x): ..."))))
    new = Definitions(open_release(wheel(tmp_path, "2.0", of_core(base + "class C(B):\n def m(self): ..."))))
    concrete = {"megatron.core.a.B": ("megatron.core.a.C",)}
    uses = [Use("call", f"megatron.core.a.B.{name}", "x.py:1", Arguments(1)) for name in "mn"]
    found = Comparison(old, new, concrete).findings(uses)
    assert [(each.name, each.what) for each in found] == [("megatron.core.a.C.m", "no longer takes x")]


STRUCTS = "class Base(Struct):\n rid: str = None\nclass Req(Base):\n mode: str = 'abort'\n"
SERVER = """
from sglang.srt.managers.io_struct import Req
@app.api_route("/pause", methods=["GET", "POST"])
@auth_level(1)
async def pause(obj: Annotated[Req, Body()], request: Request): ...
@app.get("/info")
async def info(): ...
"""
ASKS = (
    "async def pause(client):\n"
    "    await client.post('/pause', {'mode': 'retract', 'rid': None})\n"
    "    return await client.get('/info')\n"
)


@pytest.mark.parametrize(
    ("server", "structs", "expected"),
    [
        (SERVER, STRUCTS, []),
        (SERVER, STRUCTS + " fresh: int = 0\n", []),
        (SERVER, STRUCTS + " must: int\n", ["signature managers.io_struct.Req: requires must"]),
        (SERVER, STRUCTS.replace("mode", "way"), ["signature managers.io_struct.Req: no longer takes mode"]),
        (SERVER, STRUCTS.replace("rid", "id"), ["signature managers.io_struct.Req: no longer takes rid"]),
        (SERVER.replace("/info", "/about"), STRUCTS, ["gone GET /info: the server does not know the path"]),
        (SERVER.replace("app.get", "app.post"), STRUCTS, ["gone GET /info: only POST is answered now"]),
        (
            SERVER.replace("obj: Annotated[Req, Body()], ", ""),
            STRUCTS,
            ["signature POST /pause: takes no body now"],
        ),
    ],
)
def test_paths_and_bodies_of_sglang(tmp_path: Path, server: str, structs: str, expected: list[str]) -> None:
    place = "sglang/srt/"
    before = {f"{place}entrypoints/http_server.py": SERVER, f"{place}managers/io_struct.py": STRUCTS}
    after = {f"{place}entrypoints/http_server.py": server, f"{place}managers/io_struct.py": structs}
    packages = {f"sglang/{name}": "" for name in ("__init__.py", "srt/__init__.py")}
    assert named(tmp_path, ASKS, before | packages, after | packages, "sglang") == expected


def differ(tmp_path: Path, use: Use, before: Files, after: Files, name: str = "megatron_core") -> list[str]:
    """What is said of one use that no reading finds."""
    old = Definitions(open_release(wheel(tmp_path, "1.0", before, name)))
    new = Definitions(open_release(wheel(tmp_path, "2.0", after, name)))
    return [f"{each.kind}: {each.what}" for each in Comparison(old, new, {}).findings([use])]


def test_flags_of_sglang(tmp_path: Path) -> None:
    """Those that we give must exist; of the others a default must not change, unless no flag sets it."""
    fields = "class Device:\n device: A[str, 'help'] = 'auto'\n dtype: A[str, Arg(help='')] = 'auto'\n"
    before = {"sglang/srt/arg_groups/fields/device.py": fields + " cache: A[int, Arg(no_cli=True)] = 1\n size: int = 1"}
    text = fields.replace("device: A", "where: A").replace("Arg(help='')] = 'auto'", "Arg(help='')] = 'half'")
    after = {"sglang/srt/arg_groups/fields/device.py": text + " cache: A[int, Arg(no_cli=True)] = 2\n size: int = 1"}
    use = Use("flags", "sglang.srt.server_args", "x.py:1", Arguments(names=frozenset({"device"})))
    assert differ(tmp_path, use, before, after, "sglang") == [
        "signature: no longer takes device",
        "default: dtype: 'auto' → 'half'",
    ]
    assert differ(tmp_path, use, before, before, "sglang") == []


def test_what_we_stand_in_for_and_count_on(tmp_path: Path) -> None:
    before = of_core(
        "class C:\n def __init__(self, x): self.x = 'key'\n def forward(self, y): return 1\n def g(self): ..."
    )
    after = of_core(
        "class C:\n def __init__(self, x, z): self.x = 1\n def forward(self, y): return 2\n def g(self, n): ..."
    )
    name = "megatron.core.a.C"
    # in place of a class the way it is made and called counts, and not what it does
    assert differ(tmp_path, Use("stand-in", name, "x.py:1"), before, after) == [
        "signature: __init__: takes z, required"
    ]
    inside = differ(tmp_path, Use("relied on", f"{name}.forward", "x.py:1"), before, after)
    assert inside == ["body: its code: 1 of 2 lines taken out, 1 put in"]
    assert (
        differ(tmp_path, Use("relied on", f"{name}.g", "x.py:1"), before, after) == []
    )  # its calls are uses of their own
    assert differ(tmp_path, Use("spelled", "megatron.core.a:key", "x.py:1"), before, after) == [
        "gone: does not occur there any more"
    ]
    assert differ(tmp_path, Use("spelled", "megatron.core.a:x", "x.py:1"), before, after) == []
    fields = of_core("class C:\n x: int = 0\n y: int = 0"), of_core("class C:\n x: int = 0\n z: int = 3")
    assert differ(tmp_path, Use("all fields", name, "x.py:1"), *fields) == [
        "signature: no longer has the field y",
        "new: field z, 3 where we leave it out",
    ]


OURS = "from megatron.core.a import f\nf(1)\n"


@pytest.fixture
def releases(tmp_path: Path) -> tuple[list[str], Path]:
    """Arguments that compare two releases, and what uses them."""
    before = wheel(tmp_path, "1.0", of_core("raise SystemExit('imported')\ndef f(x, y=1): ..."))
    after = wheel(tmp_path, "2.0", of_core("raise SystemExit('imported')\ndef f(x, y=2): ..."))
    (tmp_path / "ours.py").write_text(OURS)
    return [str(after), "--against", str(before), "--uses", str(tmp_path / "ours.py"), "--alone"], tmp_path


def test_exit_codes_and_what_is_printed(releases: tuple[list[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    arguments, folder = releases
    assert check_upstream.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "a.f: y: 1 → 2\n      ours.py:2\n" in printed
    assert printed.endswith("megatron-core 1.0 → 2.0, 2 uses: 1 change of what is used: 1 default\n")
    assert check_upstream.main([*arguments, "--markdown"]) == 1
    assert "| default | `a.f` | y: 1 → 2 | ours.py |\n" in capsys.readouterr().out
    assert check_upstream.main([*arguments, "--json"]) == 1
    read = json.loads(capsys.readouterr().out)
    finding = {"kind": "default", "name": "megatron.core.a.f", "what": "y: 1 → 2", "where": ["ours.py:2"]}
    assert read == {
        "upstream": "megatron_core",
        "from": "1.0",
        "to": "2.0",
        "uses": 2,
        "findings": [finding],
        "unread": [],
    }
    same = [arguments[2], *arguments[1:]]
    assert check_upstream.main(same) == 0
    assert "nothing that is used has changed" in capsys.readouterr().out
    assert {path.suffix for path in folder.iterdir()} == {".whl", ".py"}  # nothing was unpacked


def test_an_installed_folder_is_read_as_its_wheel(
    releases: tuple[list[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, folder = releases
    with zipfile.ZipFile(arguments[0]) as archive:
        archive.extractall(folder / "site")
    for inside in ("megatron/core", "megatron"):
        assert check_upstream.main([str(folder / "site" / inside), *arguments[1:]]) == 1
        assert "megatron-core 1.0 → 2.0" in capsys.readouterr().out


def test_source_that_this_python_cannot_read_is_told(
    releases: tuple[list[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, folder = releases
    arguments[0] = str(wheel(folder, "3.0", of_core("def f(x, y=1) gives nothing")))
    assert check_upstream.main(arguments) == 1
    assert "warning: megatron/core/a.py cannot be read by this Python" in capsys.readouterr().err


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert check_upstream.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert "\n  fix: " in captured.err
    return captured.err


def test_bad_input_is_refused_in_words(releases: tuple[list[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    (path, *rest), folder = releases
    assert "there is no such file or folder" in refused([str(folder / "none.whl"), *rest], capsys)
    assert "this is not a wheel" in refused([str(folder / "ours.py"), *rest], capsys)
    assert "is installed here" in refused([str(folder), *rest], capsys)
    (folder / "text.whl").write_text("no archive")
    assert "cannot be read: File is not a zip file" in refused([str(folder / "text.whl"), *rest], capsys)
    assert "this holds ray, not megatron-core or SGLang" in refused(
        [str(wheel(folder, "1.0", {}, "ray")), *rest], capsys
    )
    files = {"sglang/__init__.py": ""}
    other = wheel(folder, "1.0", files, "sglang")
    assert "sglang 1.0 cannot be held against megatron-core 1.0" in refused([str(other), *rest], capsys)
    hidden = wheel(folder, "9.0", {}, "sglang")  # by its name alone
    assert "this holds sglang" in refused([str(hidden), *rest], capsys)
    damaged = bytearray(Path(path).read_bytes())
    place = damaged.index(b"SystemExit")
    damaged[place : place + 4] = b"\0\0\0\0"
    (folder / "damaged.whl").write_bytes(damaged)
    assert "this wheel is damaged at megatron/core/a.py" in refused([str(folder / "damaged.whl"), *rest], capsys)
    (folder / "cut.whl").write_bytes(Path(path).read_bytes()[:200])
    assert "cannot be read" in refused([str(folder / "cut.whl"), *rest], capsys)
    (folder / "broken.py").write_text("def (")
    assert "not a Python file" in refused([path, *rest, "--uses", str(folder / "broken.py")], capsys)
    assert "not a Python file" in refused([path, *rest, "--uses", str(folder / "none.py")], capsys)
    with pytest.raises(SystemExit) as error:
        check_upstream.main([path, "--alone"])
    assert error.value.code == 2


def test_without_our_source_nothing_is_called_unchanged(
    releases: tuple[list[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the tool came in a wheel: no uses would be found, and so no change."""
    arguments, folder = releases
    monkeypatch.setattr(check_upstream, "ROOT", folder)
    assert "not beside this tool" in refused(arguments[:3], capsys)


def test_help_needs_no_release() -> None:
    command = [sys.executable, str(ROOT / "tools/check_upstream.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Exit status: 0 nothing that is used has changed" in done.stdout


def test_what_is_declared_stands_in_our_source() -> None:
    """Else a declaration outlives the use that it was made for."""
    for each in DECLARED:
        assert each.evidence in (ROOT / each.file).read_text(), each.name


def test_what_is_declared_is_in_the_release_we_run_with() -> None:
    """A misspelled name would be looked for in vain, in every release."""
    pinned = Definitions(pinned_release("megatron_core", ROOT))
    names = {name for key, values in (CONTENT | CONCRETE).items() for name in (key, *values) if name != "each"}
    for each in DECLARED:
        module, _, text = each.name.partition(":")
        if not pinned.source.holds(module):
            continue
        if text:
            assert text in pinned.module(module).words, each.name
        else:
            names.add(each.name)
    for name in names:
        assert pinned.find(name) is not None, name


@pytest.mark.wide
def test_what_the_project_uses_is_found_by_reading_it() -> None:
    """One use of each way: none of them is declared."""
    pinned = Definitions(pinned_release("megatron_core", ROOT))
    found = uses_of(ROOT, pinned)
    uses = {(each.kind, each.name.removeprefix("megatron.core."), each.where.split(":")[0]) for each in found}
    of_ours = "megatron_stare/megatron/"
    assert {
        ("name", "parallel_state.get_data_parallel_rank", f"{of_ours}backend/layout.py"),
        ("call", "tensor_parallel.random.initialize_rng_tracker", f"{of_ours}backend/layout.py"),
        (
            "attribute",
            "models.common.embeddings.rotary_pos_embedding.RotaryEmbedding.forward",
            f"{of_ours}backend/layout.py",
        ),
        ("override", "models.gpt.GPTModel._postprocess", f"{of_ours}model/model.py"),
        ("call", "models.gpt.GPTModel", f"{of_ours}model/model.py"),
        ("call", "packed_seq_params.PackedSeqParams", f"{of_ours}batching/packing.py"),
        (
            "substitute",
            "transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
            f"{of_ours}backend/cpu_backend.py",
        ),
        ("call", "optimizer.MegatronOptimizer.step", "tools/make_tiny_model.py"),
        ("name", "transformer.attention.SelfAttentionSubmodules.core_attention", f"{of_ours}model/model.py"),
        ("name", "transformer.transformer_layer.TransformerLayer.layer_number", f"{of_ours}model/model.py"),
        ("call", "pipeline_parallel.schedules.forward_backward_no_pipelining", f"{of_ours}step/passes.py"),
    } <= uses
    made = (each for each in found if each.kind == "call" and each.name.endswith(".TransformerConfig"))
    (config,) = (each for each in made if each.where.startswith(f"{of_ours}model/model.py"))
    # of two families in models/, and of a dict of dicts
    assert {"num_moe_experts", "ffn_hidden_size", "recompute_method"} <= config.arguments.perhaps
    assert not config.arguments.more
    assert OwnSource(ROOT).paths.keys() >= {"megatron_stare/cli.py", "parity.py", "support/ranks.py", "driver.py"}
