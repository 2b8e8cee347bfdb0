"""How often loops are named, and real text is doubted: `sweeper.core.looping` on a labelled set.

    python benchmarks/looping/score.py [--half tune|held|both] [--out results.json]

Real text is read from this machine when it runs: the standard library and its packages (code),
readmes, manuals and licences of packages (prose), and their JSON files. It differs between
machines, so the counts do. Loops are of two kinds: what Gemma 3 270M answered (`answers.jsonl`,
labelled by reading), and loops made of real text, which are loops by construction. Every text is in
one half by a hash of its name; the limits were chosen on the first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sweeper.core.looping import Answer, nothing, repetition

HERE = Path(__file__).resolve().parent
LENGTHS = {96: 380, 250: 1_000, 750: 3_000, 2_000: 7_500}
"""Characters of answers of so many tokens, about."""
START = LENGTHS[96]
FILES = 700
"""Files of each kind of real text."""
MADE = 300
"""Loops made of real text, of each length."""
EXAMPLES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One text with its label: what it is, how many tokens long, and whether it is a loop."""

    name: str
    kind: str
    tokens: int
    text: str
    prompt: str = ""
    is_loop: bool | None = False


def main() -> None:
    """Score both halves, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--half", choices=("tune", "held", "both"), default="both")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    real = list(real_texts())
    items = [*real, *made_loops(real), *answers()]
    found = {}
    for half in ("tune", "held"):
        if arguments.half in (half, "both"):
            found[half] = scored(half, [each for each in items if half_of(each.name) == half])
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


def half_of(name: str) -> str:
    """Return the half that a text belongs to."""
    return "held" if hashlib.sha256(name.encode()).digest()[0] % 2 else "tune"


def real_texts() -> Iterator[Item]:
    """Yield cuts of real files, each length at a place of its own."""
    standard = Path(sysconfig.get_paths()["stdlib"])
    packages = Path(sysconfig.get_paths()["purelib"])
    kinds = {
        "code": [*standard.rglob("*.py"), *packages.rglob("*.py")],
        "json": [*standard.rglob("*.json"), *packages.rglob("*.json")],
        "prose": [
            each
            for each in packages.rglob("*")
            if each.suffix in (".md", ".rst")
            or each.name in ("METADATA", "LICENSE", "LICENSE.txt", "COPYING", "NOTICE")
        ],
    }
    for kind, files in kinds.items():
        chosen = sorted({each for each in files if each.is_file()})
        random.Random(kind).shuffle(chosen)  # noqa: S311 - a fixed choice
        for file in chosen[:FILES]:
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeError):
                continue
            if file.name == "METADATA":
                text = text.partition("\n\n")[2]  # what stands before is a header, not prose
            name = str(file.relative_to(packages if packages in file.parents else standard))
            place = random.Random(name)  # noqa: S311 - a fixed choice
            for tokens, characters in LENGTHS.items():
                if len(text) >= characters:
                    start = place.randrange(len(text) - characters + 1)
                    cut = text[start : start + characters]
                    yield Item(name=name, kind=kind, tokens=tokens, text=cut)


def made_loops(real: list[Item]) -> Iterator[Item]:
    """Yield loops made of real text: a beginning, then a unit or the prompt for ever.

    The beginning takes up to three tenths, the unit up to a third of the rest, so that it stands
    there three times at least. One in four counts up as it goes on, one in four repeats its prompt.
    """
    for tokens, characters in LENGTHS.items():
        sources = [each for each in real if each.tokens == tokens and each.kind != "json"]
        chance = random.Random(tokens)  # noqa: S311 - a fixed choice
        for number, source in enumerate(chance.sample(sources, min(MADE, len(sources)))):
            words = re.findall(r"\s*\S+", source.text)
            beginning = _taken(words, chance.randrange(int(characters * 0.3)))
            rest = characters - len(beginning)
            unit = _taken(words[::-1], chance.randrange(8, rest // 3)) or "and so on "
            prompt = ""
            if number % 4 == 0:
                tail = "".join(f"{count}. {unit}\n" for count in range(1, rest // len(unit) + 2))
            elif number % 4 == 1:
                prompt, beginning = unit, ""
                tail = f"{unit}\n" * (rest // len(unit) + 2)
            else:
                tail = unit * (rest // len(unit) + 2)
            yield Item(
                name=f"made of {source.name}", kind="made", tokens=tokens, prompt=prompt,
                text=(beginning + tail)[:characters], is_loop=True,
            )  # fmt: skip


def _taken(words: list[str], characters: int) -> str:
    said = ""
    for word in words:
        if len(said) + len(word) > characters:
            break
        said += word
    return said


def answers() -> Iterator[Item]:
    """Yield what the small model answered: each whole, and its first 96 tokens or so."""
    labels = {"loop": True, "text": False, "between": None}
    with (HERE / "answers.jsonl").open(encoding="utf-8") as file:
        for number, line in enumerate(file):
            said = json.loads(line)
            name = f"answer {number}"
            for text, tokens, label in (
                (said["text"], said["tokens"], said["label"]),
                (said["text"][:START], 96, said["label_start"]),
            ):
                yield Item(
                    name=name, kind="model", tokens=tokens, text=text, prompt=said["prompt"],
                    is_loop=labels[label],
                )  # fmt: skip


def scored(half: str, items: list[Item]) -> dict[str, dict[str, int]]:
    """Print and return how many texts of each kind were named."""
    of: Counter[tuple[str, str]] = Counter()
    named: Counter[tuple[str, str]] = Counter()
    wrong = []
    for item in items:
        label = {True: "loop", False: "text", None: "between"}[item.is_loop]
        group = item.kind if item.kind == "model" else f"{item.kind} {item.tokens}"
        why = nothing(Answer(text=item.text, prompt=item.prompt))
        for key in ((label, group), (label, "all")):
            of[key] += 1
            named[key] += why is not None
        if item.is_loop is not None and (why is not None) != item.is_loop:
            wrong.append((item, why))
    print(f"{half} half")
    for (label, group), count in sorted(of.items()):
        hit = named[label, group]
        print(f"  {label:8} {group:12} named {hit:5,} of {count:6,}  {hit / count:7.2%}")
    for item, why in wrong[:EXAMPLES] if half == "tune" else ():
        seen = repetition(item.text, item.prompt)
        print(f"    {item.kind} {item.tokens} {item.name}: {why or 'not named'}; {seen}")
    return {
        f"{label} {group}": {"named": named[label, group], "of": count}
        for (label, group), count in sorted(of.items())
    }


if __name__ == "__main__":
    main()
