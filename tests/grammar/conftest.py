"""The bundled model behind a chat service, without HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from kiln.backends.llamacpp import LlamaModel, LlamaRunner
from kiln.chat.models.served import ServedModel
from kiln.chat.preparing.prepare import Prepared
from kiln.chat.service import ChatService
from kiln.chat.telemetry.observe import Observers
from kiln.cli.assembly import describe_model, load_model
from kiln.core.completion import ChoiceEnd, Completion
from kiln.core.messages import Conversation, Message
from kiln.core.sampling import SamplingOverrides
from kiln.core.turn import ChatTurn
from kiln.engine.loop import BatchingEngine
from kiln.engine.sampling.grammar import GrammarCompiler
from servers.server import FIXTURES, PROMPT, settings_of
from text.samples import QWEN3


@dataclass(frozen=True)
class Chat:
    """Short ways to ask."""

    service: ChatService
    model: ServedModel

    def prepare(self, text: str = PROMPT, /, **fields: Any) -> Prepared:
        """A prepared turn, greedy unless asked otherwise."""
        conversation = Conversation(
            messages=(Message(role="user", content=text),),
            tools=tuple(fields.pop("tools", ())),
            template_kwargs=fields.pop("template_kwargs", {}),
        )
        fields.setdefault("sampling", SamplingOverrides(temperature=fields.pop("temperature", 0.0)))
        return self.service.prepare(ChatTurn(conversation, **fields))

    async def ask(self, text: str = PROMPT, /, **fields: Any) -> ChoiceEnd:
        (choice,) = (await self.start(self.prepare(text, **fields))).choices
        return choice

    async def start(self, prepared: Prepared) -> Completion:
        return await self.service.start(prepared, entered=0.0).collect()


def _describe(**values: Any) -> tuple[LlamaModel, ServedModel]:
    settings = settings_of(**values)
    llama = load_model(settings)
    return llama, describe_model(settings, llama)


@pytest.fixture(scope="session")
def bundled() -> Iterator[tuple[LlamaModel, ServedModel]]:
    loaded = _describe()
    yield loaded
    loaded[1].grammars.close()
    loaded[0].close()


@pytest.fixture(scope="session")
def multi_close() -> Iterator[tuple[LlamaModel, ServedModel]]:
    """Its tokenizer writes the close tag with several ordinary tokens."""
    loaded = _describe(model__path=str(FIXTURES / "multi-close.gguf"))
    yield loaded
    loaded[1].grammars.close()
    loaded[0].close()


@pytest.fixture(scope="session")
def self_opening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LlamaModel, ServedModel]]:
    """Its template leaves it to the model to open a thought, and kiln is told not to do it either."""
    template = tmp_path_factory.mktemp("template") / "qwen3.jinja"
    template.write_text(QWEN3, encoding="utf-8")
    loaded = _describe(model__chat_template_file=str(template), model__seed_open_tag="never")
    yield loaded
    loaded[1].grammars.close()
    loaded[0].close()


async def _chat(loaded: tuple[LlamaModel, ServedModel]) -> AsyncIterator[Chat]:
    llama, model = loaded
    engine = BatchingEngine(
        lambda: LlamaRunner(llama, sequences=32, kv_cells=16384, threads=1),
        pieces=llama.pieces,
        context_length=model.context_length,
        parallel=16,
        max_queue=1000,
        grammars=GrammarCompiler(llama),
    )
    await engine.start()
    service = ChatService(model, engine, Observers([]))
    yield Chat(service, model)
    await service.close()


@pytest.fixture
async def chat(bundled: tuple[LlamaModel, ServedModel]) -> AsyncIterator[Chat]:
    async for chat in _chat(bundled):
        yield chat


@pytest.fixture
async def multi_close_chat(multi_close: tuple[LlamaModel, ServedModel]) -> AsyncIterator[Chat]:
    async for chat in _chat(multi_close):
        yield chat


@pytest.fixture
async def self_opening_chat(self_opening: tuple[LlamaModel, ServedModel]) -> AsyncIterator[Chat]:
    async for chat in _chat(self_opening):
        yield chat
