"""How often a layer's experts are predicted on a trace: by the predictor, and by counting alone."""

from collections.abc import Mapping

from experts.moe.duoserve.predictor import Predictor
from experts.moe.metrics import Hits
from experts.moe.statistics import affine_experts, affinity, popular_experts, popularity
from experts.moe.trace import Trace

_TOKENS = 4096  # in one go


def accuracies(trace: Trace, train: Trace, predictors: Mapping[int, Predictor]) -> dict[str, Hits]:
    """Hits of k predicted experts over all predicted layers of `trace`; counts are those of `train`."""
    found = {"duoserve": Hits(), "affinity": Hits(), "popularity": Hits()}
    popular, affine = popularity(train), affinity(train)
    top_k = trace.index.shape[2]
    for layer, predictor in predictors.items():
        for start in range(0, len(trace.index), _TOKENS):
            index = trace.index[start : start + _TOKENS].long()
            weight = trace.weight[start : start + _TOKENS].float()
            chosen = index[:, layer]
            likely = predictor.probabilities(index[:, :layer], weight[:, :layer]).topk(top_k).indices
            found["duoserve"].add(likely, chosen, trace.experts)
            found["affinity"].add(affine_experts(affine[layer - 1], index[:, layer - 1], top_k), chosen, trace.experts)
            found["popularity"].add(popular_experts(popular[layer], top_k), chosen, trace.experts)
    return found
