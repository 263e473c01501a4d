"""The model card: training data, scores and limits."""

from __future__ import annotations

from typing import Any

from experiments.translation.experiment import TranslationExperiment
from suite.data.text.subset import train_counts
from suite.data.text.text import TextData
from suite.evaluation.scores import MEASURES, THIRDS

_HEAD = """---
library_name: transformers
pipeline_tag: translation
tags: [gpipe-suite, multilingual]
---

# {name}: English to and from {count} languages

An encoder-decoder Transformer, {layers} layers a stack, {parameters:,} parameters, trained for {step} steps by the
GPipe suite (`{name}` at scale `{scale}`).

```python
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)
ids = model.generate(**tokenizer("<2{example}>Save the file", return_tensors="pt"))
print(tokenizer.batch_decode(ids, skip_special_tokens=True))
```

The token at the beginning of the source names the language to write: `<2en>` for English, and {languages}.

## Data

`{corpus}`: {train:,} training pairs of English and another language, vocabulary {vocabulary:,}, pairs
of at most {most} tokens per side. English strings that are held out are held out in all languages. The text keeps the
licences of its sources.
"""

_LIMITS = """
## Limits

- Sources and translations of more than {most} tokens were not seen in training.
- It knows the domain of its training text (`django` and `catalogues`: short messages of software) and little else.
- Directions without English were not trained.
- It may repeat what is in its training text, errors and insults included; nobody has reviewed its translations.
- `generate` computes in the precision of the loaded weights; training computed in {precision}.
"""


def model_card(
    experiment: TranslationExperiment, data: TextData, step: int, parameters: int, scores: dict[str, Any] | None
) -> str:
    """Returns the card as Markdown; ``scores`` is the content of a run's ``scores.json``."""
    languages, counts = experiment.text.languages or tuple(data.languages), train_counts(data, experiment.text)
    example = "de" if "de" in languages else languages[0]
    head = _HEAD.format(
        name=experiment.name, count=len(languages), layers=experiment.model.layers, parameters=parameters,
        step=step, scale=experiment.scale, example=example, corpus=data.corpus,
        train=sum(counts[code] for code in languages), vocabulary=len(data.tokenizer), most=experiment.text.max_length,
        languages=", ".join(f"`<2{code}>`" for code in languages),
    )  # fmt: skip
    return (
        head
        + _scores(step, scores)
        + _LIMITS.format(most=experiment.text.max_length, precision=experiment.optimizer.precision)
    )


def _scores(step: int, scores: dict[str, Any] | None) -> str:
    if scores is None or scores["step"] != step:
        return "\n## Scores\n\nThis checkpoint was not scored.\n"
    columns, most = ("all", *THIRDS), scores["max_pairs"]
    pairs = "all pairs of that length" if most is None else f"at most {most} pairs of that length a direction"
    lines = [
        "\n## Scores\n",
        f"Means over both directions of {len(scores['thirds'])} languages, beam {scores['beam']}, on {pairs} of the "
        "held-out test split. High, middle and low are thirds of the languages by training pairs.\n",
        f"| | {' | '.join(columns)} |",
        f"|---|{'---|' * len(columns)}",
    ]
    for measure, means in scores["macro"].items():
        digits = 3 if measure == "nll" else 1
        shown = ["-" if means[column] is None else f"{means[column]:.{digits}f}" for column in columns]
        lines.append(f"| {MEASURES[measure]} | {' | '.join(shown)} |")
    signatures = scores["signatures"]
    return "\n".join([*lines, f"\n`{signatures['bleu']}`, `{signatures['chrf']}`\n"])
