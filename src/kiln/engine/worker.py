"""The engine thread's work: commands in, steps turned, reports out.

Invariant of the loop: `schedule` decides, `begin`, `apply` and `accept` write; nothing else touches
scheduler state. Commands are carried out between steps only, but for skips, and everything that a step
produced leaves in one report.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections import deque
from collections.abc import Sequence as SequenceOf

from kiln.core.errors import AdapterUnusable, EngineFailed, GrammarFailed, KilnError
from kiln.core.tokens import FinishReason
from kiln.engine.messages import Cancel, CloseThinking, Command, EngineLimits, Submit
from kiln.engine.outbox import Outbox, Publish
from kiln.engine.outputs import OutputProcessor
from kiln.engine.runner import AdapterFailed, KVExhausted, ModelRunner
from kiln.engine.sampling.grammar import GrammarCompiler, GrammarReady, GrammarThreads
from kiln.engine.schedule.host import HostPrefixes
from kiln.engine.schedule.plan import Copy, Limits, PlannedCall, Step
from kiln.engine.schedule.scheduler import Scheduler
from kiln.engine.sequence import Sequence
from kiln.thinking.gate import ThinkingGate

log = logging.getLogger(__name__)

# Decode calls of more rows take no drafts: beyond that a row costs as much as a call that it might save.
DRAFT_ROWS = 16
# Idle for so long, the worker moves retained prefixes to the host's memory.
TIDY_AFTER_S = 0.1

# Commands, and what the compiling threads say, in one line: either wakes an idle worker.
Inbox = queue.SimpleQueue[Command | GrammarReady | None]


class EngineWorker:
    """Everything that lives on the engine thread."""

    def __init__(
        self,
        runner: ModelRunner,
        pieces: SequenceOf[bytes],
        limits: EngineLimits,
        publish: Publish,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._runner = runner
        self._pieces = pieces
        # What cannot be trimmed cannot take a draft back.
        self._draft_tokens = limits.draft_tokens if runner.can_share else 0
        self._checks_books = limits.checks_books
        keeps = runner.can_share and limits.host_bytes > 0
        self._scheduler = Scheduler(
            Limits(
                running=limits.parallel,
                slots=runner.sequences,
                kv_cells=runner.kv_cells,
                step_tokens=limits.step_tokens,
                stall_tokens=limits.stall_tokens,
                max_rows=runner.max_rows,
                can_share=runner.can_share,
                retain_tokens=limits.retain_tokens,
                turn_steps=limits.turn_steps,
                draft_rows=DRAFT_ROWS,
                exact_drafts=runner.exact_drafts,
            ),
            HostPrefixes(limits.host_bytes, runner.save) if keeps else None,
        )
        self._sequences: dict[int, Sequence] = {}
        self._compiler = grammars
        self._grammars: GrammarThreads | None = None
        # Sequences that wait for their grammar, which the scheduler has not heard of yet.
        self._compiling: dict[int, Sequence] = {}
        self._commands: Inbox | None = None
        # Commands that came during a step and wait for its end.
        self._put_off: deque[Command | GrammarReady | None] = deque()
        self._outbox = Outbox(publish)
        self._outputs = OutputProcessor(runner, self._scheduler, self._outbox)
        # Whether the cache refused the last call.
        self._refused = False

    def run(self, commands: Inbox) -> None:
        """Turn steps until a None command arrives; sleep on the queue while idle."""
        self._commands = commands
        if self._compiler is not None:
            self._grammars = GrammarThreads(self._compiler, commands.put)
        try:
            self._work(commands)
        finally:
            if self._grammars is not None:
                self._grammars.close()

    def _work(self, commands: Inbox) -> None:
        while True:
            while self._scheduler.is_idle or self._put_off or not commands.empty():
                if self._checks_books and self._scheduler.is_idle:
                    self._check_books()
                command = self._put_off.popleft() if self._put_off else self._wait(commands)
                if command is None:
                    self._end_all(FinishReason.CANCELLED)
                    self._flush()
                    return
                self._handle(command)
                if commands.empty() and not self._put_off:
                    self._flush()
            try:
                self._step()
            except KilnError as error:
                log.error("engine step failed: %s", error.message)
                self._end_all(FinishReason.ERROR, error)
                # What the native side holds after a failed call is unknown.
                self._forget_all()
            self._flush()

    def _wait(self, commands: Inbox) -> Command | GrammarReady | None:
        """The next command. While none comes the cache is tidied, not before a second turn had its chance
        to go on where its first one ended."""
        if self._scheduler.is_idle and commands.empty():
            with contextlib.suppress(queue.Empty):
                return commands.get(timeout=TIDY_AFTER_S)
            self._tidy(commands)
        return commands.get()

    def _tidy(self, commands: Inbox) -> None:
        """Give retained prefixes up until a command comes, free what is dead, and report what is in use."""
        while commands.empty() and (slots := self._scheduler.tidy()):
            self._drop(slots)
        if self._scheduler.ledger.dead and self._scheduler.collect_now():
            self._runner.collect()
            self._flush()
        if self._checks_books:
            self._check_books()

    def _handle(self, command: Command | GrammarReady) -> None:
        if isinstance(command, Submit):
            self._add(command)
        elif isinstance(command, GrammarReady):
            self._take_grammar(command)
        elif (sequence := self._sequences.get(command.key)) is not None:
            if isinstance(command, Cancel):
                self._end(sequence, FinishReason.CANCELLED)
            elif sequence.gate is not None:
                sequence.gate.skip()

    def _hear_skips(self) -> None:
        """Skips that came while the model computed hold for the tokens about to be picked."""
        while self._commands is not None and not self._commands.empty():
            command = self._commands.get()
            if isinstance(command, CloseThinking) and command.key in self._sequences:
                self._handle(command)
            else:
                self._put_off.append(command)

    def _add(self, submit: Submit) -> None:
        request = submit.request
        gate = None
        if request.thinking is not None:
            gate = ThinkingGate(request.thinking.close, request.thinking.limits, self._pieces)
        sequence = Sequence(submit.key, request, gate, submit.submitted, draft_tokens=self._draft_tokens)
        self._sequences[submit.key] = sequence
        if request.grammar is None:
            self._scheduler.add(sequence)
        elif self._grammars is None:
            self._end(sequence, FinishReason.ERROR, GrammarFailed("this engine follows no grammars"))
        else:
            self._compiling[submit.key] = sequence
            state = self._grammars.ask(submit.key, request.grammar)
            if state is not None:
                self._take_grammar(GrammarReady(submit.key, state))

    def _take_grammar(self, ready: GrammarReady) -> None:
        """Queue the sequence that waited for this grammar, unless it has been cancelled meanwhile."""
        sequence = self._compiling.pop(ready.key, None)
        if sequence is None:
            return
        if isinstance(ready.result, KilnError):
            self._end(sequence, FinishReason.ERROR, ready.result)
        else:
            sequence.grammar = ready.result
            self._scheduler.add(sequence)

    # One step.

    def _step(self) -> None:
        step = self._scheduler.schedule()
        self._begin(step)
        if step.stuck is not None:
            error = EngineFailed("the KV cache cannot hold the request")
            self._end(step.stuck, FinishReason.ERROR, error)
        calls = [(planned, True) for planned in step.decode] + [(planned, False) for planned in step.prefill]
        for planned, is_decode in calls:
            if not self._call(planned, is_decode=is_decode):
                break  # a later call of the step may build on this one
        self._outbox.steps += 1

    def _begin(self, step: Step) -> None:
        dropped, copies = self._scheduler.begin(step, time.monotonic())
        self._drop(dropped)
        if step.collects:
            self._runner.collect()
        for copy in copies:
            if isinstance(copy, Copy):
                self._runner.copy(copy.source, copy.target, copy.length)
            else:
                try:
                    self._runner.restore(copy.target, copy.saved.data)
                except EngineFailed:
                    # Else every prompt that begins with it would fail like this one, and all beside it.
                    self._scheduler.forget_saved(copy.saved)
                    raise
                self._runner.trim(copy.target, copy.length)
                self._outbox.restored += copy.length
        self._outbox.preemptions += len(step.preempted)
        if step.admitted:
            # Before the model sees them: if it dies of one of them, it is known whose fault that may be.
            self._outbox.admitted.extend(admission.sequence.key for admission in step.admitted)
            self._flush()
        self._outbox.cached += sum(admission.shared for admission in step.admitted)

    def _call(self, planned: PlannedCall, *, is_decode: bool) -> bool:
        """Run a call and pick from its logits. False if the cache refused it and nothing was computed."""
        started = time.monotonic()
        try:
            logits = self._runner.execute(planned.call)
        except KVExhausted:
            log.warning("the KV cache refused %d rows that the books had room for", planned.call.rows)
            self._forget_all()
            if self._refused:
                self._scheduler.learn_exhausted(planned.call)
            self._refused = True
            return False
        except AdapterFailed as failure:
            log.warning("an adapter cannot be used: %s", failure)
            self._end_users_of(failure)
            return False
        self._refused = False
        self._hear_skips()
        now = time.monotonic()
        self._scheduler.apply(planned)
        self._note_time(planned.rows, now - started, is_decode=is_decode)
        for sequence, reason, error in self._outputs.process(planned, logits, now):
            self._end(sequence, reason, error)
        if self._grammars is not None:
            states = [s.grammar for s in planned.rows if s.grammar is not None and s.follows_grammar]
            self._grammars.foresee(states)
        self._outbox.sampling_s += time.monotonic() - now
        return True

    def _note_time(self, rows: SequenceOf[Sequence], seconds: float, *, is_decode: bool) -> None:
        adapter_s = self._runner.adapter_s
        if adapter_s:
            seconds -= adapter_s
            for sequence in set(rows):
                sequence.adapter_s += adapter_s
        if is_decode:
            self._outbox.decode_s += seconds
            for sequence in rows:
                sequence.decode_s += seconds
        else:
            self._outbox.prefill_s += seconds
            for sequence in set(rows):
                sequence.prefill_s += seconds

    def _end(self, sequence: Sequence, reason: FinishReason, error: KilnError | None = None) -> None:
        self._drop(self._scheduler.finish(sequence))
        self._compiling.pop(sequence.key, None)
        del self._sequences[sequence.key]
        self._outbox.post(sequence.key).end = sequence.end(reason, time.monotonic(), error)

    def _end_users_of(self, failure: AdapterFailed) -> None:
        error = AdapterUnusable(f"the adapter cannot be used with this model: {failure.reason}")
        for sequence in list(self._sequences.values()):
            if any(use.path == failure.path for use in sequence.adapters):
                self._end(sequence, FinishReason.ERROR, error)

    def _end_all(self, reason: FinishReason, error: KilnError | None = None) -> None:
        for sequence in list(self._sequences.values()):
            self._end(sequence, reason, error)

    def _forget_all(self) -> None:
        """Give up every retained prefix, and free the cells unless an exact sequence is under way."""
        self._drop(self._scheduler.forget_all())
        if self._scheduler.collect_now():
            self._runner.collect()

    def _check_books(self) -> None:
        """AssertionError unless the books are whole, and say of every slot what the model's cache holds."""
        ledger = self._scheduler.ledger
        ledger.check()
        for slot in range(self._runner.sequences):
            held = self._runner.length(slot)
            assert held == ledger.length(slot), f"slot {slot} holds {held} tokens, not {ledger.length(slot)}"

    def _drop(self, slots: SequenceOf[int]) -> None:
        for slot in slots:
            self._runner.drop(slot)

    def _flush(self) -> None:
        """Hand everything that happened to the event loop at once."""
        self._outbox.flush(self._scheduler, waiting=self._scheduler.waiting + len(self._compiling))
