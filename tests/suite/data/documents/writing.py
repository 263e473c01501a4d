"""Documents of random sentences, for tests."""

import random
from pathlib import Path

WORDS = [
    *("the", "a", "stage", "sends", "its", "tensor", "to", "next", "one", "waits"),
    *("for", "gradient", "of", "layer", "and", "adds", "small", "number", "without", "copy"),
]


def sentence(generator):
    return " ".join(generator.choices(WORDS, k=generator.randint(6, 14))).capitalize() + "."


def document(seed, paragraphs=4):
    generator = random.Random(seed)
    return "\n\n".join(" ".join(sentence(generator) for _ in range(generator.randint(2, 4))) for _ in range(paragraphs))


def write_folder(folder: Path, count=40):
    folder.mkdir(parents=True)
    for seed in range(count):
        (folder / f"{seed:02}.{('txt', 'md', 'rst')[seed % 3]}").write_text(document(seed))
    return folder
