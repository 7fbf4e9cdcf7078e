"""Reduced chat templates in the style of known families, and a toy tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from kiln.core.messages import Conversation, Message
from kiln.text.template import ChatTemplate

CONTROL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
USER_DEFINED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "  ", "\n\n")

QWEN3 = """\
{%- if tools %}{{- '<|im_start|>system\\n<tools>' }}{% for tool in tools %}
{{- '\\n' }}{{- tool | tojson }}
{%- endfor %}{{- '\\n</tools><tool_call></tool_call><|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' %}
        {%- set thought = message.reasoning_content or '' %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if thought %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

QWEN35 = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content | trim) + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate, got ' + message['role']) }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}"""

MAGISTRAL = "{{- '[SYSTEM_PROMPT]Draft in [THINK]like this[/THINK].[/SYSTEM_PROMPT]' }}" + MISTRAL

GPT_OSS = """\
{{- '<|start|>system<|message|>Think. Effort: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

GEMMA4 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|turn>' + message.role + '\\n' + message.content + '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|turn>model\\n' }}
    {%- if not enable_thinking %}{{- '<|channel>thought\\n<channel|>' }}{%- endif %}
{%- endif %}"""

CHANNEL_TOKENS = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>")
LLAMA_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
MISTRAL_TOKENS = ("<s>", "</s>", "[INST]", "[/INST]")


class ToyTokenizer:
    """Bytes and added tokens, the longest first; user-defined ones match whether asked to or not."""

    def __init__(self, control: Sequence[str], user_defined: Sequence[str] = ()) -> None:
        self.control_spellings: Sequence[str] = sorted(control, key=len, reverse=True)
        self.added_spellings: Sequence[str] = sorted([*control, *user_defined], key=len, reverse=True)
        self._ids = {text: 256 + number for number, text in enumerate(self.added_spellings)}
        self.pieces: Sequence[bytes] = [
            *(bytes([byte]) for byte in range(256)),
            *(text.encode() for text in self.added_spellings),
        ]
        self.n_vocab = len(self.pieces)
        self.bos_text = control[0] if control else ""
        self.eos_text = control[1] if len(control) > 1 else ""
        self.eos_ids = frozenset([self._ids[self.eos_text]] if self.eos_text else [])
        self.control_ids = frozenset(self._ids[text] for text in control)
        self.added_ids = frozenset(self._ids.values())

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(text):
            for spelling in self.added_spellings:
                is_control = spelling in self.control_spellings
                if text.startswith(spelling, at) and (parse_special or not is_control):
                    ids.append(self._ids[spelling])
                    at += len(spelling)
                    break
            else:
                ids.extend(text[at].encode("utf-8", "replace"))
                at += 1
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.pieces[i] for i in ids).decode()

    def template(self, source: str, *, extra: Sequence[str] = ()) -> ChatTemplate:
        return ChatTemplate(
            source,
            bos_text=self.bos_text,
            eos_text=self.eos_text,
            added_spellings=self.added_spellings,
            control_spellings=self.control_spellings,
            extra_spellings=extra,
        )


def ask(*contents: str, role: str = "user") -> Conversation:
    return Conversation(messages=tuple(Message(role, content) for content in contents))
