"""From scores to a token: random numbers, filters, draws."""

from __future__ import annotations

import itertools
import math
import types

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import logits_process as theirs

from fp4_inductor.generation import sampling
from fp4_inductor.generation.processors import FILTERS, among, read_processors

VOCABULARY = 1000
# Random123's known answers for Philox4x32-10 (kat_vectors).
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(int(word, 16)) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_gives_the_known_answers(counter, key, answer):
    assert sampling.philox(words(key), words(counter)) == words(answer)


def test_a_number_depends_on_seed_token_and_row_alone():
    at = lambda seed, count, rows: sampling.uniform(torch.tensor(seed), torch.tensor(count), rows)  # noqa: E731
    assert torch.equal(at(7, 3, 5), at(7, 3, 2000)[:5])
    numbers = torch.cat([at(seed, count, 50) for seed in (0, 1, 2**32, 2**63 - 1) for count in (0, 1, 2**33)])
    assert numbers.unique().numel() == numbers.numel()
    assert numbers.min() >= 0 and numbers.max() < 1


def scores_of(rows: int = 7, vocabulary: int = VOCABULARY) -> torch.Tensor:
    scores = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0)) * 3
    scores[0] = scores[0].round()  # ties
    scores[1] = 0  # every token alike
    scores[2, 5] = 80  # one token for certain
    scores[3, : vocabulary // 2] = -torch.inf
    return scores


STATE = types.SimpleNamespace(count=torch.tensor(2), seen=torch.zeros(7, VOCABULARY, dtype=torch.bool))
IDS = torch.randint(0, VOCABULARY, (7, 12), generator=torch.Generator().manual_seed(1))
STATE.seen.scatter_(1, IDS, True)
OPTIONS = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.05,
    "typical_p": 0.7,
    "repetition_penalty": 1.3,
    "min_new_tokens": 5,
    "suppress_tokens": [3, 4],
}


def both(**options) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores after Transformers' processors and after ours. Ten tokens are a prompt, two were generated."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = GenerationConfig(do_sample=True, **{"num_beams": 1} | options)
    config._eos_token_tensor = torch.tensor([8, 9])
    model = types.SimpleNamespace(config=LlamaConfig(), _merge_criteria_processor_list=lambda a, b: a)
    processors = LlamaForCausalLM._get_logits_processor(model, config, input_ids_seq_length=10, device="cpu")
    program, why = read_processors(processors, 10, True)
    assert why == [] and len(program.entries) == len(processors) == len(options)
    ours = scores_of()
    for entry, tensors in zip(program.entries, program.tensors(VOCABULARY)):
        ours = FILTERS[entry.name](ours, tensors, entry.numbers, STATE)
    return processors(IDS, scores_of()), ours


@pytest.mark.parametrize("names", [*itertools.combinations(OPTIONS, 1), *itertools.combinations(OPTIONS, 2), tuple(OPTIONS)], ids="+".join)
def test_filtered_probabilities_are_those_of_transformers(names):
    wanted, got = both(**{name: OPTIONS[name] for name in names})
    assert not torch.equal(wanted, scores_of())
    assert torch.equal(wanted, got)
    assert torch.equal(wanted.softmax(-1), got.softmax(-1))


@pytest.mark.parametrize("options", [{"top_k": 2000}, {"top_p": 1e-4}, {"top_p": 0.999}, {"min_p": 1.0}, {"typical_p": 0.999}, {"temperature": 1e-3}])
def test_extreme_values_too(options):
    wanted, got = both(**options)
    assert torch.equal(wanted, got)


def test_the_order_is_that_of_the_list():
    """Temperature before top_p is another set of tokens than after it."""
    processors = [theirs.TopPLogitsWarper(0.8), theirs.TemperatureLogitsWarper(3.0)]
    results = []
    for order in (processors, processors[::-1]):
        program, _ = read_processors(order, 10, True)
        ours = scores_of()
        for entry, tensors in zip(program.entries, program.tensors(VOCABULARY)):
            ours = FILTERS[entry.name](ours, tensors, entry.numbers, STATE)
        assert torch.equal(ours, theirs.LogitsProcessorList(order)(IDS, scores_of()))
        results.append(ours)
    assert not torch.equal(*results)


def with_padding(lengths):
    """As Transformers 5.23 makes it where it is given a mask."""
    made = theirs.RepetitionPenaltyLogitsProcessor(1.1)
    made.prompt_ignore_length = torch.tensor(lengths)
    return made


def test_a_repetition_penalty_without_padding_is_served():
    program, why = read_processors([with_padding([0, 0])], 10, True)
    assert [entry.name for entry in program.entries] == ["repetition_penalty"] and why == []


@pytest.mark.parametrize(
    ("processor", "why"),
    [
        (theirs.NoRepeatNGramLogitsProcessor(2), "NoRepeatNGramLogitsProcessor is not served"),
        (theirs.TopKLogitsWarper(5, filter_value=-100.0), "filter_value=-100"),
        (theirs.RepetitionPenaltyLogitsProcessor(1.1, prompt_ignore_length=3), "prompt_ignore_length=3"),
        (with_padding([0, 2]), "prompt_ignore_length=2"),
        (lambda ids, scores: scores, "<lambda> is not served"),
        (type("Mine", (theirs.TemperatureLogitsWarper,), {})(0.5), "Mine is not served"),
    ],
)
def test_what_a_step_cannot_do_has_a_reason(processor, why):
    program, [reason] = read_processors([processor], 10, True)
    assert program.entries == () and why in reason


def test_tokens_outside_of_the_vocabulary_are_none():
    assert among([-1, 3, 12], 10).nonzero().flatten().tolist() == [3]


# --- draws --------------------------------------------------------------------------------------------------------


def p_value(drawn: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Of Pearson's chi-squared test; tokens that are expected less than five times are one class."""
    expected = probabilities.double() * drawn.numel()
    counts = torch.bincount(drawn, minlength=expected.numel()).double()
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    kept = expected > 0
    assert counts[~kept].sum() == 0
    statistic = ((counts - expected) ** 2 / expected)[kept].sum()
    return torch.special.gammaincc((kept.sum() - 1).double() / 2, statistic / 2).item()


DRAWS = 100_000


def drawn(scores: torch.Tensor, rows: int) -> torch.Tensor:
    """``DRAWS`` tokens: ``rows`` at each of DRAWS / rows steps."""
    seed = torch.tensor(11)
    each = [sampling.draw(scores.expand(rows, -1), sampling.uniform(seed, torch.tensor(i), rows)) for i in range(DRAWS // rows)]
    return torch.cat(each)


FOLLOWED = [{}, {"temperature": 0.6, "top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"typical_p": 0.7}]


# Options change the scores before anything is drawn: with few rows and many steps one of them is enough.
FEW_ROWS = [pytest.param(options, 1000, marks=[pytest.mark.slow] if options else []) for options in FOLLOWED]


@pytest.mark.parametrize(("options", "rows"), [*((options, 25_000) for options in FOLLOWED), *FEW_ROWS], ids=str)
def test_draws_follow_the_distribution(options, rows):
    scores = (both(**options)[1] if options else scores_of())[5:6, :]
    probabilities = scores.softmax(-1)[0]
    tokens = drawn(scores, rows)
    assert p_value(tokens, probabilities) > 1e-3
    assert (scores[0, tokens] > -torch.inf).all()
    # The test sees a distribution that is off by a tenth of a temperature.
    assert p_value(tokens, (scores * 1.1).softmax(-1)[0]) < 1e-6


def test_successive_tokens_of_a_row_are_independent():
    """A uniform pair of 10 x 10: step i and step i + 1 of one row."""
    scores = torch.zeros(1, 10)
    seed = torch.tensor(5)
    rows = 1000
    steps = torch.stack([sampling.draw(scores.expand(rows, -1), sampling.uniform(seed, torch.tensor(i), rows)) for i in range(101)])
    pairs = (steps[:-1] * 10 + steps[1:]).flatten()
    assert p_value(pairs, torch.full((100,), 0.01)) > 1e-3
    assert p_value((steps[:, :-1] * 10 + steps[:, 1:]).flatten()[:DRAWS], torch.full((100,), 0.01)) > 1e-3


@pytest.mark.parametrize("vocabulary", [1, 2, 511, 512, 513, 1025])
def test_a_token_is_where_the_sum_of_probabilities_passes_the_number(vocabulary):
    scores = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(2))
    scores[0, :: 3 if vocabulary > 1 else 2] = -torch.inf if vocabulary > 2 else 0.0
    upto = scores.double().softmax(-1).cumsum(-1)[0]
    chances = torch.linspace(0, 1 - 2**-53, 700, dtype=torch.float64)
    got = sampling.draw(scores.expand(700, -1), chances)
    wanted = torch.searchsorted(upto, chances * upto[-1], right=True).clamp(max=vocabulary - 1)
    near = (upto[None] - chances[:, None]).abs().amin(-1) < 1e-6  # float32 softmax: on the edge either token is right
    assert torch.equal(got[~near], wanted[~near]) and near.float().mean() < 0.05
    assert (scores[0, got] > -torch.inf).all()


def test_a_compiled_draw_is_the_same_draw():
    """Inductor's own code for integers and for float64."""
    scores, seed, count = scores_of(), torch.tensor(2**40 + 3), torch.tensor(9)

    def choose(scores, seed, count):
        return sampling.draw(scores, sampling.uniform(seed, count, 7))

    compiled = torch.compile(choose, fullgraph=True)
    for i in range(20):
        assert torch.equal(compiled(scores, seed, count + i), choose(scores, seed, count + i))


# One is less than a block, 513 more: compiled, each size is a graph of its own.
COMPILED = [pytest.param(n, True, marks=[] if n in (1, 513) else pytest.mark.slow) for n in (1, 7, 512, 513, 4099)]


@pytest.mark.parametrize(("vocabulary", "compiled"), [*((n, False) for n in (1, 7, 512, 513, 4099)), *COMPILED])
def test_the_largest_is_argmax_with_ties_and_nan(vocabulary, compiled):
    find = torch.compile(sampling.largest) if compiled else sampling.largest
    scores = torch.randint(-3, 3, (6, vocabulary)).float()  # many ties
    scores[1] = -math.inf
    scores[2, vocabulary // 2] = math.nan
    scores[3, -1] = math.inf
    scores[4] = -1e30
    value, token = find(scores)
    assert torch.equal(token, scores.argmax(-1)) and torch.equal(value.nan_to_num(7e37), scores.amax(-1).nan_to_num(7e37))
