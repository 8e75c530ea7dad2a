"""Prompts become greedy continuations, all ranks together. Its rule: rank 0 says which token comes next."""

from collections.abc import Sequence

import torch
from torch import Tensor

from burnish.backends.comm import Ranks
from burnish.models.attention import Segments
from burnish.models.loss import LossModel


@torch.no_grad()
def continuation(
    model: LossModel, prompt: Sequence[int], *, stops: frozenset[int], max_new_tokens: int, ranks: Ranks
) -> list[int]:
    """The most likely token after ``prompt``, the most likely one after that, and so on, up to one of ``stops``."""
    ids, answer = list(prompt), list[int]()
    while len(answer) < max_new_tokens:
        # Two ranks may find another one likeliest when two are equally likely, and all must do the same next.
        token = ranks.gather(int(_last_logits(model, ids + answer, device=ranks.device).argmax()))[0]
        if token in stops:
            break
        answer.append(token)
    return answer


def _last_logits(model: LossModel, ids: Sequence[int], *, device: torch.device) -> Tensor:
    segments = Segments.whole(1, length=len(ids))
    positions = torch.from_numpy(segments.positions()).to(device)
    return model.last_logits(torch.tensor([ids], device=device), position_ids=positions, segments=segments)
