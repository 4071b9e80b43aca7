"""One prompt of `bench quality`: answered in full once, then by every setting, all from the same chunks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from blendkv.bench.answering import Stops, go_on, own_answer
from blendkv.bench.conditions import conditioned
from blendkv.bench.forcing import STEPS, compare
from blendkv.bench.laying import Cell, lay_out
from blendkv.bench.mapping import MAPPING, Mapped, map_chunks, reduce_first
from blendkv.bench.measure import token_f1
from blendkv.bench.methods import Blend, Case, forward
from blendkv.bench.records import Example
from blendkv.bench.scores import rouge_l
from blendkv.bench.settings import Setting
from blendkv.scoring import add_scores

ANSWER_TOKENS = {"qa": 32, "summary": 128, "dialogue": 128}
"""Most tokens of an answer, by style."""
FIGURES = ("charged_budget", "kl", "kl_first", "same", "f1", "rouge_l", "ttft_s", "speedup")
Figures = dict[str, Any]


class Seconds(NamedTuple):
    """How long a call took.

    Attributes:
        wall: by the clock on the wall.
        own: what two calls are compared by. On one CPU thread the time that this process was computing, which other
            work on the machine hardly changes; elsewhere `wall`.
    """

    wall: float
    own: float


@dataclass
class Examiner:
    """Measures prompts on one model.

    Args:
        model: a transformers decoder.
        tokenizer: its tokenizer.
        answers: whether answers are generated and scored.
        max_new_tokens: most tokens of an answer; None: by the task's style.
        steps: answer tokens over which KL is taken.
    """

    model: PreTrainedModel
    tokenizer: Any
    answers: bool = True
    max_new_tokens: int | None = None
    steps: int = STEPS
    _warm: set = field(default_factory=set)

    def __post_init__(self) -> None:
        """Learns where answers end."""
        self.stops = Stops.of(self.model, self.tokenizer)
        self.device = next(self.model.parameters()).device
        self.own_time = self.device.type == "cpu" and torch.get_num_threads() == 1

    @torch.no_grad()
    def measure(self, example: Example, cell: Cell, settings: Iterable[Setting]) -> Iterator[tuple[Setting, Figures]]:
        """The figures of each setting on one prompt, as they are done.

        Chunks are computed once for each condition, and full recompute's answer; every other setting is then one prompt
        and one forward of forced tokens, and of its own answer only what differs from the forced one is generated.
        `speedup` is the time of full recompute, on this prompt and in this call, over the setting's (`Seconds.own`).
        """
        limit, settings = self.max_new_tokens or ANSWER_TOKENS[example.style], list(settings)
        case = lay_out(self.model, self.tokenizer, example, cell)
        teacher = _Teacher.of(self, case, cell, limit)
        plain, condition = case, None
        case = self._scored(plain, settings, condition)
        mapped: tuple[Mapped, Seconds] | None = None
        for setting in sorted(settings, key=lambda s: s.condition or ""):  # stable: one condition's chunks at a time
            if setting.condition != condition:
                condition = setting.condition
                case = self._scored(conditioned(plain, condition, self.tokenizer), settings, condition)
            if setting.method in MAPPING:
                mapped = mapped or self._timed(lambda: map_chunks(plain, self.stops, limit))
                figures = self._mapped(setting.method, case, *mapped, limit)
            elif setting.method == "full":
                figures = teacher.figures()
            elif setting.how is None:
                figures = self._forced(case, cell, setting, teacher, _alone(case), DynamicCache, limit)
                figures["charged_budget"] = 0.0
            else:
                maker = setting.how.cache_maker(case)
                figures = self._forced(case, cell, setting, teacher, case.ids, maker, limit)
            if self.answers and example.answers:
                figures["f1"] = token_f1(figures["answer"], example.answers)
                figures["rouge_l"] = rouge_l(figures["answer"], example.answers)
            taken = figures.pop("taken")
            figures |= {"ttft_s": taken.wall, "speedup": teacher.seconds.own / taken.own}
            yield setting, dict.fromkeys((*FIGURES, "answer")) | figures | {"tokens": int(case.ids.shape[1])}

    def _scored(self, case: Case, settings: Sequence[Setting], condition: str | None) -> Case:
        """A case whose chunks have the scores that the settings of a condition want."""
        wanted = (s.how.selector.stored for s in settings if s.condition == condition and isinstance(s.how, Blend))
        if not (stored := {name for names in wanted for name in names}):
            return case
        return replace(case, chunks=tuple(add_scores(self.model, case.chunks, sorted(stored), self.tokenizer)))

    def first(self, key: Any, ids: Tensor, make_cache: Callable[[], Cache | None]) -> tuple[Cache, Tensor, Seconds]:
        """A prompt's cache, `[1, 1, V]` logits of its first token, and the seconds until that token was on the host.

        What has never run before runs once before it is timed.
        """

        def run() -> tuple[Cache, Tensor]:
            cache = make_cache()
            cache = DynamicCache() if cache is None else cache  # an empty one may be false
            logits = forward(self.model, ids[:, cache.get_seq_length() :], cache)
            logits.argmax(-1).tolist()
            return cache, logits

        if key not in self._warm:
            self._warm.add(key)
            run()
        (cache, logits), seconds = self._timed(run)
        return cache, logits, seconds

    def seconds_of_batch(self, key: Any, case: Case, batch: int, how: Any) -> Seconds:
        """Seconds until the first token of several equal prompts at once."""
        many = replace(case, batch=batch)
        maker = how.cache_maker(many) if how is not None else DynamicCache
        return self.first((key, batch), many.ids, maker)[2]

    def _forced(
        self,
        case: Case,
        cell: Cell,
        setting: Setting,
        teacher: _Teacher,
        ids: Tensor,
        make_cache: Callable[[], Cache | None],
        limit: int,
    ) -> Figures:
        cache, first, seconds = self.first(setting.key, ids, make_cache)
        logits = [first[0]]
        if len(teacher.answer) > 1:
            forced = teacher.answer[None, :-1].to(ids.device)
            logits.append(forward(self.model, forced, cache, keep=len(teacher.answer) - 1)[0])
        whole = torch.cat(logits)
        found = compare(teacher.logits, whole, teacher.answer, self.stops.end)
        budget = setting.how.charged_budget(case, getattr(cache, "report", None)) if setting.how else None
        if cell.batch > 1 and setting.how is not None:
            seconds = self.seconds_of_batch(setting.key, case, cell.batch, setting.how)
        figures = {
            "charged_budget": budget,
            "kl": found.kl,
            "kl_first": found.first_kl,
            "same": found.same,
            "taken": seconds,
        }
        if self.answers:
            chosen, prompt = whole.argmax(-1).tolist(), ids.shape[1]
            try:
                said = own_answer(self.model, cache, prompt, teacher.answer, chosen, self.stops, limit)
            except RuntimeError:  # a cache of sliding layers cannot be cropped: from the start, then
                cache, first, _ = self.first(setting.key, ids, make_cache)
                said = go_on(self.model, cache, [int(first.argmax())], self.stops, limit)
            figures["answer"] = self.stops.text(said)
        return figures

    def _mapped(self, method: str, case: Case, mapped: Mapped, seconds: Seconds, limit: int) -> Figures:
        if method == "maprerank":
            return {"charged_budget": 1.0, "taken": seconds, "answer": self.stops.text(mapped.best)}
        (cache, first), more = self._timed(lambda: reduce_first(case, mapped, self.stops))
        said = go_on(self.model, cache, [first], self.stops, limit)
        taken = Seconds(seconds.wall + more.wall, seconds.own + more.own)
        return {"charged_budget": 1.0, "taken": taken, "answer": self.stops.text(said)}

    def _timed(self, call: Callable[[], Any]) -> tuple[Any, Seconds]:
        self._wait()
        begin, own = time.perf_counter(), time.process_time()
        result = call()
        self._wait()
        wall = time.perf_counter() - begin
        return result, Seconds(wall, time.process_time() - own if self.own_time else wall)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True, eq=False)
class _Teacher:
    """Full recompute of one prompt: `[N]` greedy tokens, `[N, V]` their logits, its text, and seconds to the first."""

    answer: Tensor
    logits: Tensor
    text: str | None
    seconds: Seconds

    @classmethod
    def of(cls, examiner: Examiner, case: Case, cell: Cell, limit: int) -> _Teacher:
        cache, first, seconds = examiner.first("full", case.ids, DynamicCache)
        logits = [first[0]]
        while len(logits) < examiner.steps:
            logits.append(forward(examiner.model, logits[-1].argmax(-1)[None], cache)[0])
        whole = torch.cat(logits)
        answer = whole.argmax(-1)
        if cell.batch > 1:
            seconds = examiner.seconds_of_batch("full", case, cell.batch, None)
        text = None
        if examiner.answers:
            text = examiner.stops.text(go_on(examiner.model, cache, answer.tolist(), examiner.stops, limit))
        return cls(answer, whole, text, seconds)

    def figures(self) -> Figures:
        """Its own figures: no distance from itself."""
        exact = {"charged_budget": 1.0, "kl": 0.0, "kl_first": 0.0, "same": True}
        return exact | {"taken": self.seconds, "answer": self.text}


def _alone(case: Case) -> Tensor:
    """`[1, T]` the prompt without its chunks."""
    head = case.chunks[0].ids
    question = torch.tensor(case.question, dtype=torch.long)
    return torch.cat([head, question])[None].to(next(case.model.parameters()).device)
