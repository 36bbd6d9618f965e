"""Calls in a turn's text, well and badly formed: ours are those of SGLang's own detector."""

from __future__ import annotations

import json
import random
import subprocess

import pytest
from support import sglang_servers as servers

from megatron_stare.environments.chat import Call, Malformed, read_calls

# read in SGLang's environment; a text on which it raises is told as such
DETECTOR = """
import json, logging, sys
logging.disable(logging.CRITICAL)
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.qwen25_detector import Qwen25Detector
tools = [Tool(type="function", function=Function(name=n, parameters={})) for n in ("add", "run")]
found = []
for text in json.load(sys.stdin):
    try:
        calls = Qwen25Detector().detect_and_parse(text, tools).calls
        found.append([[call.name, json.loads(call.parameters)] for call in calls])
    except Exception as error:
        found.append(type(error).__name__)
print(json.dumps(found))
"""
GOOD = '<tool_call>\n{"name": "add", "arguments": {"first": 1}}\n</tool_call>'
WRITTEN = [
    "",
    "The answer is 4.",
    GOOD,
    f"Let me see.\n{GOOD}\n{GOOD}",
    f"{GOOD}{GOOD} and on",
    GOOD.replace("arguments", "parameters"),
    GOOD.replace('"arguments"', '"parameters": {"x": 2}, "arguments"'),
    GOOD.replace('{"first": 1}', '"text"'),
    GOOD.replace('{"first": 1}', "[1]"),
    GOOD.replace('{"first": 1}', "null"),
    GOOD.replace(', "arguments": {"first": 1}', ""),
    GOOD.replace('"add"', '"gone"'),
    GOOD.replace('"add"', "3"),
    GOOD.replace("{", "").replace("}", ""),
    GOOD.replace("\n", ""),
    GOOD.replace("\n", "\n\n"),
    GOOD.replace("\n", "\r\n"),
    GOOD.replace("</tool_call>", ""),
    GOOD.replace("<tool_call>", ""),
    f"<tool_call>\n{GOOD}\n</tool_call>",
    f"<tool_call>\nno JSON\n</tool_call>\n{GOOD}",
    '<tool_call>\n[{"name": "add"}, {"name": "run", "arguments": {"code": "</tool_call>"}}]\n'
    "</tool_call>",
    '<tool_call>\n["add"]\n</tool_call>',
    '<tool_call>\n"add"\n</tool_call>',
    "<tool_call>\n[]\n</tool_call>",
    "<tool_call>\n{}\n</tool_call>",
    "<tool_call>\n\n</tool_call>",
    '<tool_call>\n{"name": "run", "arguments": {"code": "\\"\\n</tool_call>"}}\n</tool_call>',
    '<tool_call>\n{"name": "run", "arguments": {"code": "naïve 日 \\ud83d\\ude00"}}\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": {"first": NaN}}\n</tool_call>',
    '<tool_call>\n{"name": "add", "name": "run", "arguments": {}}\n</tool_call>',
    "<tool_call>\n" + "[" * 5000 + "\n</tool_call>",
]


def damaged(count: int) -> list[str]:
    """Well-formed turns with characters lost, doubled or changed places."""
    draw = random.Random(7)
    texts = []
    for _ in range(count):
        text = list("\n".join([GOOD] * draw.randint(1, 3)))
        for _ in range(draw.randint(1, 4)):
            at, other = draw.randrange(len(text)), draw.randrange(len(text))
            kind = draw.randrange(3)
            if kind == 0:
                del text[at]
            elif kind == 1:
                text.insert(at, text[other % len(text)])
            else:
                text[at], text[other] = text[other], text[at]
        texts.append("".join(text))
    return texts


@pytest.mark.sglang
@pytest.mark.skipif(servers.MISSING is not None, reason=str(servers.MISSING))
def test_calls_are_those_of_sglangs_detector() -> None:
    texts = [*WRITTEN, *damaged(1000)]
    done = subprocess.run(
        [servers.PYTHON, "-c", DETECTOR],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        check=True,
    )
    theirs = json.loads(done.stdout.splitlines()[-1])
    found = compared = 0
    for text, expected in zip(texts, theirs, strict=True):
        ours = read_calls(text)
        if isinstance(expected, str):  # its detector failed, and the server would answer an error
            assert any(isinstance(each, Malformed) for each in ours), (text, expected)
            continue
        # arguments that are no object, which it passes on, are told to the policy here
        wanted = [[name, given] for name, given in expected if isinstance(given, dict)]
        known = [
            [each.name, each.arguments]
            for each in ours
            if isinstance(each, Call) and each.name in ("add", "run")
        ]
        assert json.dumps(known) == json.dumps(wanted), text
        found, compared = found + bool(wanted), compared + 1
    assert compared > 1000
    assert 100 < found < 900


def test_what_is_no_call_says_why() -> None:
    assert read_calls("no call") == []
    (bad,) = read_calls("<tool_call>\nx\n</tool_call>")
    assert isinstance(bad, Malformed)
    assert bad.text == "x"
    assert bad.why.startswith("not JSON")
    # SGLang passes half of a pair on; no file, tokenizer or sandbox takes it
    (half,) = read_calls(
        '<tool_call>\n{"name": "run", "arguments": {"x": "\\ud83d"}}\n</tool_call>'
    )
    assert isinstance(half, Malformed)
    assert "surrogates not allowed" in half.why
    (open_,) = read_calls("so: <tool_call>\n{")
    assert isinstance(open_, Malformed)
    assert open_.text == "<tool_call>\n{"
    (deep,) = read_calls("<tool_call>\n" + "[" * 100_000 + "\n</tool_call>")
    assert isinstance(deep, Malformed)
