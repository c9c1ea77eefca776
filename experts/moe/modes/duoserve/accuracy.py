"""How often a layer's experts are predicted on a trace: by the predictor, and by counting alone."""

from collections.abc import Mapping

from experts.moe.cache.metrics import PredictionCounts
from experts.moe.modes.duoserve.fitting import paths_of
from experts.moe.modes.duoserve.predictor import Predictor
from experts.moe.modes.duoserve.state import known
from experts.moe.statistics import affine_experts, affinity, popular_experts, popularity
from experts.moe.trace import Trace

_TOKENS = 4096  # in one go


def accuracies(trace: Trace, train: Trace, predictors: Mapping[int, Predictor]) -> dict[str, PredictionCounts]:
    """Hits of k predicted experts over all predicted layers of `trace`; counts are those of `train`."""
    found = {"duoserve": PredictionCounts(), "affinity": PredictionCounts(), "popularity": PredictionCounts()}
    own, before = paths_of(trace)
    top_k = trace.index.shape[2]
    for layer, predictor in predictors.items():
        popular = popular_experts(popularity(train)[layer], top_k)
        affine = affine_experts(affinity(train, layer - 1, layer), own.index[:, layer - 1], top_k)
        found["popularity"].add(popular, own.index[:, layer], trace.experts)
        found["affinity"].add(affine, own.index[:, layer], trace.experts)
        for start in range(0, len(trace.index), _TOKENS):
            part = slice(start, start + _TOKENS)
            likely = predictor.probabilities(own.first(known(layer)).rows(part), before.rows(part))
            found["duoserve"].add(likely.topk(top_k).indices, own.index[part, layer], trace.experts)
    return found
