"""DuoServe's decisions, its predictor's input, and a predictor that learns what counting cannot see."""

from dataclasses import replace

import torch

from experts.moe.modes.duoserve.accuracy import accuracies
from experts.moe.modes.duoserve.fitting import DuoServeRecipe, fit_layer, paths_of, states_of
from experts.moe.modes.duoserve.predictor import Predictor
from experts.moe.modes.duoserve.state import Paths, StateConstructor, StateShape, known
from experts.moe.policy.duoserve import first_of_prefill, likeliest, plan_prefetch
from experts.moe.statistics import affinity
from experts.moe.trace import Trace

SMALL = DuoServeRecipe(widths=(64, 32), tokens=12_000, batch=128)


def a_trace(tokens=2000, layers=4, experts=8, seed=0):
    """Routing with a plan: a token's experts follow from those of its first layer, and these from the token before."""
    draw = torch.Generator().manual_seed(seed)
    first = torch.randint(0, 2, (tokens,), generator=draw).cumsum(0) % experts
    second = (first + 1 + torch.arange(tokens) % 2) % experts
    layers_index = [torch.stack([first, second], 1)]
    for layer in range(1, layers):
        lead = (first * 3 + second * layer) % experts
        layers_index.append(torch.stack([lead, (lead + 1 + second % (experts - 1)) % experts], 1))
    index = torch.stack(layers_index, 1)
    return Trace(
        index=index.to(torch.int16),
        weight=torch.tensor([0.7, 0.3], dtype=torch.float16).expand(index.shape).contiguous(),
        token=torch.zeros(tokens, dtype=torch.int32),
        decode=torch.ones(tokens, dtype=torch.bool),
        start=torch.tensor([0, tokens]),
        task=torch.zeros(1, dtype=torch.int16),
        tasks=("plan",),
        experts=experts,
    )


def test_a_token_names_its_likeliest_experts_and_a_batch_their_union_most_needed_first():
    assert likeliest([[0.1, 0.9, 0.3, 0.2]], 2) == (1, 2)
    assert likeliest([[0.1, 0.9, 0.3, 0.0], [0.0, 0.1, 0.8, 0.7]], 2) == (1, 2, 3)


def test_ties_between_experts_go_to_the_lower_number():
    assert likeliest([[0.5, 0.5, 0.5, 0.5]], 2) == (0, 1)


def test_predicted_experts_that_are_there_stay_and_the_others_are_fetched_as_far_as_a_layer_holds():
    plan = plan_prefetch([[0.1, 0.9, 0.3, 0.2], [0.8, 0.0, 0.7, 0.0]], resident=(2, 3), slots=2, width=2)
    assert (plan.keep, plan.fetch) == ((), (1, 0))
    assert plan_prefetch([[0.1, 0.9, 0.3, 0.2]], resident=(1, 2), slots=4, width=2).fetch == ()


def test_a_prefill_begins_with_the_first_absent_expert_that_its_tokens_are_expected_to_need():
    popular = [0.0, 0.4, 0.3, 0.3]
    assert first_of_prefill(popular, resident=(), tokens=8, top_k=2) == 1
    assert first_of_prefill(popular, resident=(1,), tokens=8, top_k=2) == 2
    assert first_of_prefill(popular, resident=(1, 2, 3), tokens=8, top_k=2) is None
    assert first_of_prefill(popular, resident=(), tokens=1, top_k=2) is None


def test_rows_of_the_affinity_matrix_are_distributions_over_the_next_layer():
    trace = a_trace()
    for layer in (1, 2, 3):
        assert torch.allclose(affinity(trace, layer - 1, layer).sum(-1), torch.ones(8))


def test_a_state_holds_the_path_so_far_and_the_one_before_then_popularity_then_affinity_of_what_was_chosen():
    shape = StateShape(layers=2, experts=3, top_k=2)
    states = StateConstructor(shape, 1, torch.tensor([0.5, 0.25, 0.25]), torch.eye(3))
    sofar = Paths(torch.tensor([[[2, 0]], [[1, 3]]]), torch.tensor([[[0.75, 0.25]], [[1.0, 0.0]]]))  # 3: no expert
    before = Paths(torch.tensor([[[0, 1], [2, 1]]] * 2), torch.tensor([[[0.5, 0.5], [0.75, 0.25]]] * 2))
    state = states.build(sofar, before)
    assert state.shape == (2, shape.size)
    own, other, popular, affine = state.split([shape.path, shape.path, 3, 6], dim=1)
    chosen, weight = own.view(2, 2, 2, 3).unbind(1)
    assert chosen[0].tolist() == [[1, 0, 1], [0, 0, 0]]  # the second layer has not spoken
    assert chosen[1].tolist() == [[0, 1, 0], [0, 0, 0]]
    assert weight[0, 0].tolist() == [0.25, 0, 0.75]
    assert other[0].tolist() == [1, 1, 0, 0, 1, 1, 0.5, 0.5, 0, 0, 0.25, 0.75]
    assert popular[0].tolist() == [1.5, 0.75, 0.75]
    assert affine.tolist() == [[0, 0, 3, 3, 0, 0], [0, 3, 0, 0, 0, 0]]


def test_the_first_token_of_a_prompt_has_no_path_before_it():
    trace = replace(a_trace(tokens=6), start=torch.tensor([0, 2, 6]), task=torch.zeros(2, dtype=torch.int16))
    own, before = paths_of(trace)
    assert before.index[[0, 2]].unique().tolist() == [trace.experts]
    assert torch.equal(before.index[[1, 3]], own.index[[0, 2]])


def test_the_predictor_learns_paths_that_affinity_and_popularity_cannot_see():
    train, held_out = a_trace(), a_trace(tokens=500, seed=1)
    networks = {layer: fit_layer(train, layer, SMALL, lambda *_: None) for layer in (1, 2, 3)}
    predictors = {layer: Predictor.of(states_of(train, layer), network.folded()) for layer, network in networks.items()}
    found = accuracies(held_out, train, predictors)
    assert found["duoserve"].all_rate > found["affinity"].all_rate + 0.1
    assert found["duoserve"].all_rate > 2 * found["popularity"].all_rate
    assert found["duoserve"].any_rate > 0.9


def test_the_same_trace_and_seed_make_the_same_network():
    trace = a_trace(tokens=300)
    first, second = (fit_layer(trace, 1, SMALL, lambda *_: None) for _ in range(2))
    assert all(torch.equal(one, two) for one, two in zip(first.parameters(), second.parameters(), strict=True))


def test_a_folded_predictor_says_what_its_network_says():
    trace = a_trace(tokens=300)
    network = fit_layer(trace, 2, SMALL, lambda *_: None)
    own, before = paths_of(trace)
    sofar = own.first(known(2))
    expected = network(states_of(trace, 2).build(sofar, before)).sigmoid()
    predictor = Predictor.of(states_of(trace, 2), network.folded())
    assert torch.allclose(predictor.probabilities(sofar, before), expected, atol=0.02)
    alone = [
        predictor.probabilities(sofar.rows(slice(n, n + 2)), before.rows(slice(n, n + 2))) for n in range(0, 20, 2)
    ]
    assert torch.allclose(torch.cat(alone), expected[:20], atol=0.02)
