"""From the shape that an answer must have to the grammar that its tokens keep to."""

from __future__ import annotations

from kiln.chat.schemas import make_ready, to_rule
from kiln.chat.served import ServedModel
from kiln.core.errors import GrammarFailed, InvalidField
from kiln.core.turn import AnswerFormat, ChatTurn

# Behind the close of the thinking templates write line breaks, which are no part of the answer.
LEAD = r"/\n{0,3}/"


def to_grammar(turn: ChatTurn, model: ServedModel, *, in_reasoning: bool) -> str | None:
    """The grammar of a turn's answer, None where it is free. `in_reasoning`: the prompt opened a thought.

    Compiled here once, so that what cannot be enforced is refused before anything runs. Slow the first
    time: for a worker thread. Raises InvalidField.
    """
    answer = turn.answer_format
    if answer is None:
        return None
    rules = [f"answer: {_answer_rule(answer, model)}"]
    start = "start: LEAD answer\nLEAD: " + LEAD if in_reasoning else "start: answer"
    grammar = "\n".join([start, *rules])
    try:
        model.grammars.state(grammar).allowed()
    except GrammarFailed as error:
        raise InvalidField(f"{answer.param}: {error.message}", param=answer.param) from None
    return grammar


def _answer_rule(answer: AnswerFormat, model: ServedModel) -> str:
    if answer.kind == "json_object":
        return to_rule({"type": "object"})
    schema = {} if answer.schema is None else answer.schema
    return to_rule(make_ready(schema, answer.param, model.grammars, strict=answer.strict))
