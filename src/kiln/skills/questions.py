"""A skill's activation questions: how they are declared, answered, and shown to the model.

The format's `metadata` is a map of texts, so its key `kiln-questions` holds them as JSON text:

    metadata:
      kiln-questions: |
        [{"slug": "currency", "text": "Which currency?", "default": "EUR"},
         {"slug": "shop", "text": "Which shop?", "required": true}]
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

from kiln.core.errors import InvalidField
from kiln.core.text import shorten
from kiln.skills.files import Fault, Faulty

METADATA_KEY = "kiln-questions"
MAX_QUESTIONS = 32
MAX_ANSWER_CHARS = 4_000
_SLUG = r"^[a-z0-9]+([-_][a-z0-9]+)*\Z"
# JSON leaves these as they are, but a reader may take them for the end of a line.
_LINE_ENDS = re.compile("[\x7f\x85\u2028\u2029]")


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One question. `default` answers it when nobody does; a required one must be answered."""

    slug: Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=_SLUG)]
    text: Annotated[str, msgspec.Meta(min_length=1, max_length=500)]
    default: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ANSWER_CHARS)] | None = None
    required: bool = False


def declared(text: str) -> tuple[Question, ...]:
    """The questions that the text of `kiln-questions` declares. Raises Faulty; lines are those of `text`."""
    try:
        found = msgspec.json.decode(text, type=tuple[Question, ...])
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise Faulty(Fault(f"`metadata.{METADATA_KEY}`: {error}")) from None
    faults = []
    if len(found) > MAX_QUESTIONS:
        faults.append(f"{len(found)} questions; at most {MAX_QUESTIONS} are allowed")
    slugs = [question.slug for question in found]
    faults += [f"the slug `{slug}` stands twice" for slug in sorted({s for s in slugs if slugs.count(s) > 1})]
    for question in found:
        if not question.text.isprintable():
            faults.append(f"the text of `{question.slug}` must be one line without control characters")
        if question.required and question.default is not None:
            faults.append(f"`{question.slug}` is required, so its default would never be used")
    if faults:
        raise Faulty(*(Fault(f"`metadata.{METADATA_KEY}`: {fault}") for fault in faults))
    return found


def answer(
    skill: str, questions: Iterable[Question], inputs: Mapping[str, object], *, param: str = "skill_inputs"
) -> dict[str, str]:
    """The answer to each question that has one, defaults included, in the order of the questions.

    A null or blank text is no answer. Raises InvalidField, whose `param` is `skill_inputs.<slug>`, for an
    unknown slug, an answer that is neither text, number nor boolean, one that is too long, and for a
    required question that is not answered.
    """
    asked = {question.slug: question for question in questions}
    for slug in inputs:
        if slug not in asked:
            known = f"its questions are {', '.join(asked)}" if asked else "it asks no questions"
            raise InvalidField(
                f"{param}.{_shown(slug)}: the skill {skill} has no such question; {known}",
                param=f"{param}.{_shown(slug)}",
                hint="GET /lmkit/v1/skills lists each skill's questions with their slugs.",
            )
    answers = {}
    for slug, question in asked.items():
        given = _as_text(inputs.get(slug), f"{param}.{slug}")
        if given is not None:
            answers[slug] = given
        elif question.default is not None:
            answers[slug] = question.default
        elif question.required:
            raise InvalidField(
                f"{param}.{slug} is missing; the skill {skill} asks: {question.text}",
                param=f"{param}.{slug}",
                hint=f"Send {param} with an answer for {slug}.",
            )
    return answers


def _as_text(value: object, param: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool):
        value = "true" if value else "false"
    if isinstance(value, (int, float)):
        value = str(value)
    if not isinstance(value, str):
        raise InvalidField(
            f"{param}: an answer must be a text, a number or a boolean, not {shorten(value)}", param=param
        )
    if len(value) > MAX_ANSWER_CHARS:
        raise InvalidField(
            f"{param}: the answer has {len(value)} characters; at most {MAX_ANSWER_CHARS} are allowed",
            param=param,
        )
    return value if value.strip() else None


def _shown(slug: str) -> str:
    return slug if re.match(_SLUG, slug) and len(slug) <= 64 else shorten(slug, 64)


def answer_lines(answers: Mapping[str, str]) -> str:
    """One line an answer, the answer as JSON text: whatever it holds, it stays one line of data."""
    return "\n".join(f"- {slug}: {_one_line(text)}" for slug, text in answers.items())


def _one_line(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return _LINE_ENDS.sub(lambda found: f"\\u{ord(found[0]):04x}", quoted)
