r"""Handles the units and words that follow a number, such as km in 5 km or million in 7 million.
Distinguishes known units, such as km, from words that change the value of the number, such as
million. Also decides whether two units agree.

An answer can have a known unit even if the reference has no unit. If answer and reference both have
a unit, the units must be of the same kind, such as two lengths. If the two units are of the same
kind but differ, the answer's number is converted to the unit of the reference. A word that changes
the value of the number, as in 7 million or 7 squared, is not a unit. In a product such as 7t, the
letter is a variable and not a unit. Imports the standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

COUNT = "count"  # kind of countable nouns: 12 ways, 12 students


@dataclass(frozen=True)
class Quantity:
    """A value as LaTeX text, and the unit of the value.

    `value`: LaTeX, without the unit.
    `kind`: kind of the unit, such as length^2; None if there is no unit.
    `size`: size of the unit, in multiples of the kind's basic unit. For example, the basic unit of
        lengths is the metre, so a kilometre has the size 1000.
    """

    value: str
    kind: str | None = None
    size: Fraction = Fraction(1)


def _table() -> dict[str, tuple[str, Fraction]]:
    """Returns a dict from the name of every unit to the unit's kind and size."""
    lines = """
    length 1 m meter meters metre metres
    length 1/100 cm centimeter centimeters centimetre centimetres
    length 1/10 dm decimeter decimeters
    length 1/1000 mm millimeter millimeters millimetre millimetres
    length 1/1000000000 nm nanometer nanometers
    length 1000 km kilometer kilometers kilometre kilometres
    length 254/10000 in inch inches
    length 3048/10000 ft foot feet
    length 9144/10000 yd yard yards
    length 1609344/1000 mi mile miles
    mass 1 g gram grams
    mass 1/1000 mg milligram milligrams
    mass 1000 kg kilogram kilograms
    mass 1000000 tonne tonnes ton tons
    mass 45359237/100000 lb lbs pound pounds
    mass 28349523125/1000000000 oz ounce ounces
    time 1 s sec secs second seconds
    time 1/1000 ms millisecond milliseconds
    time 60 min mins minute minutes
    time 3600 h hr hrs hour hours
    time 86400 day days
    time 604800 week weeks
    month 1 month months
    month 12 yr yrs year years
    angle 1 degree degrees deg degs
    radian 1 rad rads radian radians
    money 1 dollar dollars usd buck bucks
    money 1/100 cent cents
    euro 1 euro euros eur
    yen 1 yen
    rupee 1 rupee rupees
    yuan 1 yuan
    volume 1 l liter liters litre litres
    volume 1/1000 ml milliliter milliliters millilitre millilitres
    volume 3785411784/1000000000 gallon gallons gal
    temperature-c 1 celsius
    temperature-f 1 fahrenheit
    kelvin 1 kelvin kelvins
    energy 1 j joule joules
    energy 1000 kj kilojoule kilojoules
    electronvolt 1 ev electronvolt electronvolts
    force 1 n newton newtons
    power 1 w watt watts
    power 1000 kw kilowatt kilowatts
    pressure 1 pa pascal pascals
    charge 1 c coulomb coulombs
    current 1 ampere amperes amp amps
    voltage 1 v volt volts
    frequency 1 hz hertz
    frequency 1000 khz kilohertz
    amount 1 mol mole moles
    bit 1 bit bits
    bit 8 byte bytes
    speed-mph 1 mph
    speed-kmh 1 kph kmh
    unit 1 unit units
    """
    found: dict[str, tuple[str, Fraction]] = {}
    for line in filter(None, map(str.strip, lines.splitlines())):
        kind, size, *names = line.split()
        found |= {name: (kind, Fraction(size)) for name in names}
    return found


_UNITS = _table()
# letters that are variables unless they are set as text
_LETTERS = frozenset(name for name in _UNITS if len(name) == 1) | {"in", "ev", "pa"}
_COUNTED = frozenset(
    """
    apple ball bead bird block book box boy candy car card cat chair child children choice class
    coin color colour combination cookie cup customer day digit divisor dog edge egg element face
    factor fish flower function game girl graph group handshake house integer item kid league letter
    line man marble match member men mice number orange ordering outcome page pair path pen pencil
    penny people permutation person piece pizza plant player point possibility prime problem product
    question rectangle region road root route row school seat set sheep side solution sphere square
    star step stone string student subset sum team term tile toy train tree triangle tuple turn
    value vertex vertices vote way wheel win winner woman women word worker zero arrangement
    configuration coloring colouring sequence polynomial tournament ticket
    """.split()  # noqa: SIM905 - words are read more easily than a list of them
)
# words that change the number before them
_CHANGING = frozenset(
    """
    hundred thousand million billion trillion dozen score gross squared cubed factorial percent
    percentage half halves third quarter fourth fifth sixth seventh eighth ninth tenth hundredth
    thousandth pi or and to plus minus over mod modulo per less more about around approximately
    roughly not maybe perhaps least most between times point base if when for infinity infinite a an
    is are of in ten tens twenty thirty forty fifty k so exactly only nearly almost
    """.split()  # noqa: SIM905
)
_LETTERS_IN_WORDS = ("in", "a", "A", "C", "F")  # read as words, names or temperatures, not as units
_TEXT = (
    r"\\(?:text|mathrm|textrm|textbf|textit|mbox|operatorname|mathbf|rm)\s*"
    r"\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_POWER = r"(?:\s*\^\s*\{?\s*([23])\s*\}?)?"
_TRAILING = re.compile(
    r"(?P<value>.*?)\s*(?:"
    rf"(?P<circ>\^\s*(?:\{{\s*\\circ\s*\}}|\\circ)\s*(?:\\?[,;\s])*(?P<scale>{_TEXT}|[CF])?)"
    rf"|(?P<texts>(?:{_TEXT}{_POWER}\s*(?:/|\\cdot)?\s*)+)"
    r"|(?P<plain>(?<=[\d}\s)])[A-Za-z][A-Za-z ./]*?(?:\s*\^\s*\{?[23]\}?)?))\.?$",
    re.DOTALL,
)
_SIGN = r"(?:\\\$|\$|\\text\{\s*(?:\\?\$|€|£)\s*\}|€|£)"
_MONEY = re.compile(rf"{_SIGN}\s*(?=[-+\d.\\])")
_MONEY_AFTER = re.compile(rf"(?<=[\d.}})])(?:\\[,;:! ]|~|\s)*{_SIGN}\.?$")
_SEVERAL = re.compile(
    rf"\s*(-?\d+(?:\.\d+)?)\s*(?:{_TEXT}|([A-Za-z]+))\s*,?\s*(?:\\text\{{\s*and\s*\}})?\s*"
)


def quantity(text: str) -> Quantity | None:
    """Splits an answer into a value and a unit, which may be absent. Returns None if the answer
    cannot be split. For example, the answer '5 million' cannot be split, because the word 'million'
    is part of the value."""
    if money := _MONEY.match(text) or _MONEY_AFTER.search(text):
        kind = "euro" if "€" in money[0] else "pound" if "£" in money[0] else "money"
        rest = quantity(text[: money.start()] + text[money.end() :])
        if rest is None or rest.kind not in (None, "money", kind):
            return None
        return Quantity(rest.value, kind, rest.size)
    if re.search(r"\d\s*'+$", text):  # arc minutes and seconds, or feet and inches
        return None
    if (several := _of_several(re.sub(r"\band\b", " ", text))) is not None:
        return several
    found = _TRAILING.fullmatch(text)
    if found is None or not found["value"].strip():
        return Quantity(text)
    value = re.sub(r"(?:\\[,;:!\s]|~|\s)+$", "", found["value"])
    if found["circ"]:
        scale = re.sub(r"\W|text|mathrm", "", found["scale"] or "").lower()
        if scale in ("c", "celsius", "f", "fahrenheit"):
            return Quantity(value, f"temperature-{scale[0]}")
        return Quantity(value, "angle") if not scale else None
    if found["texts"] is not None:
        words = re.sub(_TEXT, lambda each: f" {each[1]} ", found["texts"])
        unit = _unit(words, set_as_text=True)
    else:
        words = found["plain"]
        apart = value != text[: found.start("plain")]
        glued = value.endswith("}") or words.rstrip(".").lower() not in _UNITS
        if len(words.rstrip(".")) < 2 or (not apart and glued):
            return Quantity(text)  # 7t, \frac{1}{2}mv^2: a product
        unit = _unit(words, set_as_text=apart)
        if unit is None and all(len(word) <= 3 for word in words.split()):
            return Quantity(text)  # 7 t, 2 ab: a product
    return Quantity(value, *unit) if unit is not None else None


def _of_several(text: str) -> Quantity | None:
    """Converts a value that combines several units of the same kind to the last of these units.
    For example, 7 hours 30 minutes becomes 450 minutes. Returns None for any other text, such as 7
    hours (only one unit) or 7 hours 30 metres (two kinds of units)."""
    parts, at = [], 0
    while at < len(text):
        if not (found := _SEVERAL.match(text, at)) or found.end() == at:
            return None
        unit = _unit(found[2] or found[3], set_as_text=True)
        if unit is None or unit[0] == COUNT:
            return None
        parts.append((Fraction(found[1]), *unit))
        at = found.end()
    kinds = {kind for _, kind, _ in parts}
    if len(parts) < 2 or len(kinds) != 1:
        return None
    size = parts[-1][2]
    total = sum(value * each for value, _, each in parts) / size
    value = (
        str(total.numerator) if total.denominator == 1 else f"{total.numerator}/{total.denominator}"
    )
    return Quantity(value, parts[0][1] + " of several", size)


def _unit(words: str, *, set_as_text: bool) -> tuple[str, Fraction] | None:
    """Reads a unit that is written in words or in symbols. Returns the unit's kind and the unit's
    size. Returns None if the text is not a unit."""
    bare = words.strip()
    if (
        (set_as_text or len(bare) > 1)
        and bare not in _LETTERS_IN_WORDS
        and (found := _symbols(bare)) is not None
    ):
        return found
    text = re.sub(r"[\\,;:!~]|(?<=\w)\.(?!\w)|\.$", " ", words.lower()).strip()
    text = re.sub(r"\^\s*\{?\s*([23])\s*\}?", r"^\1", text)
    text = re.sub(r"\s*(?:/|\bper\b)\s*", " / ", text)
    text = re.sub(r"\s+", " ", text)
    over = text.split(" / ")
    if len(over) > 2 or not over[0]:
        return None
    parts = [_simple(part, set_as_text=set_as_text) for part in over]
    if any(part is None for part in parts):
        return None
    (kind, size), *below = [part for part in parts if part is not None]
    if not below:
        return kind, size
    return f"{kind} / {below[0][0]}", size / below[0][1]


# unit symbols that take prefixes, with kind and size; _PREFIXES has the prefixes' powers of ten
_SYMBOLS = {
    **dict.fromkeys(("m",), ("length", Fraction(1))),
    **{"g": ("mass", Fraction(1)), "s": ("time", Fraction(1)), "L": ("volume", Fraction(1))},
    **{
        "Pa": ("pressure", Fraction(1)),
        "bar": ("pressure", Fraction(100000)),
        "J": ("energy", Fraction(1)),
    },
    **{
        "erg": ("energy", Fraction(1, 10**7)),
        "cal": ("energy", Fraction(4184, 1000)),
        "eV": ("electronvolt", Fraction(1)),
    },
    **{"W": ("power", Fraction(1)), "V": ("voltage", Fraction(1)), "A": ("current", Fraction(1))},
    **{
        "N": ("force", Fraction(1)),
        "dyn": ("force", Fraction(1, 10**5)),
        "Hz": ("frequency", Fraction(1)),
    },
    **{"mol": ("amount", Fraction(1)), "M": ("molar", Fraction(1)), "C": ("charge", Fraction(1))},
    **{"K": ("kelvin", Fraction(1)), "T": ("tesla", Fraction(1)), "G": ("gauss", Fraction(1))},
    **{"F": ("farad", Fraction(1)), "H": ("henry", Fraction(1)), "pc": ("parsec", Fraction(1))},
    **{
        "AU": ("astronomical unit", Fraction(1)),
        "ly": ("light year", Fraction(1)),
        "Ohm": ("ohm", Fraction(1)),
    },
    **{
        "min": ("time", Fraction(60)),
        "h": ("time", Fraction(3600)),
        "hr": ("time", Fraction(3600)),
    },
    **{
        "yr": ("year", Fraction(1)),
        "day": ("time", Fraction(86400)),
        "rad": ("radian", Fraction(1)),
    },
    **{"lb": ("mass", Fraction(45359237, 100000)), "ft": ("length", Fraction(3048, 10000))},
    **{
        "in": ("length", Fraction(254, 10000)),
        "deg": ("angle", Fraction(1)),
        "atm": ("pressure", Fraction(101325)),
    },
    **{
        "mi": ("length", Fraction(1609344, 1000)),
        "AA": ("length", Fraction(1, 10**10)),
        "dB": ("decibel", Fraction(1)),
    },
}
_PREFIXES = {
    "T": 12,
    "G": 9,
    "M": 6,
    "k": 3,
    "d": -1,
    "c": -2,
    "m": -3,
    "u": -6,
    "n": -9,
    "p": -12,
    "f": -15,
}
_FACTOR = re.compile(r"([A-Za-z]+)\s*(?:\^?\s*\{?\s*([+-]?\d)\s*\}?)?")


def _symbols(text: str) -> tuple[str, Fraction] | None:
    r"""Parses a unit that is written in symbols, such as kg m^2/s or W m^{-2}. Returns the unit's
    kind and size (see `Quantity`). Returns None if the text is not a unit."""
    text = (
        re.sub(r"\\(?:cdot|times)(?![A-Za-z])|[~*]|\\[,;:! ]", " ", text)
        .replace("\\mu", "u")
        .replace("$", "")
    )
    powers: dict[str, int] = {}
    size, sign = Fraction(1), 1
    for number, side in enumerate(text.split("/")):
        sign = -1 if number else 1
        at, side = 0, side.strip(" .")
        if not side:
            return None
        while at < len(side):
            found = _FACTOR.match(side, at)
            if found is None or (unit := _symbol(found[1])) is None:
                return None
            power = sign * int(found[2] or 1)
            powers[unit[0]] = powers.get(unit[0], 0) + power
            size *= unit[1] ** power
            at = found.end()
            while at < len(side) and side[at] in " {}":
                at += 1
    if list(powers.values()) == [1]:
        return next(iter(powers)), size
    if len(powers) == 2 and sorted(powers.values()) == [-1, 1]:
        above, below = sorted(powers, key=lambda kind: -powers[kind])
        return f"{above} / {below}", size
    named = [
        f"{kind}^{power}" if power != 1 else kind for kind, power in sorted(powers.items()) if power
    ]
    return " ".join(named), size


def _symbol(text: str) -> tuple[str, Fraction] | None:
    if text in _SYMBOLS:
        return _SYMBOLS[text]
    if text[:1] in _PREFIXES and text[1:] in _SYMBOLS:
        kind, size = _SYMBOLS[text[1:]]
        return kind, size * Fraction(10) ** _PREFIXES[text[0]]
    return None


def _simple(text: str, *, set_as_text: bool) -> tuple[str, Fraction] | None:
    power = 1
    if found := re.fullmatch(
        r"(?:(sq|square|cubic|cu) )(.+)|(.+?) ?\^([23])|(.+?) (squared|cubed)", text
    ):
        before, first, second, digit, third, after = found.groups()
        text = first or second or third
        power = int(digit) if digit else 3 if (before or after) in ("cubic", "cu", "cubed") else 2
    if text in _UNITS and (set_as_text or text not in _LETTERS):
        kind, size = _UNITS[text]
        if kind == "volume" and power > 1:
            return None
        kind, size = (f"{kind}^{power}", size**power) if power > 1 else (kind, size)
        return kind, size
    if power > 1:
        return None
    words = text.split(" ")
    if (
        not all(re.fullmatch(r"[a-z][a-z'-]+", word) and word not in _CHANGING for word in words)
        or len(words) > 4
    ):
        return None
    last = words[-1]
    singular = last.removesuffix("s"), last.removesuffix("es"), last.removesuffix("ies") + "y"
    known = any(name in _COUNTED for name in (last, *singular))
    plural = (
        len(last) > 3
        and last.endswith("s")
        and not last.endswith(("ths", "ss", "us"))
        and _countable(singular)
    )
    return (COUNT, Fraction(1)) if known or plural else None


def _countable(singular: tuple[str, ...]) -> bool:
    return not any(name in _CHANGING or name in _UNITS for name in singular)


def agree(wanted: Quantity, given: Quantity) -> Fraction | None:
    """Returns the factor that converts the given value to the unit of the wanted value. Returns
    None if the two units do not agree."""
    if given.kind is None:
        return Fraction(1)
    several = (wanted.kind or "").endswith(" of several"), given.kind.endswith(" of several")
    if wanted.kind is None:
        return None if several[1] else Fraction(1)
    kinds = {each.removesuffix(" of several") for each in (wanted.kind, given.kind)}
    if len(kinds) == 1:
        return given.size / wanted.size
    if kinds <= {COUNT, "unit"} or kinds in (
        {"length", "unit"},
        {"length^2", "unit^2"},
        {"length^3", "unit^3"},
    ):
        return Fraction(1)
    return None
