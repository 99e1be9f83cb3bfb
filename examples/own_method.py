"""A method of one's own: cluster the pool while the known head keeps answering as it did.

It is Learning without Forgetting (Li & Hoiem, 2016) carried over to discovery. A method outside the
package needs no registration: its instance goes to `discover`.
"""

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

import ncdwf
from ncdwf.config import override
from ncdwf.data.augment import Views
from ncdwf.learning.discovery import Method, Outcome, Teacher, best_head
from ncdwf.learning.loop import Terms
from ncdwf.learning.losses import sinkhorn, swapped_prediction
from ncdwf.model import Model, NovelHead
from ncdwf.noise import Draw, Noise


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningWithoutForgetting(Method):
    """Learning without Forgetting (Li & Hoiem, 2016), adapted to discovery without labels."""

    weight_distill: float = 3.0

    def prepare(self, model: Model, num_novel: int, *, seed: int) -> tuple[Model, nn.Module]:
        """Give the model a novel head; keep a frozen copy of it as it was."""
        head = NovelHead(num_novel=num_novel, num_heads=3, num_hidden=128, num_projected=64)
        return model.with_novel(head, identifier=False, seed=seed), Teacher(model)

    def noise(self, state: nn.Module, batch_size: int) -> dict[str, Draw]:
        """Draw nothing beside the views."""
        return {}

    def loss(
        self, model: Model, views: Views, state: nn.Module, progress: Tensor, noise: Noise
    ) -> Terms:
        """Swapped prediction on the pool, and the teacher's answers for the known head."""
        teacher, temperature = cast(Teacher, state), model.architecture.temperature
        images = views.large.flatten(0, 1)
        features = model.backbone(images)
        assert model.novel_head is not None
        novel = model.novel_head(features).unflatten(1, (len(views.large), -1))
        target = teacher.known_logits(teacher.features(images)) / temperature
        known = model.known_head(features) / temperature
        return {
            "cluster": swapped_prediction((novel / temperature).log_softmax(-1), sinkhorn(novel)),
            "distill": self.weight_distill * F.cross_entropy(known, target.softmax(1)),
        }

    def finish(self, model: Model, state: nn.Module, outcome: Outcome) -> None:
        """Choose the head; without an identifier a joint softmax routes."""
        model.best_head.fill_(best_head(outcome.history))


if __name__ == "__main__":
    config = override(ncdwf.recipe("digits-5-5"), "discovery.optim.epochs=30")
    split = ncdwf.Setting.parse(config.setting).load()
    known = ncdwf.learn_known(split.known_images, split.known_labels, config)
    model = ncdwf.discover(known, split.pool_images, LearningWithoutForgetting(), config)
    print(ncdwf.evaluate(model, split, known)[0].aware)
