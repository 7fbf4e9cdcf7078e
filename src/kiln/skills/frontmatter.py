"""The YAML head of a SKILL.md, read within bounds.

Source: the Agent Skills specification. Its fields are texts, maps of texts and lists of texts, so every
scalar is taken as the text it is written as (`version: 1.0` is "1.0"). Anchors, aliases and tags have no
use there and are refused before anything is built of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

from kiln.skills.files import Fault, Faulty

MAX_HEAD_CHARS = 32_768
MAX_DEPTH = 3
# Keys, values and items. The format needs a dozen, and a scanner in Python takes its time for thousands.
MAX_NODES = 500
_FENCE = "---"
# Controls but tab and line feed, and halves of surrogate pairs, which YAML escapes can write.
_ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f\x80-\x84\x86-\x9f\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Entry:
    """A value of the head and the line of the file on which it begins."""

    value: str | dict[str, Entry] | tuple[Entry, ...]
    line: int


def split(text: str) -> tuple[dict[str, Entry], str]:
    """The fields of the head, and the instructions below it. Raises Faulty."""
    lines = text.split("\n")
    if lines[0].rstrip() != _FENCE:
        raise Faulty(Fault(f"it must begin with a line `{_FENCE}`, the start of the YAML head", 1))
    end = next((i for i, line in enumerate(lines[1:], start=1) if line.rstrip() == _FENCE), None)
    if end is None:
        raise Faulty(Fault(f"the YAML head has no end: a second line `{_FENCE}` is missing", 1))
    head = "\n".join(lines[1:end])
    if len(head) > MAX_HEAD_CHARS:
        raise Faulty(
            Fault(f"the YAML head has {len(head)} characters; at most {MAX_HEAD_CHARS} are allowed", 1)
        )
    return _read(head), "\n".join(lines[end + 1 :]).strip()


def _read(head: str) -> dict[str, Entry]:
    try:
        _refuse_what_could_explode(head)
        node = yaml.compose(head, yaml.SafeLoader)
    except yaml.reader.ReaderError as error:
        line = head.count("\n", 0, error.position) + 2
        raise Faulty(Fault("the head holds a character that YAML does not allow", line)) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(filter(None, (error.context, error.problem)))
        raise Faulty(Fault(f"the head is not valid YAML: {problem}", _line(mark))) from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise Faulty(Fault(f"the head is not valid YAML: {error}", 2)) from None
    if not isinstance(node, yaml.MappingNode):
        raise Faulty(Fault("the head must be a YAML mapping with at least `name` and `description`", 2))
    fields = _entry(node).value
    assert isinstance(fields, dict)
    return fields


def _refuse_what_could_explode(head: str) -> None:
    """Events come one by one, so this ends at the first that is refused, whatever follows it."""
    depth = nodes = 0
    for event in yaml.parse(head, yaml.SafeLoader):
        line = _line(event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            raise Faulty(Fault(f"YAML aliases (`*{event.anchor}`) are not allowed", line))
        if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
            raise Faulty(Fault(f"YAML anchors (`&{event.anchor}`) are not allowed", line))
        if isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)) and event.tag is not None:
            raise Faulty(Fault("YAML tags (`!…`) are not allowed", line))
        nodes += isinstance(event, yaml.NodeEvent)
        if nodes > MAX_NODES:
            raise Faulty(Fault(f"the head has more than {MAX_NODES} keys, values and items", line))
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise Faulty(Fault("the head is nested too deeply", line))
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _entry(node: yaml.Node) -> Entry:
    line = _line(node.start_mark)
    if isinstance(node, yaml.ScalarNode):
        if _ODD.search(node.value):
            raise Faulty(Fault("the head holds a control character", line))
        # An empty plain scalar is YAML's null; here it is an empty text.
        return Entry(node.value, line)
    if isinstance(node, yaml.SequenceNode):
        return Entry(tuple(_entry(item) for item in node.value), line)
    fields: dict[str, Entry] = {}
    for key_node, value_node in node.value:
        key = _entry(key_node)
        if not isinstance(key.value, str):
            raise Faulty(Fault("a key must be a text", key.line))
        if key.value in fields:
            raise Faulty(Fault(f"the key `{key.value}` stands twice", key.line))
        value = _entry(value_node)
        # The line of the key: where a reader looks, also for a block that begins below it.
        fields[key.value] = Entry(value.value, key.line)
    return Entry(fields, line)


def _line(mark: Any) -> int:
    # Marks count from 0, and the head begins on the file's second line.
    return 2 if mark is None else mark.line + 2
